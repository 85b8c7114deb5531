"""python -m mpiflow: the same as the command `mpiflow`."""

import sys

from mpiflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
