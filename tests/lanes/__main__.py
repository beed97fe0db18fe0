"""Command line of `make test` and `make test-all`: python -m tests.lanes fast|all [ARGUMENTS]."""

import sys

from tests.lanes import command

if __name__ == "__main__":
    sys.exit(command.main(sys.argv[1:]))
