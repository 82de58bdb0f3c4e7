"""`info --plot`: the memory that info prints, as a picture."""

import numpy
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from ligermodels.cli import info_report, main
from ligermodels.cli.info_report import PART_COLOURS, draw_memory


def widths(picture):
    """Of the first row of bars, the pixels of each colour in one line."""
    pixels = imread(picture)[..., :3]
    found = {name: numpy.abs(pixels - to_rgb(colour)).max(-1) < 0.02 for name, colour in PART_COLOURS.items()}
    line = int(numpy.argmax(found["weights"].sum(1) > 0)) + 5
    return {name: int(mask[line].sum()) for name, mask in found.items()}


def test_bars_are_as_long_as_the_memory_they_stand_for(tmp_path):
    draw_memory(
        {"train": {"weights": 4 * 2**30, "gradients": 2 * 2**30, "block": 2**30}}, tmp_path / "m.png", "a title"
    )
    found = widths(tmp_path / "m.png")
    assert found["weights"] > 300 and found["activations"] == found["cache"] == 0
    assert found["weights"] / found["gradients"] == pytest.approx(2, rel=0.03)
    assert found["weights"] / found["block"] == pytest.approx(4, rel=0.05)


def test_the_picture_has_the_peaks_that_are_printed(tmp_path, capsys, monkeypatch):
    drawn = []
    monkeypatch.setattr(info_report, "draw_memory", lambda peaks, picture, title: drawn.append((peaks, title)))
    assert main(["info", "qwen2:tiny", "--batch-size", "4", "--plot", str(tmp_path / "m.svg")]) == 0
    ((peaks, title),) = drawn
    assert title == "qwen2:tiny: 4 × 2048 tokens, float32" and [*peaks] == ["train", "LoRA", "QLoRA", "generate"]
    printed = capsys.readouterr().out
    for use, parts in peaks.items():
        line = next(line for line in printed.splitlines() if line.startswith(f"    {use} "))
        assert info_report.memory_size(sum(parts.values())) == line.split(use)[1].partition("=")[0].strip()
    assert printed.endswith(f"plot         {tmp_path / 'm.svg'}\n")


@pytest.mark.parametrize("name", ["m.txt", "m", "missing/m.png"])
def test_a_picture_that_cannot_be_written_is_refused(tmp_path, capsys, name):
    assert main(["info", "qwen2:tiny", "--plot", str(tmp_path / name)]) == 2
    assert f"--plot {tmp_path / name}: " in capsys.readouterr().err
    assert not (tmp_path / name).exists()
