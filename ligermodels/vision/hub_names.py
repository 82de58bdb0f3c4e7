"""Models whose checkpoints wrap a text model, a vision tower and a projector: the names of their tensors.

Of some the text model alone is computed. Also the projector of linears. Must not know any family.
"""

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ligermodels.errors import InputError
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.fused import activation_then_linear, apply_linear
from ligermodels.vision.multimodal import Images, VisionLanguageModel
from ligermodels.vision.token_places import Documents, documents_of
from ligermodels.weights.mapping import Rename, Rule


class TextPartModel(CausalLM):
    """A text model that is published alone, or inside a model with an image side, which is then kept, not computed.

    is_part: whether this one is published inside.
    """

    is_part: ClassVar[bool] = False

    @abstractmethod
    def text_layouts(self) -> tuple[tuple[Rule, ...], ...]:
        """The rules of the text model alone, for each layout that loading accepts; that of published files first."""

    def layouts(self) -> tuple[tuple[Rule, ...], ...]:
        """The rules of all layouts that loading accepts; that of published files first."""
        alone = self.text_layouts()
        inside = tuple((Rename("model.language_model", "model", rules),) for rules in alone)
        return (*inside, *alone) if self.is_part else (*alone, *inside)

    def weight_rules(self) -> tuple[Rule, ...]:
        return self.layouts()[0]

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        return self.layouts()[1:]


class WrappedLanguageModel(VisionLanguageModel):
    """hub_towers: the Hub's names of the tower; the first is that of published checkpoints.

    hub_block: the pattern of the names of its blocks, below the tower.
    other_pixel_inputs: what the model takes beside pixel_values.
    """

    hub_towers: ClassVar[tuple[str, ...]] = ("vision_tower",)
    hub_block: ClassVar[str]
    other_pixel_inputs: ClassVar[tuple[str, ...]] = ()

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
            Rename(f"{outer}multi_modal_projector", "projector", self.projector_rules()),
            *self.tower_rules(outer + tower),
        )

    def projector_rules(self) -> tuple[Rule, ...]:
        """Those of the projector in the Hub's layout, under its name here."""
        return ()

    @_disable_dynamo
    def prepare_images(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        pixel_values: Tensor | None = None,
        **others: Any,
    ) -> Images:
        """As `VisionLanguageModel.prepare_images`, of pixel_values and the other inputs of `place_pixels`."""
        unknown = [name for name in others if name not in self.other_pixel_inputs]
        if pixel_values is None or unknown:
            names = " and ".join(("pixel_values", *self.other_pixel_inputs))
            raise InputError(f"{', '.join(unknown) or 'images'}: the model takes {names} alone")
        documents = documents_of(input_ids.cpu(), attention_mask, position_ids, cu_seqlens)
        return self.place_pixels(documents, pixel_values, **others)

    @abstractmethod
    def place_pixels(self, documents: Documents, pixels: Tensor, **others: Any) -> Images:
        """The images of these pixel_values, which the documents' tokens stand for. others: `other_pixel_inputs`."""

    @abstractmethod
    def tower_rules(self, hub: str) -> tuple[Rule, ...]:
        """The weight rules of `visual`, a tower whose name on the Hub is `hub`."""

    def kept_in_tower(self) -> tuple[str, ...]:
        """Name patterns below the tower, on the Hub, of tensors that the features do not depend on: of later blocks."""
        vision = self.config.vision
        return tuple(self.hub_block.format(index) for index in range(vision.computed_blocks, vision.num_hidden_layers))

    def kept_tensors(self) -> tuple[str, ...]:
        places = (f"{outer}{tower}" for outer in ("", "model.") for tower in self.hub_towers)
        return tuple(f"{place}.{name}" for place in places for name in self.kept_in_tower())


class LinearProjector(nn.Module):
    """linear_2(activation(linear_1(hidden states))): one feature of the text model, [D], for each row of the tower.

    width, hidden_size: of the tower's rows, E, and of the features, D. rows_per_image: rows of an image, the first of
    which is a class token that has no feature; None if all rows have one.
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
