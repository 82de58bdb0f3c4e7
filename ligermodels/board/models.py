"""The models of the folders that can be talked to: exports, adapters and checkpoints of runs. Must not know HTTP."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ligermodels.board.folders import Place, names_inside, walk
from ligermodels.training.checkpoints.files import STEP
from ligermodels.training.run.folder import CHECKPOINTS
from ligermodels.training.settings.settings import SETTINGS_FILE
from ligermodels.weights.adapter_config import ADAPTER_CONFIG_FILE
from ligermodels.weights.config_file import CONFIG_FILE

MAX_MODELS = 1000


class TalkingModel(NamedTuple):
    """place: of the model's folder, of a checkpoint the folder of its run. step: of a checkpoint."""

    id: str
    place: Place
    kind: str
    step: int | None = None


def find_models(folders: Sequence[Path]) -> dict[str, TalkingModel]:
    """The models, by their ids."""
    found: dict[str, TalkingModel] = {}
    for number, root in enumerate(folders):
        for model in models_below(number, root):
            if len(found) == MAX_MODELS:
                return found
            found[model.id] = model
    return found


def models_below(number: int, root: Path) -> Iterator[TalkingModel]:
    for place, names in walk(root, {CHECKPOINTS}):
        if any(name.endswith(".safetensors") for name in names):
            for file, kind in ((CONFIG_FILE, "model"), (ADAPTER_CONFIG_FILE, "adapter")):
                if file in names:
                    yield TalkingModel(f"{number}:{place.relative}", place, kind)
                    break
        if SETTINGS_FILE in names:
            for name in names_inside(place.inside(CHECKPOINTS)):
                if STEP.fullmatch(name):
                    step = int(name.removeprefix("step-"))
                    yield TalkingModel(f"{number}:{place.relative}:{step}", place, "checkpoint", step)
