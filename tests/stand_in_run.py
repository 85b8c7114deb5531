"""The command mpiflow where --device cuda finds the stand-in of tests/gpu_stand_in.py: one GPU.

python tests/stand_in_run.py run FILE.py --device cuda
"""

import sys

from gpu_stand_in import StandIn

from mpiflow.cli import main
from mpiflow.exec import cuda

if __name__ == "__main__":
    cuda.load = StandIn
    sys.exit(main())
