import os
import shlex
import sys

import pytest
import torch

from ligermodels.distributed import World
from ligermodels.training.run import advice as module
from ligermodels.training.run.advice import advice, parent_command, resume_command
from tests.training.planning.configs import run_config

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GENERATE = '  ligermodels generate run/model --prompt "Once upon a time"'
TORCHRUN = "  torchrun --nproc-per-node 2 '../my train.py' --config run/train.toml"
TO_TRAIN = "To train the same on two GPUs:"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The folder of a run."""
    monkeypatch.chdir(tmp_path)
    for folder in ("run/model", "run/adapter"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr("sys.argv", ["../my train.py"])
    return tmp_path


def advised(here, *argv, saved="model", world=None, chats=False):
    args = run_config("--model", "base", *argv)
    folder = (here / "run" / saved).relative_to(here)
    return advice(args, world or World(CPU), folder, chats=chats)


def test_no_generate_command_is_printed_without_a_tokenizer(here, monkeypatch):
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 2)
    assert advised(here, world=World(GPU)) == [f"Saved run/model. {TO_TRAIN}", TORCHRUN]
    assert advised(here) == advised(here, world=World(GPU, 0, 2)) == ["Saved run/model"]
    (here / "run/model/vocab.json").touch()
    both = "Saved run/model. To generate with it, and to train the same on two GPUs:"
    assert advised(here, world=World(GPU)) == [both, GENERATE, TORCHRUN]


@pytest.mark.parametrize(
    "argv, world, devices, can",
    [
        (["--batch-size", "3"], World(GPU), 2, False),
        (["--batch-size", "4", "--micro-batch-size", "4"], World(GPU), 2, False),
        (["--batch-size", "4", "--micro-batch-size", "2"], World(GPU), 2, True),
        ([], World(CPU), 0, False),
        ([], World(GPU, 0, 2), 2, False),
        ([], World(GPU), 1, False),
        ([], World(GPU), 2, True),
    ],
)
def test_the_command_for_two_gpus_is_printed_only_where_two_can_run_it(argv, world, devices, can, here, monkeypatch):
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: devices)
    (here / "run/model/tokenizer.json").touch()
    lines = advised(here, *argv, world=world)
    assert lines[0].startswith("Saved run/model. To generate with it") and lines[1] == GENERATE
    assert (TORCHRUN in lines) == ("two GPUs" in lines[0]) == can


def test_an_adapter_stands_for_its_base_model_and_a_chat_needs_no_prompt(here):
    (here / "run/adapter/tokenizer.json").touch()
    assert advised(here, "--lora-rank", "4", "--batch-size", "1", saved="adapter", chats=True) == [
        "Saved run/adapter, in PEFT's format. To generate with it:",
        "  ligermodels generate run/adapter --chat",
    ]


HOSTS = "--nnodes 2 --rdzv-backend=c10d --rdzv-endpoint node1:29500 --rdzv-id 7 --nproc-per-node 2"


@pytest.mark.parametrize(
    ("ranks", "parent", "launcher"),
    [
        (1, "bash", "python"),
        (4, "mpirun -n 4 python train.py", "torchrun --nproc-per-node 2"),
        (4, "/usr/bin/python3 /opt/bin/torchrun --nproc-per-node 4 train.py --steps 3", "torchrun --nproc-per-node 4"),
        (4, f"/opt/python -m torch.distributed.run {HOSTS} train.py --nnodes x", f"torchrun {HOSTS}"),
        (4, f"/opt/python /opt/bin/torchrun {HOSTS} -m ligermodels train --model x", f"torchrun {HOSTS}"),
        (
            4,
            "torchrun --node-rank 1 --master-addr 'a b' train.py",
            "torchrun --node-rank NODE_RANK --master-addr 'a b'",
        ),
        (4, "torchrun --nnodes 2 --node_rank=0 train.py", "torchrun --nnodes 2 --node_rank=NODE_RANK"),
    ],
)
def test_the_resume_command_repeats_how_the_run_was_started(ranks, parent, launcher, here, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("ligermodels.training.run.advice.parent_command", lambda: shlex.split(parent))
    assert resume_command(here / "a run", World(CPU, 0, ranks)) == (
        f"{launcher} '../my train.py' --resume '{here / 'a run'}'"
    )


def test_the_command_of_the_parent_is_what_the_system_says(monkeypatch):
    monkeypatch.setattr("os.getppid", os.getpid)
    assert parent_command() == sys.orig_argv
