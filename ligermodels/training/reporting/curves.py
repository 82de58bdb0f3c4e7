"""A picture of a run, drawn from its metrics.jsonl: losses, learning rate, gradient norm and speed.

What varies from step to step is drawn as it was, and over it a running median, which one bad step does not bend.
matplotlib is imported when something is drawn.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

INK, GREY, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN, PURPLE, TEAL = "#2f6fde", "#e8590c", "#2b8a3e", "#7048e8", "#0b7285"
WINDOWS = 60  # as many medians fit into a run
LINEAR_UP_TO = 4  # times the lowest loss; beyond, the axis is logarithmic
CROWDED = 150  # points, from which on a running median is drawn over them
STYLE: Any = {
    "font.size": 9, "axes.edgecolor": GRID, "axes.labelcolor": GREY, "axes.titlecolor": INK, "axes.titlesize": 10,
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "xtick.color": GREY,
    "ytick.color": GREY, "xtick.major.size": 0, "ytick.major.size": 0, "grid.color": GRID, "grid.linewidth": 0.8,
    "axes.grid": True, "axes.axisbelow": True, "legend.frameon": False, "legend.labelcolor": INK, "text.color": INK,
}  # fmt: skip
Series = tuple[list[int], list[float]]


def draw_curves(metrics_file: Path, picture: Path, title: str) -> None:
    """Writes a PNG. Without a step there is nothing to draw, and nothing is written; a line cut off by a full disk is
    none."""
    lines = metrics_file.read_text(encoding="utf-8").splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    losses = series(records, "loss")
    if not losses[0]:
        return
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 7), layout="constrained")
        panels = figure.subplot_mosaic([["loss"] * 3, ["rate", "norm", "speed"]], height_ratios=[2.2, 1])
        draw_losses(panels["loss"], records, losses)
        draw_small(panels["rate"], series(records, "learning_rate"), "learning rate", PURPLE, smoothed=False)
        draw_small(panels["norm"], series(records, "grad_norm"), "gradient norm", GREEN)
        draw_small(panels["speed"], series(records, "tokens_per_second"), "tokens a second", TEAL)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(picture, dpi=140, bbox_inches="tight", pad_inches=0.2)


def series(records: Sequence[dict[str, Any]], name: str) -> Series:
    """(steps, values) of the records that have a number of this name."""
    pairs = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def running_median(values: Series) -> Series:
    """Over windows centred on the steps, which shrink towards both ends of the run; of long runs not at every step."""
    steps, numbers = values
    last = len(numbers) - 1
    reach = max(1, len(numbers) // WINDOWS // 2)
    centres = sorted({*range(0, last, max(1, reach // 8)), last})
    windows = [min(reach, centre, last - centre) for centre in centres]
    medians = [median(numbers[i - near : i + near + 1]) for i, near in zip(centres, windows, strict=True)]
    return [steps[i] for i in centres], medians


def draw_losses(axes: Any, records: Sequence[dict[str, Any]], losses: Series) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    validation, floors = series(records, "validation_loss"), series(records, "floor")[1]
    draw_line(axes, losses, BLUE, "training")
    if validation[0]:
        axes.plot(*validation, color=ORANGE, marker="o", markersize=5, linewidth=1.5, label="validation", zorder=4)
        axes.annotate(
            f"{validation[1][-1]:.3f}", (validation[0][-1], validation[1][-1]), (0, 8), textcoords="offset points",
            color=ORANGE, ha="right", fontweight="bold",
        )  # fmt: skip
    if floors:
        axes.axhline(floors[-1], color=GREY, linestyle=(0, (4, 3)), linewidth=1.2, label=f"floor {floors[-1]:.3f}")
    lowest, highest = min(losses[1] + validation[1] + floors), max(losses[1] + validation[1])
    if lowest > 0 and highest / lowest > LINEAR_UP_TO:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(title="loss, nats a predicted token", xlabel="step")
    axes.margins(x=0.01)
    axes.legend(loc="upper right")


def draw_small(axes: Any, values: Series, title: str, colour: str, *, smoothed: bool = True) -> None:
    draw_line(axes, values, colour, title, smoothed=smoothed)
    axes.margins(x=0.02, y=0.1)
    axes.set(title=title, ylim=(0, None), xlabel="step")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}")


def draw_line(axes: Any, values: Series, colour: str, label: str, *, smoothed: bool = True) -> None:
    if not smoothed or len(values[1]) < CROWDED:
        alone = "o" if len(values[1]) == 1 else None  # a line of one point would not be seen
        axes.plot(*values, color=colour, linewidth=1.8, label=label, marker=alone)
    else:
        axes.plot(*values, color=colour, linewidth=0.6, alpha=0.3)
        axes.plot(*running_median(values), color=colour, linewidth=1.8, label=label)
