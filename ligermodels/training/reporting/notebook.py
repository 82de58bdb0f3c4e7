"""A live plot in Jupyter: the picture of curves.png, drawn anew while a run trains.

A drawing takes part of a second, in which nothing trains: DRAWING_SHARE bounds the time that drawings may take.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from ligermodels.training.reporting.curves import save_curves
from ligermodels.training.reporting.metrics import METRICS_FILE, read_metrics

DRAWING_SHARE = 0.02  # of the time of a run
DPI = 80
STEPS_BETWEEN_LOOKS = 5  # at the clock


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which can show pictures."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookPlot:
    """Gets the records of a run, as a logger does, and shows their curves in the notebook.

    records: those of steps that were taken before. clock: seconds.
    """

    def __init__(
        self, folder: Path, records: Sequence[Mapping[str, Any]], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        from IPython.display import display

        self.title, self.records, self.clock = str(folder), [dict(record) for record in records], clock
        self.display: Any = display
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
        save_curves(self.records, picture, self.title, DPI)
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


def notebook_plots(folder: Path, done: int, say: Callable[[str], Any]) -> list[NotebookPlot]:
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
    return [NotebookPlot(folder, [record for record in records if record["step"] <= done])]
