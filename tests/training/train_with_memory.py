"""train.py on devices that have a known memory: train_with_memory.py BYTES FLAGS."""

import sys

from ligermodels.cli import main
from ligermodels.training import preparing

if __name__ == "__main__":
    preparing.usable_memory = lambda world: float(sys.argv[1])
    sys.exit(main(["train", *sys.argv[2:]]))
