"""Base classes of what weights/ loads and exports: a model with a Hub checkpoint, and a module with a low-rank update.

Knows configurations and weight rules; must not know layers or architectures, which derive from these classes.
"""

from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from ligermodels.configs.base import Config
from ligermodels.weights.mapping import Rule


class HubModule(nn.Module):
    """A model whose weights are stored as a Hub checkpoint.

    hub_class: written as config.json's `architectures` if the raw configuration has none.
    source: the folder that the model was loaded from, None for a new model.
    generation_config: the content of its generation_config.json.
    loaded_rules: of the layout that the weights were loaded from, None for a new model.
    """

    hub_class: ClassVar[str]

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.source: Path | None = None
        self.generation_config: dict[str, Any] = {}
        self.loaded_rules: tuple[Rule, ...] | None = None

    def weight_rules(self) -> tuple[Rule, ...]:
        """The rules that map parameters to the Hub's tensors; a parameter without a rule has the same name there."""
        return ()

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """Further checkpoint layouts that loading accepts, such as the in-memory layout of transformers 5."""
        return ()

    def export_rules(self) -> tuple[Rule, ...]:
        """The layout that an export writes: that of the loaded checkpoint, of a new model that of `weight_rules`."""
        return self.weight_rules() if self.loaded_rules is None else self.loaded_rules


class LowRankModule(nn.Module):
    """A module with a low-rank update: scale * B_i A_i is added to the i-th of `columns` of the base's output.

    columns: (start, stop) in the output of each of the P projections that have an update.
    scale: alpha / rank. dropout: probability of dropping an element of the update's input.
    lora_A: [P rank, in], one A_i after another. lora_B: [Σ (stop - start), rank], one B_i after another. For E stacked
    experts: lora_A [E rank, in] and lora_B [out, rank E], where column j E + e is column j of B_e.
    """

    columns: tuple[tuple[int, int], ...]
    rank: int
    alpha: float
    scale: float
    dropout: float
    lora_A: nn.Parameter
    lora_B: nn.Parameter
