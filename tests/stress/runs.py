"""Training runs that are killed and resumed, and compared bit for bit with a run that was not killed.

Part of the kills hit every operation that changes a file of a new and of a resumed run, one after the other; where that
is more than half of the kills, a random choice of the operations. The others hit random moments, several of them one
run. Compared are the losses, the validations, the newest checkpoint (trained weights, optimizer states, random states)
and the exported folder, which is that of a best checkpoint before the last.
"""

import random
import shutil
import signal
import time

import torch

import ligermodels
from ligermodels.training.checkpoints.files import checkpoint_step, committed_steps, verify_files
from ligermodels.training.data.embedded_stories import stories, vocabulary_texts
from ligermodels.training.data.run_tokenizer import save_tokenizer, train_tokenizer
from ligermodels.training.optimizers.update_check import CHANGED, CHANGED_EXACTLY, SIZE
from ligermodels.training.reporting.metrics import METRICS_FILE
from tests.cases import LLAMA
from tests.training.launching import records

VOCABULARY = 300
# LoRA with dropout over a pretrained model: frozen weights, random states and a validation before the first step.
RUN = ["--model", "base", "--data", "own.txt", "--steps", "6", "--batch-size", "2", "--sequence-length", "32"]
RUN += ["--warmup", "1", "--eval-every", "3", "--checkpoint-every", "2", "--lora-rank", "2", "--lora-dropout", "0.3"]
RUN += ["--validation-fraction", "0.01", "--best-checkpoint", "--lora-alpha", "32"]
# So high that step 3 is better than step 6; with which of them depends on the last bits of the processor's products.
LEARNING_RATES = ("0.03", "0.07", "0.1", "0.15", "0.5", "1.0", "2.0")
# What a process measures of itself: its speed, and the updates that it has sampled since it began.
MEASURED = {"tokens_per_second", "seconds_left", "mfu", CHANGED, CHANGED_EXACTLY, SIZE}


