"""Trains in processes that are killed at random moments, and checks the files on the disk after each kill.

Half of the processes are killed from outside at a random time; half during a save, at a randomly chosen call of fsync.

Usage: killing.py FOLDER KILLS SEED. Prints the outcome as JSON. This process is forked from one that has imported
everything, and has no other thread, so that it can fork a child in milliseconds.
"""

import gc
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

from ligermodels.training.checkpoints import Checkpoints, Progress, files
from ligermodels.training.run.folder import locked
from tests.training.checkpoints.checkpointing import new_run, state_of, train
from tests.training.file_operations import kill_self_at_fsync

STEPS = 12
GIVE_UP = 600  # seconds


def train_to_the_end(folder, report):
    """Trains from the last checkpoint to the last step, and saves a checkpoint at every step."""
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
    """A forked run and the lines that it has reported."""

    def __init__(self, folder, fatal=None):
        """fatal: the call of fsync, counted from 1, at which it kills itself."""
        self.pipe, write = os.pipe()
        self.text = ""
        self.process = os.fork()
        if self.process == 0:
            status = 1
            try:
                if fatal:
                    kill_self_at_fsync(fatal)
                train_to_the_end(folder, lambda line: os.write(write, f"{line}\n".encode()))
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(status)
        os.close(write)

    def listen(self, seconds, until=None):
        """Reads reports for `seconds`, or until a line starts with `until`. Returns False if the process has ended."""
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
        self.listen(GIVE_UP)

    def end(self):
        """Returns whether the process was killed, and its exit status."""
        os.close(self.pipe)
        status = os.waitpid(self.process, 0)[1]
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status

    def reported(self, kind):
        return [line.split()[1] for line in self.text.splitlines() if line.startswith(f"{kind} ")]


def main(folder, kills, seed):
    chance = random.Random(seed)
    undisturbed: list[str] = []
    train_to_the_end(folder / "undisturbed", undisturbed.append)  # imports all lazy parts of torch before the forks
    gc.freeze()  # a garbage collection in a child would copy all of it
    begun, child = time.monotonic(), Child(folder / "timed")
    child.listen(GIVE_UP, "committed")
    usual = time.monotonic() - begun
    child.kill()
    child.end()
    outcome = {"kills": 0, "during a save": 0, "runs": 0, "same": True, "steps": set()}
    while outcome["kills"] < kills:
        outcome["runs"] += 1
        run, last, child = folder / f"run-{outcome['runs']}", 0, None
        while not (child and child.reported("digest")):
            left = kills - outcome["kills"]
            saving = left and chance.random() < 0.5
            child = Child(run, fatal=chance.randrange(1, 20) if saving else None)
            if child.listen(chance.uniform(0.0, 2.5 * usual) if left and not saving else GIVE_UP):
                child.kill()
            killed, status = child.end()
            assert killed or status == 0, child.text
            outcome["kills"] += killed
            outcome["during a save"] += bool(killed and saving)
            # Every step reported as committed is on the disk, undamaged, and the next process resumed from it.
            found = files.committed_steps(run / "checkpoints")
            assert not child.reported("restored") or int(child.reported("restored")[0]) >= last
            last = max([last, *map(int, child.reported("committed"))])
            assert [step for step in map(files.checkpoint_step, found) if step >= last] or not last
            for checkpoint in found:
                files.verify_files(checkpoint, 0, 1)
            outcome["steps"].add(files.checkpoint_step(found[-1]) if found else 0)
        outcome["same"] &= [f"digest {digest}" for digest in child.reported("digest")] == undisturbed[-1:]
        names = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert names[-2:] == [f"step-{step:06d}" for step in (STEPS - 1, STEPS)], names
        assert len(names) == 2 or child.reported("restored") == [str(STEPS)], (
            names
        )  # killed before it removed the oldest one
    print(json.dumps(outcome | {"steps": len(outcome["steps"])}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
