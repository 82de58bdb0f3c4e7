"""Processes forked from ones that have imported the libraries, which saves seconds for each.

Functions of tests run in `start`'s. The tests' own process is not forked for them: it has threads of libraries, whose
locks a child would find taken forever. Scripts run in those of a server, `python -m tests.forking`, which receives
them as lines of JSON.
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

import torch.distributed as dist

ROOT = Path(__file__).parents[1]
LIBRARIES = (
    *("torch._dynamo", "torch.distributed.tensor", "transformers.trainer", "peft", "matplotlib.pyplot"),
    *("ligermodels.cli", "ligermodels.training.loop"),  # all that a run imports
)

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

    def run(self, script, folder, *arguments, ranks=1, **environment):
        """Runs a script in `folder`, waits, and returns (exit status, what it wrote to stdout and stderr).

        Of several ranks, which are told what torchrun would tell them, the first status that is not 0.
        """
        output = Path(folder) / "output.txt"
        store, environments = (None, [{}]) if ranks == 1 else rank_environments(ranks)
        question = {"script": str(script), "arguments": arguments, "folder": str(folder), "output": str(output)}
        question["environments"] = [environment | of_rank for of_rank in environments]
        print(json.dumps(question), file=self.process.stdin, flush=True)
        status = int(self.process.stdout.readline())
        del store  # until here it serves the ranks
        return status, output.read_text()


def rank_environments(ranks):
    """The rendezvous store, which is in this process, and the variables that torchrun would set for each rank."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    return store, [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def shrink_embedded_data():
    """Runs get a few of the embedded stories and chats: to make all, and to answer questions about them, takes most of
    a short run. `python train.py`, which continuous integration runs, has them all."""
    from ligermodels.training.data import embedded  # which the tests' own process need not import

    embedded.TRAINING_STORIES, embedded.VALIDATION_STORIES = 200, 8
    embedded.TRAINING_CHATS, embedded.VALIDATION_CHATS = 200, 8


def run_script(script, arguments, folder, output, environment):
    """Never returns. Nothing is taken down: that would take longer than most scripts."""
    os.environ.update(environment)
    os.chdir(folder)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, descriptor in enumerate([os.open(os.devnull, os.O_RDONLY), written, written]):
        os.dup2(descriptor, number)
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    status = 1
    shrink_embedded_data()
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
        question = json.loads(line)
        children = []
        for environment in question.pop("environments"):
            children.append(os.fork())
            if children[-1] == 0:
                run_script(**question, environment=environment)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(next(filter(None, statuses), 0), flush=True)


if __name__ == "__main__":
    for library in LIBRARIES:
        importlib.import_module(library)
    main()
