"""PrecomputedReference: the policy's log-probabilities as they were at the start, computed in one pass before training.

The pass takes the rows that training will take, in the same order, so that the first step's log-ratios are exactly 0.
Sums of completions are kept in the user's cache, in a file named by a hash of the weights, the data, the settings that
shape rows, and the code; the next run with the same starts at once. A run that is lengthened adds what is missing.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ligermodels
from ligermodels import distributed
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.layers.decoder import CausalLM
from ligermodels.losses.pairs import pair_sums
from ligermodels.training.checkpoints.state import fingerprint
from ligermodels.training.data.preferences import PreferenceBatch, PreferenceData, Step
from ligermodels.training.data.preferences.steps import Groups
from ligermodels.training.data.rows.store import cache_folder
from ligermodels.training.objectives.preference.references import Reference, row_logprobs
from ligermodels.training.settings.config import RunConfig
from ligermodels.units import counted, duration
from ligermodels.weights.reading import open_for_reading
from ligermodels.weights.writing import failure, replace_file


class PrecomputedReference(Reference):
    """sums: float64 [completions], by their numbers in the data; NaN for those that the run does not need."""

    def __init__(self, config: RunConfig, world: World, data: PreferenceData, ld_alpha: float | None) -> None:
        self.config, self.world, self.data, self.ld_alpha = config, world, data, ld_alpha
        parts = [*data.training.groups.parts, *data.validation.groups.parts]
        self.found = np.full(max(part.first + len(part.store.tokens) for part in parts), np.nan)

    def logprobs(self, model: CausalLM, batch: PreferenceBatch) -> Tensor:
        raise InputError("--reference precomputed: has sums of completions, not their tokens; take --reference model")

    def sums(self, model: CausalLM, batch: PreferenceBatch, ld_alpha: float | None) -> Tensor:
        found = torch.from_numpy(self.found[batch.numbers])
        device = batch.completions.device
        return (found.pin_memory() if device.type == "cuda" else found).to(device, non_blocking=True)

    def prepare(self, model: CausalLM, say: Callable[[str], Any]) -> None:
        file = cache_folder() / f"reference-{self.key(model)}.f64"
        self.found = distributed.from_first(self.read(file) if self.world.is_first else self.found)
        known = int(np.isfinite(self.found).sum())
        start = time.perf_counter()
        computed = self.compute(model)
        if not computed:
            say(f"reference: log-probabilities of {counted(known, 'completion')}, from {file}")
            return
        taken = duration(time.perf_counter() - start)
        say(f"reference: log-probabilities of {counted(computed, 'completion')} precomputed in {taken}, kept in {file}")
        error = failure(self.write, file) if self.world.is_first else None
        if error is not None:  # the cache only saves time
            say(f"warning: {error}")

    def compute(self, model: CausalLM) -> int:
        """Fills in what the run needs and is missing; returns how many completions that were."""
        missing = np.isnan(self.found)
        sums = torch.zeros(len(self.found), dtype=torch.float64, device=self.world.device)
        for step in self.steps_with(missing):
            for batch in step.batches:
                numbers = torch.from_numpy(batch.numbers).to(sums.device)
                sums[numbers] = pair_sums(row_logprobs(model, batch), batch.completions, self.ld_alpha)
        distributed_sums = distributed.total(sums).cpu().numpy()
        done = missing & self.needed
        self.found[done] = distributed_sums[done]
        return int(done.sum())

    def steps_with(self, missing: np.ndarray) -> Iterator[Step]:
        """The steps of the run's first pass over the data, and of the validation, that have missing completions."""
        training, validation, units = self.data.training, self.data.validation, self.config.units
        self.needed = np.zeros(len(missing), bool)
        cursors = range(0, self.config.steps * units, units)
        for cursor in cursors:
            numbers = numbers_of(training.groups, training.numbers(cursor, units))
            if (missing[numbers] & ~self.needed[numbers]).any():
                yield training.collated(cursor, units, self.world)
            self.needed[numbers] = True
        numbers = numbers_of(validation.groups, range(len(validation)))
        self.needed[numbers] = True
        if missing[numbers].any():
            yield from validation.steps(units, self.world)

    def key(self, model: CausalLM) -> str:
        config, data = self.config, self.data
        described = {
            "weights": {name: fingerprint(parameter) for name, parameter in model.named_parameters()},
            "data": data.training.fingerprint,
            "validation": [part.fingerprint for part in data.validation.groups.parts],
            "rows": [config.units, config.sequence_length, config.share_prompts, config.seed, self.world.size],
            "dtype": [config.dtype, str(self.world.device.type)],
            "ld_alpha": self.ld_alpha,
            "images": self.image_versions(),
            "code": package_hash(),
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]

    def image_versions(self) -> list[str]:
        """What decides about the pixels of images beside their names."""
        if self.data.processor is None:
            return []
        parts = (*self.data.training.groups.parts, *self.data.validation.groups.parts)
        images = (part.store.tokens.images for part in parts)
        return [repr(self.data.processor.images), *(found.file_versions for found in images if found is not None)]

    def read(self, file: Path) -> np.ndarray:
        """The sums in the cache; as they are where it has none, or a damaged file."""
        if not file.is_file():
            return self.found
        with open_for_reading(file) as stream:
            found = np.frombuffer(stream.read(), np.float64)
        return found.copy() if found.shape == self.found.shape else self.found

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, self.found.tobytes())


def numbers_of(groups: Groups, numbers: Any) -> np.ndarray:
    """The numbers that the completions of these groups have in the data, as in `PreferenceBatch.numbers`."""
    return np.concatenate([groups.completion_numbers(number) for number in numbers])


def package_hash() -> str:
    """A hash of this package's code."""
    files = sorted(Path(ligermodels.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
