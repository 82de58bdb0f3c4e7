"""What fits on a GPU is what the planner of runs says, and docs/hardware.md has it."""

import re

import pytest

from ligermodels.cli import main
from ligermodels.distributed import World, planned_world
from ligermodels.hub.description import describe
from ligermodels.training.fitting import Training, fit_of, fits, rows_of_step, verdict
from ligermodels.training.parallel.activation_checkpointing import usable_memory
from tests.pages import ROOT

LENGTH = 2048
HEADER, _, *ROWS = [
    re.findall(r"[^|\s]+", line)
    for line in (ROOT / "docs/hardware.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|")
]
SIZES = HEADER[1:]
QUICK = "llama:1b"
MARKED = [pytest.param(*row, marks=() if row[0] == QUICK else pytest.mark.slow, id=row[0]) for row in ROWS]


def largest_that_fit(name: str) -> list[str]:
    """For each memory of the page the way that needs most of those that fit."""
    model, world = describe(name).model, planned_world("2GB")  # where nothing fits, so that the plan takes the least
    needed = {
        way: fit_of(model, name, Training(way, LENGTH, rows_of_step(LENGTH, world)), world).memory.peak
        for way in ("full", "LoRA", "QLoRA")
    }
    usable = [usable_memory(planned_world(f"{size}GB")) for size in SIZES]
    return [next((way for way, peak in needed.items() if peak <= memory), "–") for memory in usable]


@pytest.mark.parametrize("row", [pytest.param(row, marks=each.marks, id=each.id) for row, each in zip(ROWS, MARKED)])
def test_the_page_of_hardware_has_what_the_planner_says(row):
    name, *cells = row
    assert largest_that_fit(name) == cells
