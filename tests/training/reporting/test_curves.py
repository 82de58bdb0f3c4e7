"""curves.png: the running median, the curves that are drawn, and a missing matplotlib."""

import math
import sys

import numpy
import pytest

from ligermodels.training.reporting import curves
from ligermodels.training.reporting.curves import draw_curves, running_median, series


def test_a_running_median_ignores_one_bad_step_and_keeps_both_ends():
    values = [float(i) for i in range(600)]
    values[300] = 1e6
    steps, medians = running_median((list(range(1, 601)), values))
    assert dict(zip(steps, medians, strict=True))[301] == 301.0  # the median of 295 to 305, with 300 as outlier
    assert (steps[0], medians[0], steps[-1], medians[-1]) == (1, 0.0, 600, 599.0)
    long = running_median((list(range(100_000)), [1.0] * 100_000))
    assert len(long[0]) < 1000 and set(long[1]) == {1.0}


def test_a_series_has_only_the_numbers_with_its_name():
    records = [{"step": 1, "loss": 2.0}, {"step": 1, "validation_loss": 3.0}, {"step": 2, "loss": None}]
    assert series(records, "loss") == ([1], [2.0])


def fail_on(line):
    raise AssertionError(line)


def drawn_pixels(folder, records):
    """Draws the records. Returns a mask of the pixels for each colour."""
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    draw_curves(records, folder / "curves.png", "a run", "sft", fail_on)
    pixels = imread(folder / "curves.png")[..., :3]
    assert pixels.shape[0] > 800 and pixels.shape[1] > 1200
    colours = {name: getattr(curves, name) for name in ("BLUE", "ORANGE", "GREEN", "PURPLE", "TEAL")}
    return {name: numpy.abs(pixels - to_rgb(colour)).max(-1) < 0.02 for name, colour in colours.items()}


def step(number):
    return {
        "step": number, "loss": 0.6 + 6 * math.exp(-number / 50), "grad_norm": 1.0, "learning_rate": 1e-3,
        "tokens_per_second": 12_000,
    }  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("steps", [5, 200])
def test_the_picture_has_every_curve_of_the_metrics_file(steps, tmp_path):
    records = [step(number) for number in range(1, steps + 1)]
    without = drawn_pixels(tmp_path, records)
    assert without["ORANGE"].sum() == 0
    assert all(without[name].sum() > 300 for name in ("BLUE", "GREEN", "PURPLE", "TEAL"))
    rows = [row for row, blue in enumerate(without["BLUE"].any(1)) if blue]
    assert rows[0] < 200 and rows[-1] > 400  # the loss curve spans its panel from top to bottom
    validation = [{"step": steps, "validation_loss": 0.7, "floor": 0.5}]
    assert drawn_pixels(tmp_path, records + validation)["ORANGE"].sum() > 50


@pytest.mark.filterwarnings("error")
def test_a_single_step_is_drawn_as_a_point(tmp_path):
    assert drawn_pixels(tmp_path, [step(1) | {"tokens_per_second": None}])["GREEN"].sum() > 20  # BLUE is in the legend


def test_without_a_step_nothing_is_drawn(tmp_path):
    draw_curves([{"step": 1, "loss": None}], tmp_path / "curves.png", "a run", "sft", fail_on)
    assert not (tmp_path / "curves.png").exists()


def test_without_matplotlib_nothing_is_drawn_and_one_line_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    lines = []
    draw_curves([step(1)], tmp_path / "curves.png", "a run", "sft", lines.append)
    assert lines == ["curves.png not drawn: pip install matplotlib"]
    assert not (tmp_path / "curves.png").exists()
