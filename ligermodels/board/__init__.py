"""`ligermodels board`: a page over the runs of a folder, on the standard library's HTTP server.

folders.py      which files may be read, and what the folders hold
series.py       the numbers of a metrics.jsonl: bounded memory, and fast to draw
runs.py         a run: state, settings, texts, checkpoints; all runs, kept up to date by a thread
server.py       the HTTP server; which requests are answered
actions.py      what each address answers
form.py         the form of TrainConfig
processes.py    starting, stopping and resuming runs
answers.py      the processes that plan runs and that chat
static/         the page: HTML, CSS and ES modules, without a build step
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ligermodels.board.actions import Actions
from ligermodels.board.folders import open_folders
from ligermodels.board.runs import Library
from ligermodels.board.server import Access, listen


def open_board(folders: Sequence[Path], host: str, port: int, say: Callable[[str], Any]) -> None:
    """Serves the board until it is interrupted. folders: the first has the runs. say: gets its address. Raises
    InputError for a folder that is none, and an address where it cannot listen."""
    opened = open_folders(folders)
    with Library(opened[:1]) as library, Actions(library, opened) as actions:
        listen(Access.at(host, port), actions.routes(), say)
