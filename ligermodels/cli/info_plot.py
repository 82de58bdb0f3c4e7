"""The picture of `ligermodels info --plot`: the memory of training, of LoRA and of generation, by what takes it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from ligermodels.errors import InputError
from ligermodels.plot_style import BLUE, GREEN, GREY, INK, OCHRE, ORANGE, PINK, PLOT_STYLE, PURPLE, TEAL
from ligermodels.units import memory_size

PART_COLOURS = {
    "weights": BLUE, "optimizer states": TEAL, "gradients": PURPLE, "activations": ORANGE, "loss": GREEN,
    "block": OCHRE, "cache": PINK, "prompt": GREY,
}  # fmt: skip
MIN_LABEL = 0.05  # of the longest bar: a smaller part has no room for its size


def draw_memory(peaks: Mapping[str, Mapping[str, int]], picture: Path, title: str) -> None:
    """Writes a PNG, SVG or PDF, by the picture's name, with one bar for each use.

    peaks: by use, the bytes of the parts that its peak has. Raises InputError without matplotlib, and where the picture
    cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("info --plot: matplotlib is missing; pip install matplotlib") from error
    longest = max(sum(parts.values()) for parts in peaks.values())
    with matplotlib.rc_context(PLOT_STYLE | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(10, 1.3 + 0.75 * len(peaks)), layout="constrained")
        axes = figure.subplots()
        for row, parts in enumerate(peaks.values()):
            begin = 0
            for name, size in parts.items():
                axes.barh(row, size, left=begin, height=0.6, color=PART_COLOURS[name], edgecolor="white", linewidth=1)
                if size > MIN_LABEL * longest:
                    axes.text(begin + size / 2, row, memory_size(size), ha="center", va="center", color="white")
                begin += size
            axes.text(begin, row, f"  {memory_size(begin)}", va="center", color=INK, fontweight="bold")
        axes.set_yticks(range(len(peaks)), [*peaks], fontsize=10, color=INK)
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1.12)
        step = 2 ** math.floor(math.log2(longest / 4))  # bytes, so that sizes are round
        ticks = [*range(0, round(longest * 1.1), step)]
        axes.set_xticks(ticks, [memory_size(size) for size in ticks])
        axes.set_title(title, fontsize=12, fontweight="bold")
        figure.legend(handles=legend(used_parts(list(peaks.values()))), loc="outside lower center", ncols=8)
        try:
            figure.savefig(picture, dpi=140)
        except (OSError, ValueError) as error:
            raise InputError(f"--plot {picture}: cannot be written: {error}") from error


def used_parts(bars: Sequence[Mapping[str, int]]) -> list[str]:
    """The parts that a bar has, in the order of their colours."""
    return [name for name in PART_COLOURS if any(parts.get(name) for parts in bars)]


def legend(names: Sequence[str]) -> list:
    from matplotlib.patches import Patch

    return [Patch(color=PART_COLOURS[name], label=name) for name in names]
