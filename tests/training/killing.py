"""Trains in processes that are killed at random moments, and checks after each what is on the disk.

Usage: killing.py FOLDER KILLS SEED. Prints as JSON what happened. Children are forked by this process, which has
imported everything and has no other thread, so that a life costs milliseconds.
"""

import hashlib
import json
import os
import random
import select
import signal
import sys
import time
import warnings
from pathlib import Path

import torch

from ligermodels.training import checkpoint_files as files
from ligermodels.training.checkpoints import Checkpoints, Progress
from ligermodels.training.run_folder import locked
from tests.training.checkpointing import new_run, state_of, train

STEPS = 12


def life(folder, report):
    """One run: from the last checkpoint to the end, with a checkpoint each step."""
    with locked(folder), Checkpoints(folder / "checkpoints", 2, {}) as checkpoints:
        model, optimizer = new_run()
        progress = checkpoints.restore(model, optimizer, print) or Progress()
        report(f"restored {progress.step}")
        for step in range(progress.step, STEPS):
            train(model, optimizer, [step])
            report(f"saving {step + 1}")
            checkpoints.save(model, optimizer, Progress(step=step + 1))
            checkpoints.wait()
            report(f"committed {step + 1}")
        report(f"digest {digest(model, optimizer)}")


def digest(model, optimizer):
    hashed = hashlib.sha256()
    for name, value in sorted(state_of(model, optimizer).items()):
        hashed.update(name.encode() + value.numpy().tobytes())
    return hashed.hexdigest()


class Child:
    """A forked life and what it has reported."""

    def __init__(self, folder):
        self.pipe, write = os.pipe()
        self.text = ""
        self.process = os.fork()
        if self.process == 0:
            status = 1
            try:
                life(folder, lambda line: os.write(write, f"{line}\n".encode()))
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(status)
        os.close(write)

    def listen(self, seconds, until=None):
        """Whether it lives on after so long, or until it reports a line that starts so."""
        end = time.monotonic() + seconds
        while select.select([self.pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            data = os.read(self.pipe, 65536).decode()
            if not data:
                return False
            self.text += data
            if until and f"\n{until}" in f"\n{self.text}":
                break
        return True

    def kill(self):
        os.kill(self.process, signal.SIGKILL)
        self.listen(60)

    def end(self):
        """Its exit status; 0 also where it was killed."""
        os.close(self.pipe)
        status = os.waitpid(self.process, 0)[1]
        return 0 if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else status

    def reported(self, kind):
        return [line.split()[1] for line in self.text.splitlines() if line.startswith(f"{kind} ")]


def main(folder, kills, seed):
    chance = random.Random(seed)
    undisturbed: list[str] = []
    life(folder / "undisturbed", undisturbed.append)  # here, so that children find all of torch's lazy parts imported
    begun, child = time.monotonic(), Child(folder / "timed")
    child.listen(60, "committed")
    usual = time.monotonic() - begun
    child.kill()
    child.end()
    outcome = {"kills": 0, "during a save": 0, "runs": 0, "same": True, "steps": set()}
    while outcome["kills"] < kills:
        outcome["runs"] += 1
        run, last, child = folder / f"run-{outcome['runs']}", 0, None
        while not (child and child.reported("digest")):
            child = Child(run)
            if outcome["kills"] < kills:
                if chance.random() < 0.5:  # in the middle of a save
                    child.listen(60, "saving")
                    alive = child.listen(chance.uniform(0.0, 0.7 * usual))
                else:
                    alive = child.listen(chance.uniform(0.0, 2.5 * usual))
                if alive:
                    child.kill()
                    outcome["kills"] += 1
                    outcome["during a save"] += any((run / "checkpoints").glob("*.tmp/*"))
            else:
                child.listen(60)
            assert child.end() == 0, child.text
            # Whatever was said to be committed is there, whole, and was what the next life began with.
            there = files.committed_steps(run / "checkpoints")
            assert not child.reported("restored") or int(child.reported("restored")[0]) >= last
            last = max([last, *map(int, child.reported("committed"))])
            assert [step for step in map(files.step_of, there) if step >= last] or not last
            for checkpoint in there:
                files.verify(checkpoint, 0, 1)
            outcome["steps"].add(files.step_of(there[-1]) if there else 0)
        outcome["same"] &= [f"digest {digest}" for digest in child.reported("digest")] == undisturbed[-1:]
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
            f"step-{step:06d}" for step in (STEPS - 1, STEPS)
        ]
    print(json.dumps(outcome | {"steps": len(outcome["steps"])}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
