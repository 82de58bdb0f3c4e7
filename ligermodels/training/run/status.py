"""run.json: whether a run still trains, how it ended, its warnings, and the command that resumes it.

Written for those who watch the run from another process, `ligermodels board` among them. A killed run cannot write: its
file says "running" while nobody holds the lock of its folder.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from ligermodels.errors import first_line
from ligermodels.weights.writing import replace_file

STATUS_FILE = "run.json"
MAX_WARNINGS = 100
State = Literal["running", "finished", "stopped", "failed"]


class RunStatus:
    """Keeps a run's run.json up to date. A context manager: a run that raises has failed.

    facts: what else the file has, as JSON values. say: gets one line where the file cannot be written; the run goes on.
    enabled: False on all ranks but the first, where nothing is written.
    """

    def __init__(
        self, folder: Path, facts: Mapping[str, Any], *, say: Callable[[str], None], enabled: bool = True
    ) -> None:
        self.file, self.say, self.enabled = folder / STATUS_FILE, say, enabled
        self.content: dict[str, Any] = {"state": "running", "began": round(time.time()), **facts, "warnings": []}

    def __enter__(self) -> Self:
        self.write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.end("failed", first_line(error))

    def warn(self, step: int, warning: str) -> None:
        """Adds a warning, and says it. step: completed steps of the run."""
        self.say(f"warning: {warning}")
        if len(self.content["warnings"]) < MAX_WARNINGS:
            self.content["warnings"].append({"step": step, "text": warning})
            self.write()

    def end(self, state: State, error: str | None = None) -> None:
        """Says how the run ended. error: why it failed."""
        self.content |= {"state": state, "ended": round(time.time())} | ({"error": error} if error else {})
        self.write()

    def write(self) -> None:
        if not self.enabled:
            return
        try:
            replace_file(self.file, (json.dumps(self.content, indent=1, ensure_ascii=False) + "\n").encode())
        except (OSError, UnicodeEncodeError) as error:
            self.say(f"warning: {self.file}: not written: {error}; the run goes on")
