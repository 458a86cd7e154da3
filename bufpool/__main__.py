"""``python -m bufpool``: the command line."""

import sys

from bufpool.cli import main

if __name__ == "__main__":
    sys.exit(main())
