"""train.py on devices that have a known memory: train_with_memory.py BYTES FLAGS."""

import sys

from ligermodels.cli import main
from ligermodels.training.scaling import activation_checkpointing

if __name__ == "__main__":
    activation_checkpointing.usable_memory = lambda world: float(sys.argv[1])
    sys.exit(main(["train", *sys.argv[2:]]))
