"""Processes forked from ones that have imported the libraries, which saves seconds for each.

Functions of tests run in `start`'s. The tests' own process is not forked for them: it has threads of libraries, whose
locks a child would find taken forever. Scripts run in those of a server, `python -m tests.forking`, which receives
them as lines of JSON. That server imports the other libraries alone: a script imports ligermodels itself.
"""

import functools
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch._dynamo", "torch.distributed.tensor", "transformers.trainer", "peft", "matplotlib.pyplot")

CLEAN = multiprocessing.get_context("forkserver")
CLEAN.set_forkserver_preload(["ligermodels.training"])


def start(function, *arguments):
    """Starts a process that calls `function(ready, *arguments)`; returns it when it has called `ready()`."""
    told, teller = CLEAN.Pipe(duplex=False)
    process = CLEAN.Process(target=function, args=(functools.partial(teller.send, None), *arguments))
    process.start()
    teller.close()
    with told:
        told.recv()
    return process


class ScriptServer:
    """Runs scripts on the CPU, offline. A context manager."""

    def __enter__(self):
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.forking"], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        return self

    def __exit__(self, *_):
        self.process.communicate()

    def run(self, script, folder, **environment):
        """Runs a script in `folder`, waits, and returns (exit status, what it wrote to stdout and stderr)."""
        output = Path(folder) / "output.txt"
        question = {"script": str(script), "folder": str(folder), "output": str(output), "environment": environment}
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline()), output.read_text()


def run_script(script, folder, output, environment):
    """Never returns. Nothing is taken down: that would take longer than most scripts."""
    os.environ.update(environment)
    os.chdir(folder)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, descriptor in enumerate([os.open(os.devnull, os.O_RDONLY), written, written]):
        os.dup2(descriptor, number)
    sys.argv, sys.path[0] = [script], str(Path(script).parent)
    status = 1
    try:
        runpy.run_path(script, run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def main():
    gc.freeze()  # a garbage collection in a child would copy all that the server has imported
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run_script(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    for library in LIBRARIES:
        importlib.import_module(library)
    main()
