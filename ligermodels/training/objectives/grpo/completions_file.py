"""completions.jsonl: what was sampled, in the folder of a run. Must not know what a line says beside its step."""

from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from ligermodels.training.reporting.metrics import reopen_metrics

COMPLETIONS_FILE = "completions.jsonl"


class CompletionsFile:
    """Appends lines, objects with "step". On opening, lines of later steps than `done` are removed: a resumed run
    samples them again. Opened with the first lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: TextIO | None = None

    def write(self, lines: Iterable[str], done: int) -> None:
        """done: completed steps of the run."""
        if self.file is None:
            self.file = reopen_metrics(self.path, done)
        self.file.writelines(f"{line}\n" for line in lines)
        self.file.flush()
