"""Models whose checkpoints wrap a text model, a vision tower and a projector: the names of their tensors.

Also their projector of linears. Must not know any family.
"""

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from ligermodels.layers.fused import activation_then_linear, apply_linear
from ligermodels.layers.multimodal import VisionLanguageModel
from ligermodels.weights.mapping import Rename, Rule


class WrappedLanguageModel(VisionLanguageModel):
    """hub_towers: the Hub's names of the tower; the first is that of published checkpoints."""

    hub_towers: ClassVar[tuple[str, ...]] = ("vision_tower",)

    def weight_rules(self) -> tuple[Rule, ...]:
        return self.layout("", self.hub_towers[0])

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """The names that transformers 5 writes for a new model, and its names in memory."""
        written = tuple(self.layout("", tower) for tower in self.hub_towers[1:])
        return *written, *(self.layout("model.", tower) for tower in self.hub_towers)

    def layout(self, outer: str, tower: str) -> tuple[Rule, ...]:
        """The rules of a layout with `outer` before the names of the image side."""
        text = "model.language_model" if outer else "language_model.model"
        return (
            Rename(text, "model", self.text_rules()),
            *(() if outer else (Rename("language_model.lm_head", "lm_head"),)),
            Rename(f"{outer}multi_modal_projector", "projector"),
            *self.tower_rules(outer + tower),
        )

    @abstractmethod
    def tower_rules(self, hub: str) -> tuple[Rule, ...]:
        """The weight rules of `visual`, a tower whose name on the Hub is `hub`."""

    def kept_in_tower(self) -> tuple[str, ...]:
        """Name patterns below the tower, on the Hub, of tensors that the features do not depend on."""
        return ()

    def kept_tensors(self) -> tuple[str, ...]:
        places = (f"{outer}{tower}" for outer in ("", "model.") for tower in self.hub_towers)
        return tuple(f"{place}.{name}" for place in places for name in self.kept_in_tower())


class LinearProjector(nn.Module):
    """linear_2(activation(linear_1(hidden states))): one feature of the text model, [D], for each row of the tower.

    width, hidden_size: of the tower's rows, E, and of the features, D. rows_per_image: rows of an image, the first of
    which is a class token that has no feature; None if all rows are patches.
    """

    def __init__(
        self, width: int, hidden_size: int, activation: str, *, bias: bool, rows_per_image: int | None = None
    ) -> None:
        super().__init__()
        self.activation, self.rows_per_image = activation, rows_per_image
        self.linear_1 = nn.Linear(width, hidden_size, bias=bias)
        self.linear_2 = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The tower's output, [1, P, E] each -> features [N, D]."""
        states = x if residual is None else x + residual
        if self.rows_per_image is not None:
            states = states.view(-1, self.rows_per_image, states.shape[-1])[:, 1:]
        hidden = apply_linear(self.linear_1, states.reshape(-1, states.shape[-1]))
        return activation_then_linear(hidden, self.activation, self.linear_2, fused=True)
