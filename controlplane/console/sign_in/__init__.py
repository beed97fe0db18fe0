"""Sign-in of operators to the console: throttle, session limits, second factor, sign-in by a trusted proxy, log of sign-ins.

Imports no other part of the console, which knows the user of a request only."""
