"""train.py as its users run it: a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ligermodels
from ligermodels.training.corpus import stories
from tests.training.test_parallel import torchrun

ROOT = Path(__file__).parents[2]
FEW = ["--steps", "3", "--eval-every", "2", "--batch-size", "2", "--sequence-length", "64"]


def train(folder, *arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


def test_a_run_logs_every_step_exports_a_folder_and_says_how_to_go_on(tmp_path):
    done = train(tmp_path, "--model", "qwen2", *FEW)
    assert done.returncode == 0, done.stderr
    generate, again = done.stdout.splitlines()[-2:]
    assert generate.strip() == 'ligermodels generate runs/qwen2 --prompt "Once upon a time"'
    assert again.strip() == f"torchrun --nproc-per-node 2 train.py --model qwen2 {' '.join(FEW)}"
    records = [json.loads(line) for line in (tmp_path / "runs/qwen2.metrics/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3]
    validations = {record["step"]: record for record in records if "validation_loss" in record}
    assert list(validations) == [2, 3]
    assert f"validation loss {validations[3]['validation_loss']:.3f} nats/token, floor 0.483" in done.stdout
    written = {path.name for path in (tmp_path / "runs/qwen2").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} < written

    # From that folder, on a file of one's own, with the folder's tokenizer; default outputs do not overwrite.
    lines = (json.dumps({"text": text}) for text, _ in stories(9, 40))
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    done = train(tmp_path, "--model", "runs/qwen2", "--data", "own.jsonl", "--recompute", "full", *FEW)
    assert done.returncode == 0, done.stderr
    assert "ligermodels generate runs/qwen2-2 " in done.stdout
    assert (tmp_path / "runs/qwen2-2/tokenizer.json").read_bytes() == (
        tmp_path / "runs/qwen2/tokenizer.json"
    ).read_bytes()


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--model", "qwen3000"], "qwen3000"),
        (["--model", "qwen2", "--output", "."], ".: exists already; give another --output"),
        (["--model", "qwen2", "--data", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_wrong_input_ends_with_one_line_status_2_and_nothing_written(arguments, complaint, tmp_path):
    done = train(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("train.py: ") and done.stderr.count("\n") == 1
    assert complaint in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_not_finite_stops_the_run_before_the_update_and_exports_nothing(tmp_path):
    done = train(tmp_path, "--model", "llama", *FEW, "--learning-rate", "1e38", "--warmup", "0", "--clip", "1e9")
    assert done.returncode == 2
    assert "stopped before the update" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "runs/llama").exists()


def losses(path):
    return [record["loss"] for record in map(json.loads, path.read_text().splitlines()) if "loss" in record]


def test_two_ranks_load_train_and_export_as_one_process_does(tmp_path):
    """From a checkpoint's slices into the shards, and from the shards to a checkpoint."""
    ligermodels.export(ligermodels.create("llama", size="tiny", seed=5), tmp_path / "start")
    (tmp_path / "own.txt").write_text("".join(text for text, _ in stories(3, 60)))
    assert train(tmp_path, "--model", "llama", *FEW, "--output", "first").returncode == 0
    for file in ("tokenizer.json", "config.json"):
        (tmp_path / "start" / file).write_bytes((tmp_path / "first" / file).read_bytes())
    config = json.loads((tmp_path / "start" / "config.json").read_text()) | {"eos_token_id": 0}
    (tmp_path / "start" / "config.json").write_text(json.dumps(config))

    few = [
        "--model",
        "start",
        "--data",
        "own.txt",
        "--steps",
        "3",
        "--sequence-length",
        "64",
        "--learning-rate",
        "1e-3",
    ]
    alone = train(tmp_path, *few, "--batch-size", "4", "--output", "one")
    together = torchrun(2, str(ROOT / "train.py"), *few, "--batch-size", "4", "--output", "two", folder=tmp_path)
    assert alone.returncode == together.returncode == 0, alone.stderr + together.stderr
    one, two = losses(tmp_path / "one.metrics/metrics.jsonl"), losses(tmp_path / "two.metrics/metrics.jsonl")
    torch.testing.assert_close(one, two, rtol=2e-6, atol=0)
    for a, b in zip(*(ligermodels.load(tmp_path / name).parameters() for name in ("one", "two")), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "one/config.json").read_bytes() == (tmp_path / "two/config.json").read_bytes()


def test_weights_that_do_not_fit_end_the_run_with_one_line_and_nothing_written(tmp_path):
    ligermodels.export(ligermodels.create("llama", size="tiny"), tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    before = sorted(tmp_path.rglob("*"))
    done = train(tmp_path, "--model", "model", *FEW)
    assert done.returncode == 2
    assert done.stderr.startswith("train.py: ") and done.stderr.count("\n") == 1 and "model.safetensors" in done.stderr
    assert sorted(tmp_path.rglob("*")) == before
