"""train.py as its users run it, in processes that tests start, watch, signal and kill.

They are forked from a server process that has already imported everything, which saves seconds per run. The server is
`python -m tests.training.launching`; it receives commands as lines of JSON.
"""

import copy
import functools
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # imported by every optimizer

import ligermodels.cli  # noqa: F401  all that a run imports, once for all runs
from ligermodels.training.objectives import evaluation
from ligermodels.training.reporting.metrics import read_metrics
from tests.forking import rank_environments, shrink_embedded_data
from tests.training.file_operations import FileOperations

loop = importlib.import_module("ligermodels.training.loop")
ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "train.py"
TIMEOUT = 800  # seconds, after which a run is killed


class Run:
    """A run of one or more processes. The output is that of the first."""

    def __init__(self, launcher, processes, output, errors):
        self.launcher, self.processes, self.output, self.errors = launcher, processes, output, errors
        self.stdout = ""

    def read_until(self, beginning):
        """Returns the first line that starts with `beginning`, as soon as it is printed."""
        for line in self.output:
            self.stdout += line
            if line.startswith(beginning):
                return line
        raise AssertionError(f"no line {beginning!r} in\n{self.stdout}{self.stderr}")

    def kill(self, number, rank=0):
        os.kill(self.processes[rank], number)
        return self

    def wait(self):
        """Waits until all processes have ended, and returns itself. `status`: exit status of the first process."""
        with self.output:
            self.stdout += self.output.read()
        self.statuses = [self.launcher.ask(wait=process) for process in self.processes]
        self.status = self.statuses[0]
        return self

    @property
    def stderr(self):
        return self.errors.read_text()

    @property
    def last_lines(self):
        return self.stdout.splitlines()[-3:]


class Launcher:
    """Starts runs in `folder`. A context manager. hub: what these runs find in place of the Hub."""

    def __init__(self, folder):
        self.folder, self.hub = folder, folder / ".hub"
        self.count = 0

    def __enter__(self):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"TRITON_INTERPRET": "0", "XDG_CACHE_HOME": str(self.folder / ".cache")}
        environment |= {"HF_HUB_CACHE": str(self.hub), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.launching"], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        return self

    def __exit__(self, *_):
        self.process.communicate()

    def within(self, folder):
        """Returns a launcher of the same processes that starts them in another folder."""
        other = copy.copy(self)
        other.folder = folder
        return other

    def ask(self, **question):
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def start(self, *arguments, ranks=1, module=None, file_size=None, picture=False, watched=None, fatal=None):
        """Starts a run and returns it.

        module: to run in place of train.py. file_size: limit of the size of a file, in bytes. picture: whether
        curves.png is drawn, which takes longer than the training. watched: the folder whose file operations are
        counted; at the one with the number `fatal` the run is killed. torch.compile traces, but does not compile.
        """
        self.count += 1
        output, errors = (self.folder / ".runs" / f"{self.count}.{name}" for name in ("out", "err"))
        output.parent.mkdir(exist_ok=True)
        os.mkfifo(output)
        command = {
            "arguments": [str(argument) for argument in arguments], "folder": str(self.folder), "output": str(output),
            "errors": str(errors), "module": module, "file_size": file_size, "picture": picture,
            "watched": watched, "fatal": fatal,
        }  # fmt: skip
        environments = [{}]
        if ranks > 1:
            self.store, environments = rank_environments(ranks)  # it serves them until other ranks start
        processes = [self.ask(**command, environment=environment) for environment in environments]
        return Run(self, processes, output.open(), errors)

    def run(self, *arguments, **options):
        return self.start(*arguments, **options).wait()

    def succeed(self, *arguments, **options):
        """Makes a run that must succeed."""
        done = self.run(*arguments, **options)
        assert not any(done.statuses), (done.statuses, done.stdout, done.stderr)
        return done


def losses(folder):
    return [record["loss"] for record in records(folder) if "loss" in record]


def records(folder):
    return read_metrics(folder / "metrics.jsonl")


def weights(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


def child(command):
    """Turns the forked process into the run; never returns."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(TIMEOUT)
    os.environ.update(command["environment"])
    os.chdir(command["folder"])
    first = os.environ.get("RANK", "0") == "0"
    output = os.open(command["output"] if first else os.devnull, os.O_WRONLY)
    errors = os.open(command["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, descriptor in enumerate([os.open(os.devnull, os.O_RDONLY), output, errors]):
        os.dup2(descriptor, number)
    if command["file_size"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (command["file_size"], command["file_size"]))
    torch.compile = functools.partial(torch.compile, backend="eager")
    if not command["picture"]:
        loop.draw_curves = lambda *_: None
    sys.argv = ["train.py", *command["arguments"]]
    status = 0
    if command["watched"]:
        operations = FileOperations(command["watched"], command["fatal"])
    try:
        if command["module"]:
            runpy.run_module(command["module"], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(TRAIN), run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        if command["watched"]:
            print(f"{operations.seen} file operations")
        sys.stdout.flush()
        os._exit(status)


def main():
    gc.freeze()  # a garbage collection in a child would copy all that the server has imported
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            answer = os.waitstatus_to_exitcode(os.waitpid(question["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                child(question)
        print(answer, flush=True)


if __name__ == "__main__":
    shrink_embedded_data()
    evaluation.SAMPLE_TOKENS = 10  # on several ranks each token takes as long as a step
    main()
