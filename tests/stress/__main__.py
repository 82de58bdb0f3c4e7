"""Kills training runs at every file operation and at random moments; prints the outcome as JSON.

    python -m tests.stress --kills 500 --seed 0

Ends with a traceback if anything that was committed is lost, or differs from a run that was not killed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.stress.runs import stress
from tests.training.launching import Launcher


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    memory, begun = Path("/dev/shm"), time.monotonic()
    with (
        tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder,
        Launcher(Path(folder)) as launcher,
    ):
        outcome = stress(launcher, args.kills, args.seed, say=lambda outcome: print(outcome, file=sys.stderr))
    print(json.dumps(outcome | {"seconds": round(time.monotonic() - begun)}))


if __name__ == "__main__":
    main()
