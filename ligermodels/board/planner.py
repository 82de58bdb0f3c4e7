"""The process that plans runs for the board: `python -m ligermodels.board.planner`. It writes and downloads nothing."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ligermodels.board.workers import answer_questions
from ligermodels.training import TrainConfig, plan
from ligermodels.training.settings.settings import parsed_value


def planned(question: Mapping[str, Any], is_cancelled: Callable[[], bool]) -> Iterator[Mapping[str, Any]]:
    """The plan of the settings in a question. Raises InputError where `train` would refuse them."""
    settings = {name: parsed_value(name, value, name) for name, value in question["settings"].items()}
    made = plan(TrainConfig(**settings))
    parts = {part: size for part, size in made.memory.parts.items() if size}
    yield {"table": [*made.table()], "parts": parts, "peaks": dict(made.phases)}


if __name__ == "__main__":
    answer_questions(planned)
