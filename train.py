"""The command `ligermodels train`, from a checkout: python train.py --model qwen2."""

import sys

from ligermodels.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
