"""Selection, execution and accounting of the suite: `python -m tests.lanes fast|all`.

Imports nothing of the product: the runner starts pytest processes, and only these configure Django."""
