"""Names of checkpoints that hold a text model with an image side, computed or kept."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ligermodels.configs.vision import VisionConfig
from ligermodels.layers.decoder import CausalLM
from ligermodels.weights.mapping import Concat, Rename, Rule


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


PackedNames = Mapping[str, str | tuple[str, ...]]  # a name here -> the Hub's, or those of the parts that it packs


def renaming(names: PackedNames, outer: str) -> tuple[Rule, ...]:
    """The rules of these names, with `outer` before those of the Hub."""
    return tuple(
        Rename(outer + hub, ours) if isinstance(hub, str) else Concat(ours, tuple(outer + part for part in hub))
        for ours, hub in names.items()
    )


class ImageNames(Protocol):
    """The names of a checkpoint of a text model with an image side."""

    def layouts(self, text_rules: tuple[Rule, ...]) -> tuple[tuple[Rule, ...], ...]:
        """The rules of all layouts that loading accepts; that of published files first.

        text_rules: of the text model in the Hub's layout, under its names here.
        """
        ...

    def kept_tensors(self, vision: VisionConfig) -> tuple[str, ...]:
        """Name patterns of tensors of the image side that a checkpoint may hold and that the model does not compute."""
        ...


@dataclass(frozen=True)
class NamesBesideText:
    """Names of a tower and a projector that stand beside the text model.

    image_names: of tower and projector.
    places: for each layout the name of the text model, and what is before the names of tower and projector.
    """

    image_names: PackedNames
    places: tuple[tuple[str, str], ...]

    def layouts(self, text_rules: tuple[Rule, ...]) -> tuple[tuple[Rule, ...], ...]:
        return tuple(
            (Rename(text, "model", text_rules), *renaming(self.image_names, outer)) for text, outer in self.places
        )

    def kept_tensors(self, vision: VisionConfig) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class WrappedNames:
    """Names of a text model, a tower and a projector inside a wrapper.

    tower: names below the tower on the Hub.
    block: the pattern of the names of its blocks there.
    towers: the Hub's names of the tower: that of published checkpoints, then those that transformers 5 writes for a new
    model.
    projector_rules: the rules of the projector in the Hub's layout, under its name here.
    kept: name patterns, below the tower, of tensors that the features do not depend on, beside those of later blocks.
    """

    tower: PackedNames
    block: str
    towers: tuple[str, ...] = ("vision_tower",)
    projector_rules: tuple[Rule, ...] = ()
    kept: tuple[str, ...] = ()

    def layouts(self, text_rules: tuple[Rule, ...]) -> tuple[tuple[Rule, ...], ...]:
        """Files have the first layouts, transformers 5 has the others in memory."""
        return tuple(self.layout(outer, tower, text_rules) for outer in ("", "model.") for tower in self.towers)

    def layout(self, outer: str, tower: str, text_rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        """The rules of a layout with `outer` before the names of the image side."""
        text = "model.language_model" if outer else "language_model.model"
        return (
            Rename(text, "model", text_rules),
            *(() if outer else (Rename("language_model.lm_head", "lm_head"),)),
            Rename(f"{outer}multi_modal_projector", "projector", self.projector_rules),
            *renaming(self.tower, f"{outer}{tower}."),
        )

    def kept_tensors(self, vision: VisionConfig) -> tuple[str, ...]:
        later = range(vision.computed_blocks, vision.num_hidden_layers)
        names = *self.kept, *(self.block.format(index) for index in later)
        places = (f"{outer}{tower}" for outer in ("", "model.") for tower in self.towers)
        return tuple(f"{place}.{name}" for place in places for name in names)
