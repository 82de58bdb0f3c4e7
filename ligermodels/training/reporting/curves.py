"""curves.png: plots of loss, learning rate, gradient norm and throughput, drawn from a run's metrics.jsonl.

Long series are drawn as they are with a running median on top, which is robust against single bad steps. matplotlib is
optional (the extra `plot`) and imported only to draw. In Jupyter the picture is drawn anew while a run trains, in
which time nothing trains: DRAWING_SHARE bounds it.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from ligermodels.plot_style import BLUE, GREEN, GREY, ORANGE, PLOT_STYLE, PURPLE, TEAL
from ligermodels.training.reporting.metrics import METRICS_FILE, read_metrics

WINDOWS = 60  # number of disjoint median windows in a run
MAX_LINEAR_RATIO = 4  # of the highest to the lowest loss; above it the axis is logarithmic
SMOOTHED_FROM = 150  # points; from this number on a running median is drawn
Series = tuple[list[int], list[float]]
DRAWING_SHARE = 0.02  # of the time of a run
DPI = 80
STEPS_BETWEEN_LOOKS = 5  # at the clock


def draw_curves(
    records: Sequence[dict[str, Any]], picture: Path, title: str, objective: str, say: Callable[[str], Any]
) -> None:
    """Writes a PNG. Writes nothing if no step was recorded or matplotlib is missing.

    records: of metrics.jsonl, of a run with this objective. say: receives one line if matplotlib is missing.
    """
    if not series(records, "loss")[0]:
        return
    try:
        save_curves(records, picture, title, objective)
    except ImportError:
        say(f"{picture.name} not drawn: pip install matplotlib")


def save_curves(
    records: Sequence[dict[str, Any]], target: Path | BinaryIO, title: str, objective: str, dpi: int = 140
) -> None:
    """Writes a PNG of the curves of at least one step. Raises ImportError without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    losses = series(records, "loss")
    loss = "loss, nats per supervised token" if objective == "sft" else f"loss of {objective}"
    with matplotlib.rc_context(PLOT_STYLE):
        figure = Figure(figsize=(10, 7), layout="constrained")
        panels = figure.subplot_mosaic([["loss"] * 3, ["rate", "norm", "speed"]], height_ratios=[2.2, 1])
        draw_losses(panels["loss"], records, losses, loss)
        draw_small(panels["rate"], series(records, "learning_rate"), "learning rate", PURPLE, smoothed=False)
        draw_small(panels["norm"], series(records, "grad_norm"), "gradient norm", GREEN)
        draw_small(panels["speed"], series(records, "tokens_per_second"), "tokens per second", TEAL)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(target, format="png", dpi=dpi, bbox_inches="tight", pad_inches=0.2)


def series(records: Sequence[dict[str, Any]], name: str) -> Series:
    """Returns (steps, values) of the records that have a number of this name."""
    pairs = [(record["step"], record[name]) for record in records if isinstance(record.get(name), int | float)]
    return [step for step, _ in pairs], [value for _, value in pairs]


def running_median(values: Series) -> Series:
    """Returns medians over centred windows, which shrink towards both ends. Long runs have fewer medians than steps."""
    steps, numbers = values
    last = len(numbers) - 1
    largest = max(1, len(numbers) // WINDOWS // 2)
    centres = sorted({*range(0, last, max(1, largest // 8)), last})
    radii = [min(largest, centre, last - centre) for centre in centres]
    medians = [median(numbers[i - radius : i + radius + 1]) for i, radius in zip(centres, radii, strict=True)]
    return [steps[i] for i in centres], medians


def draw_losses(axes: Any, records: Sequence[dict[str, Any]], losses: Series, title: str) -> None:
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
    if lowest > 0 and highest / lowest > MAX_LINEAR_RATIO:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(title=title, xlabel="step")
    axes.margins(x=0.01)
    axes.legend(loc="upper right")


def draw_small(axes: Any, values: Series, title: str, colour: str, *, smoothed: bool = True) -> None:
    draw_line(axes, values, colour, title, smoothed=smoothed)
    axes.margins(x=0.02, y=0.1)
    axes.set(title=title, ylim=(0, None), xlabel="step")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}")


def draw_line(axes: Any, values: Series, colour: str, label: str, *, smoothed: bool = True) -> None:
    if not smoothed or len(values[1]) < SMOOTHED_FROM:
        marker = "o" if len(values[1]) == 1 else None  # a line with a single point is invisible
        axes.plot(*values, color=colour, linewidth=1.8, label=label, marker=marker)
    else:
        axes.plot(*values, color=colour, linewidth=0.6, alpha=0.3)
        axes.plot(*running_median(values), color=colour, linewidth=1.8, label=label)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which can show pictures."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookPlot:
    """Gets the records of a run, as a logger does, and shows their curves in the notebook.

    records: those of steps that were taken before. clock: seconds.
    """

    def __init__(
        self, folder: Path, records: Sequence[Mapping[str, Any]], objective: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        from IPython.display import display

        self.title, self.records, self.clock = str(folder), [dict(record) for record in records], clock
        self.objective, self.display = objective, display
        self.handle: Any = None
        self.next_drawing = 0.0

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(dict(record))
        looks = len(self.records) % STEPS_BETWEEN_LOOKS == 0 or "validation_loss" in record
        if looks and self.clock() >= self.next_drawing:
            self.draw()

    def draw(self) -> None:
        """Replaces the picture in the notebook."""
        from IPython.display import Image

        if not any("loss" in record for record in self.records):
            return
        began, picture = self.clock(), BytesIO()
        save_curves(self.records, picture, self.title, self.objective, DPI)
        image = Image(data=picture.getvalue(), format="png")
        if self.handle is None:
            self.handle = self.display(image, display_id=True)
        else:
            self.handle.update(image)
        ended = self.clock()
        self.next_drawing = ended + (ended - began) / DRAWING_SHARE

    def close(self) -> None:
        """The last picture has all records."""
        self.draw()


def notebook_plots(folder: Path, done: int, objective: str, say: Callable[[str], Any]) -> list[NotebookPlot]:
    """The plot of a run that a notebook makes; none elsewhere, or without matplotlib, which `say` gets a line about.

    folder: of the run. done: steps already completed by a resumed run, which the plot shows too.
    """
    if not in_notebook():
        return []
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        say("no live plot: pip install matplotlib")
        return []
    file = folder / METRICS_FILE
    records = read_metrics(file) if done and file.exists() else []
    return [NotebookPlot(folder, [record for record in records if record["step"] <= done], objective)]