class Stress:
    """Runs that are killed, in the launcher's folder. kills: how many there were, of each kind."""

    def __init__(self, launcher, seed):
        self.launcher, self.chance = launcher, random.Random(seed)
        self.kills = {"at a file operation": 0, "at a random moment": 0}
        self.runs = self.resumes = 0
        self.undisturbed = launcher.folder / "undisturbed"
        self.settings = self.run_undisturbed()
        self.half = self.stopped_halfway()
        begun = time.monotonic()
        self.operations = {"new": self.count_operations(self.new_folder())}
        self.usual = time.monotonic() - begun  # seconds
        self.operations["resumed"] = self.count_operations(shutil.copytree(self.half, self.new_folder()))

    def run_undisturbed(self):
        """Makes the run that is not killed, which also fills the cache of tokenised data; returns its settings."""
        for rate in LEARNING_RATES:
            settings = [*RUN, "--learning-rate", rate]
            done = self.launcher.succeed(*settings, "--output", self.undisturbed.name)
            if "step 3 has the lowest validation loss" in done.stdout:
                return settings
            shutil.rmtree(self.undisturbed)
        raise AssertionError(f"step 6 is the best at all of {LEARNING_RATES}")

    def count_operations(self, folder):
        done = self.launcher.succeed(*self.command(folder), watched=folder.name)
        self.compare(folder)
        return int(done.last_lines[-1].removesuffix(" file operations"))

    def stopped_halfway(self):
        """A run that was killed after step 3, its validation and its checkpoint, which is the one to export."""
        half = shutil.copytree(self.undisturbed, self.launcher.folder / "half")
        shutil.rmtree(half / "model")
        for checkpoint in committed_steps(half / "checkpoints")[1:]:
            shutil.rmtree(checkpoint)
        return half

    def at_file_operation(self, kind, number):
        """A new or a resumed run, which is killed at its operation of this number."""
        folder = self.new_folder()
        if kind == "resumed":
            shutil.copytree(self.half, folder)
        killed = self.launcher.run(*self.command(folder), watched=folder.name, fatal=number)
        assert killed.status == -signal.SIGKILL, (kind, number, killed.status, killed.stdout, killed.stderr)
        self.kills["at a file operation"] += 1
        self.finish(folder)

    def at_random_moments(self, most):
        """A run that is killed from one to `most` times."""
        folder = self.new_folder()
        for _ in range(self.chance.randint(1, most)):
            run = self.launcher.start(*self.command(folder))
            time.sleep(self.chance.uniform(0, 1.1 * self.usual))
            run.kill(signal.SIGKILL).wait()
            if run.status != -signal.SIGKILL:  # it was faster
                assert run.status == 0, (run.status, run.stdout, run.stderr)
                self.usual *= 0.8
                break
            self.kills["at a random moment"] += 1
            self.usual *= 1.05  # the load of the machine changes: about one run in five is to be faster
            if is_finished(folder):
                break
        self.finish(folder)

    def new_folder(self):
        self.runs += 1
        return self.launcher.folder / f"run-{self.runs}"

    def command(self, folder):
        """The command that goes on: --resume, or that of a new run if there is nothing to resume."""
        if (folder / "train.toml").exists():
            return ["--resume", folder.name]
        return [*self.settings, "--output", folder.name]

    def finish(self, folder):
        """Lets the run go on to its end, from the last step that was committed, and compares it."""
        if not is_finished(folder):
            committed = committed_steps(folder / "checkpoints")
            for checkpoint in committed:
                verify_files(checkpoint, 0, 1)
            done = self.launcher.succeed(*self.command(folder))
            self.resumes += 1
            last = checkpoint_step(committed[-1]) if committed else 0
            assert f"{folder.name}: resumes after step {last}\n" in done.stdout or not last, done.stdout
        self.compare(folder)
        shutil.rmtree(folder)

    def compare(self, folder):
        expected = self.undisturbed
        assert recorded(folder) == recorded(expected), folder
        assert files_of(folder / "model") == files_of(expected / "model"), folder
        newest = [committed_steps(path / "checkpoints")[-1] for path in (folder, expected)]
        assert newest[0].name == newest[1].name, folder
        name = "rank-00000.safetensors"
        assert (newest[0] / name).read_bytes() == (newest[1] / name).read_bytes(), folder
        names = [{path.name for path in path.iterdir()} for path in (folder, expected)]
        assert names[0] == names[1], (folder, names)
        assert not [path for path in (folder / "checkpoints").iterdir() if path.suffix == ".tmp"], folder

    def outcome(self):
        return {"kills": sum(self.kills.values())} | self.kills | {"resumes": self.resumes} | self.operations


def is_finished(folder):
    """Whether the run has an export, and has recorded that it is complete."""
    if not (folder / "model").exists() or not (folder / METRICS_FILE).exists():
        return False
    return any("exported" in record for record in records(folder))


def recorded(folder):
    """The records of metrics.jsonl without what a process measures of itself: losses, validations, samples."""
    return [{name: record[name] for name in record if name not in MEASURED} for record in records(folder)]


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stress(launcher, kills, seed, say=lambda outcome: None):
    """Makes at least this many kills; returns the outcome. Raises AssertionError if anything was lost or differs.

    launcher: starts the runs, in its folder. say: gets the outcome so far after every run.
    """
    torch.manual_seed(0)  # the losses must be those for which LEARNING_RATES were chosen
    model = ligermodels.create(LLAMA | {"vocab_size": VOCABULARY})
    ligermodels.export(model, launcher.folder / "base")
    save_tokenizer(train_tokenizer(vocabulary_texts(), VOCABULARY), launcher.folder / "base")
    (launcher.folder / "own.txt").write_text("\n".join(text for text, _ in stories(3, 40)))
    stressed = Stress(launcher, seed)
    every = [(kind, n) for kind, total in stressed.operations.items() for n in range(1, total + 1)]
    for kind, number in every if len(every) <= kills // 2 else stressed.chance.sample(every, kills // 2):
        stressed.at_file_operation(kind, number)
        say(stressed.outcome())
    while (left := kills - sum(stressed.kills.values())) > 0:
        stressed.at_random_moments(min(3, left))
        say(stressed.outcome())
    return stressed.outcome()
