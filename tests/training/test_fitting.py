"""What fits on a GPU is what the planner of runs says, and docs/hardware.md has it."""

import json
import re

import pytest

from ligermodels.cli import main
from ligermodels.distributed import planned_world
from ligermodels.hub.description import describe
from ligermodels.training import fitting
from ligermodels.training.fitting import Training, fit_of, rows_of_step, trainings, what_fits_instead
from ligermodels.training.parallel.activation_checkpointing import usable_memory
from tests.pages import ROOT

LENGTH = 2048
HEADER, _, *ROWS = [
    re.findall(r"[^|\s]+", line)
    for line in (ROOT / "docs/hardware.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|")
]
SIZES = HEADER[1:]


def ways_that_fit(name):
    """For each memory of the page the way that needs most, of those that fit."""
    model, world = describe(name).model, planned_world("1100MB")  # where nothing fits, and the plan takes the least
    ways = trainings(model, LENGTH, rows_of_step(LENGTH, world), 16, None)
    needed = {training.way: fit_of(model, name, training, world).memory.peak for training in ways}
    usable = [usable_memory(planned_world(f"{size}GB")) for size in SIZES]
    return [next((way for way, peak in needed.items() if peak <= memory), "–") for memory in usable]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_page_of_hardware_has_what_the_planner_says(row):
    name, *cells = row
    assert ways_that_fit(name) == cells


def test_the_report_says_what_fits_how_and_what_would_make_it_fit(capsys):
    def lines(gpus):
        assert main(["info", "llama:tiny", "--for-gpu", gpus, "--batch-size", "8", "--sequence-length", "512"]) == 0
        return capsys.readouterr().out.splitlines()[-4:]

    assert lines("2GB,2") == [
        "  for a GPU    2 x GPU, 1.9 GiB, for steps of 8 × 512 tokens, bfloat16",
        "    full       fits: 34.7 MiB, micro-batches of 4 x 512",
        "    LoRA       fits: 33.3 MiB, micro-batches of 4 x 512",
        "    QLoRA      fits: 31.5 MiB, micro-batches of 4 x 512",
    ]
    title, *rows = lines("1100MB")
    assert title == "  for a GPU    1 x GPU, 1.0 GiB, for steps of 8 × 512 tokens, bfloat16"
    assert [re.sub(r"\d+\.\d", "N", row) for row in rows] == [
        f"    {way:10} does not fit: N MiB; take a larger GPU or a smaller model" for way in ("full", "LoRA", "QLoRA")
    ]
    flags = ["--for-gpu", "2GB,2", "--batch-size", "8", "--sequence-length", "512", "--json", "--quiet"]
    assert main(["info", "llama:tiny", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["for_gpu"] == {
        "step": "2 x GPU, 1.9 GiB, for steps of 8 × 512 tokens, bfloat16",
        "full": "fits: 34.7 MiB, micro-batches of 4 x 512",
        "LoRA": "fits: 33.3 MiB, micro-batches of 4 x 512",
        "QLoRA": "fits: 31.5 MiB, micro-batches of 4 x 512",
    }
    assert main(["info", "llama:tiny", "--for-gpu", "h100", "--dtype", "float16"]) == 2
    assert main(["train", "--model", "llama", "--for-gpu", "h100"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "ligermodels: --dtype float16: --for-gpu plans in bfloat16; leave one of them out",
        "ligermodels: --for-gpu h100 plans a run, and makes none: add --dry-run",
    ]


def test_the_remedy_is_a_smaller_step_else_more_gpus(monkeypatch):
    room = {}
    monkeypatch.setattr(fitting, "fit_of", lambda model, name, training, world: (training, world))
    monkeypatch.setattr(fitting, "fits", lambda fit, world: room["fits"](*fit))
    given, world = Training("LoRA", 2048, 16), planned_world("24GB")

    def found(rule):
        room["fits"] = rule
        return what_fits_instead(None, "llama:8b", given, world)

    assert found(lambda training, world: training.rows == 1) == "--batch-size 1 --sequence-length 2048 fits"
    assert found(lambda training, world: training.length <= 600) == "--batch-size 1 --sequence-length 512 fits"
    assert found(lambda training, world: world.size >= 3 and training.rows == 16) == "4 of them have room for it"
    assert found(lambda training, world: False) == "take a larger GPU or a smaller model"
