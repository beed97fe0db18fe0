"""Export of a month's charges in the FinOps Open Cost and Usage Specification (FOCUS), version 1.0.

Imports no API, admin or command. The sum of BilledCost of an account's month is the total of its statement.

- `charges`: statement lines and cost records as charges.
- `rows`: charges as rows with the columns of the specification.
- `export`: rows of a month, and their CSV."""
