"""Reward models as reward functions of a run: `--reward model:FOLDER`. Must not know what their rewards are for."""

from collections.abc import Sequence
from typing import Any, cast

import torch

from ligermodels.errors import InputError
from ligermodels.hub import create, load, resolve
from ligermodels.layers.reward_model import RewardModel
from ligermodels.memory.model import elements, inference_memory
from ligermodels.training.data.reader import read_tokenizer_and_end
from ligermodels.training.reward_function import TOKENS_PER_PASS, RewardModelFunction

REWARD_MODEL = "model:"


class ModelReward:
    """A reward model, whole on each rank, which scores completions in packed rows without gradients.

    name: a Hub id or a folder. Its weights are read by `load`. Raises HubError, ConfigError or CheckpointError;
    InputError for a language model.
    """

    def __init__(self, name: str) -> None:
        self.folder = resolve(name)
        self.model = create(self.folder, device="meta")
        if not isinstance(self.model, RewardModel):
            raise InputError(
                f"--reward {REWARD_MODEL}{name}: is a language model; train a reward model with --objective reward"
            )
        self.tokenizer = read_tokenizer_and_end(self.folder)
        self.function: RewardModelFunction | None = None

    def bytes(self, dtype: torch.dtype) -> tuple[int, int]:
        """(of the weights, of a pass over completions), in this dtype."""
        one_pass = inference_memory(self.model, 1, TOKENS_PER_PASS, dtype).prompt
        return elements(self.model.parameters()) * dtype.itemsize, one_pass

    def load(self, device: torch.device, dtype: torch.dtype) -> None:
        model = cast(RewardModel, load(self.folder, device=device, dtype=dtype).eval())
        self.function = RewardModelFunction(model, *self.tokenizer)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        assert self.function is not None  # `load` came first
        return self.function(prompts, completions)
