"""A causal language model that sees images: a vision tower, a projector, and their features among the embeddings.

`prepare_images` does on the CPU what depends on grids and token ids alone; a data loader may call it, and pass its
result to `forward`, which then waits for nothing.
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map_only

from ligermodels.configs.multimodal import MultimodalConfig
from ligermodels.errors import InputError
from ligermodels.generation.image_features import ImageFeatures, PromptImages, no_features
from ligermodels.layers.block import Block
from ligermodels.layers.decoder import CausalLM, CausalLMOutput
from ligermodels.layers.packed import name_parts
from ligermodels.vision.hub_names import ImageNames
from ligermodels.vision.image_placer import ImagePlacer, Images
from ligermodels.vision.tower import PatchMerger, VisionTower
from ligermodels.weights.mapping import Rule, packed_projections
from ligermodels.weights.sharding import is_sharded

PIXEL_INPUTS = (
    "pixel_values", "image_grid_thw", "image_sizes", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts",
    "pixel_attention_mask",
)  # fmt: skip
MODEL_PARTS = ("vision", "projector", "text")


class ImageParts(CausalLM):
    """A causal language model with a vision tower, of which parts are trained or frozen.

    visual: the tower. projector: from its states to the width of the text model. deepstack: further projectors.
    """

    config: Any
    tower_lists: ClassVar[tuple[str, ...]] = ("visual.blocks",)  # of the tower's blocks, by name
    visual: Any
    projector: nn.Module
    deepstack: nn.ModuleList

    @property
    def blocks(self) -> list[Block]:
        return [*(self.tower_blocks if is_trained(self.visual) else ()), *super().blocks]

    @abstractmethod
    def example_images(self, rows: int) -> tuple[int, dict[str, Tensor]]:
        """Random pixel inputs of one image a row, and the image tokens of each."""

    @property
    @abstractmethod
    def processor_settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a new processor must know: the fields of preprocessor_config.json, and of processor_config.json."""

    @property
    def sees_prompt_ahead(self) -> bool:
        """Whether tokens of a prompt see those behind them."""
        return False

    @property
    def tower_blocks(self) -> list[Block]:
        """The blocks of the tower, in the order of computation."""
        return [cast(Block, block) for name in self.tower_lists for block in self.get_submodule(name).children()]

    def replicated_parameters(self, quantised: bool = False) -> list[nn.Parameter]:
        """A frozen tower too: ranks that hold no image would not gather it together with the others."""
        tower = [] if is_trained(self.visual) else self.visual.parameters()
        return [*super().replicated_parameters(quantised), *tower]

    def parts(self) -> dict[str, list[nn.Parameter]]:
        """The parameters of each of MODEL_PARTS."""
        vision, projector = list(self.visual.parameters()), list(self.projector.parameters())
        projector += self.deepstack.parameters()
        images = {id(parameter) for parameter in (*vision, *projector)}
        text = [parameter for parameter in self.parameters() if id(parameter) not in images]
        return dict(zip(MODEL_PARTS, (vision, projector, text), strict=True))

    @property
    def trains_images_alone(self) -> bool:
        """Whether gradients are wanted, of the image side only: without an image the loss would depend on nothing."""
        images = (self.visual, self.projector, self.deepstack)
        if not torch.is_grad_enabled() or any(is_trained(part) for part in self.children() if part not in images):
            return False
        return any(map(is_trained, images))

    def prepare_training_images(self, input_ids: Tensor, labels: Tensor | None, **inputs: Any) -> Any:
        """What the model's `prepare_images` returns for ids with these labels."""
        return cast(Any, self).prepare_images(input_ids, **inputs)

    def train_parts(self, names: Collection[str]) -> None:
        """Trains these of MODEL_PARTS and freezes the others. A frozen tower runs without autograd.

        Raises InputError for another name, and for none.
        """
        unknown = sorted(set(names) - set(MODEL_PARTS))
        if unknown or not names:
            raise InputError(f"parts to train: {', '.join(unknown) or 'none'}; choose from: {', '.join(MODEL_PARTS)}")
        for name, parameters in self.parts().items():
            for parameter in parameters:
                parameter.requires_grad_(name in names)


class VisionLanguageModel(ImageParts):
    """A causal language model with images. Its subclasses, the architectures, name its four parts.

    They are the text model, whose blocks `layer` builds; the vision tower `visual`, which `tower` builds; the
    `projector`, a `Projector` from the tower's width to that of the text model; and `Placer`, which decides what the
    tower reads of images and which tokens stand for them.
    names: how a checkpoint names tower and projector.
    as_transformers: positions behind a video as in transformers 5, which departs from the models' training: see
    `text_positions`. For comparisons.
    """

    as_transformers = False
    takes_images = True
    pixel_inputs = PIXEL_INPUTS
    Placer: ClassVar[type[ImagePlacer]]
    Projector: ClassVar[type[nn.Module]]
    names: ClassVar[ImageNames]

    def __init__(self, config: MultimodalConfig) -> None:
        super().__init__(config)
        vision = config.vision
        vision.check_features(config.hidden_size)
        self.visual = self.tower(vision)
        self.projector = self.merger(vision)
        tapped = len(self.visual.tapped)
        self.deepstack = nn.ModuleList(
            PatchMerger(vision, config.hidden_size, norm_squares=True) for _ in range(tapped)
        )
        name_parts(self, self.weight_rules())

    @staticmethod
    @abstractmethod
    def tower(config: Any) -> VisionTower:
        """Builds the vision tower."""

    def merger(self, config: Any) -> nn.Module:
        """Builds the projector, which takes the tower's output (x, residual)."""
        return self.Projector(config, self.config.hidden_size)

    @property
    def placer(self) -> ImagePlacer:
        return self.Placer(self.config, self.as_transformers)

    @property
    def sees_prompt_ahead(self) -> bool:
        return self.Placer.sees_prompt_ahead

    def text_rules(self) -> tuple[Rule, ...]:
        """The rules of the text model in the Hub's layout, under its names here."""
        return packed_projections(self.config)

    def weight_rules(self) -> tuple[Rule, ...]:
        return self.names.layouts(self.text_rules())[0]

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        return self.names.layouts(self.text_rules())[1:]

    def kept_tensors(self) -> tuple[str, ...]:
        return self.names.kept_tensors(self.config.vision)

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, *, images: Images | None = None,
        pixel_values: Tensor | None = None, image_grid_thw: Tensor | None = None, image_sizes: Tensor | None = None,
        pixel_values_videos: Tensor | None = None, video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Sequence[float] | Tensor | None = None, pixel_attention_mask: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None, token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None, rope_ids: Tensor | None = None, **inputs: Any,
    ) -> CausalLMOutput:  # fmt: skip
        """Is `CausalLM.forward` with images.

        images: what `prepare_images` returned, on the model's device. In its place the tensors of the Hub's processors:
        pixel_values: [P, values of a patch], patches of all images in the order of their tokens. image_grid_thw: int
        [images, 3], patches over time, height and width. pixel_values_videos, video_grid_thw: the same of videos.
        image_sizes: see `PixtralPlacer.place`.
        second_per_grid_ts: of each video, the seconds between two of its frames; None for one.
        pixel_attention_mask: of tiles [B, N, side, side], 0 at padding; None for no padding.
        mm_token_type_ids: not needed; the token ids say it. token_type_ids: needed neither, but read where a prompt is
        seen as a whole: see `PrefixPlacer.prepare`.
        position_ids: as those of `CausalLM.forward`; or [3, B, T], of time, height and width; or [4, B, T], both.

        Without `images` the ids are read on the host. Raises InputError for images that do not fit the tokens.
        """
        if self.sees_prompt_ahead and token_type_ids is not None and pixel_values is None:
            raise InputError(
                "token_type_ids: belong to pixel_values; a text without pictures is causal, leave them out"
            )
        pixels: dict[str, Any] = {
            "pixel_values": pixel_values, "image_grid_thw": image_grid_thw, "image_sizes": image_sizes,
            "pixel_values_videos": pixel_values_videos, "video_grid_thw": video_grid_thw,
            "second_per_grid_ts": second_per_grid_ts, "pixel_attention_mask": pixel_attention_mask,
        }  # fmt: skip
        pixels = {name: value for name, value in pixels.items() if value is not None}
        if pixels and self.sees_prompt_ahead:
            pixels |= {"labels": labels, "token_type_ids": token_type_ids}
        inputs |= {"position_ids": position_ids, "rope_ids": rope_ids}
        input_ids, inputs = self.with_features(input_ids, images, pixels, **inputs)
        return super().forward(input_ids, labels, **inputs)

    def with_features(
        self, input_ids: Tensor | None, images: Images | None, pixels: Mapping[str, Any], *,
        position_ids: Tensor | None = None, rope_ids: Tensor | None = None, **inputs: Any,
    ) -> tuple[Tensor | None, dict[str, Any]]:  # fmt: skip
        """The ids and other arguments of `forward` as the decoder reads them, with the features of the images."""
        if position_ids is not None and position_ids.ndim == 3:
            rope_ids, position_ids = position_ids[-3:], position_ids[0] if len(position_ids) == 4 else None
        cache = inputs.get("cache")
        if pixels:
            if images is not None or input_ids is None or inputs.get("shared_keys") is not None:
                raise ValueError("forward: pixel_values need input_ids, without images and without shared_keys")
            given = {name: inputs.get(name) for name in ("attention_mask", "cu_seqlens")}
            images = self.prepare_images(input_ids, position_ids=position_ids, **given, **pixels)
            images = images.to(input_ids.device)
        if images is not None:
            inputs["features"] = self.encode_images(images)
            if rope_ids is None and images.rope_ids is not None:
                rope_ids = images.rope_ids if cache is None else cache.extend_rope(images.rope_ids, images.rope_offsets)
        elif "features" not in inputs and (
            self.trains_images_alone or (is_sharded(self) and (is_trained(self.visual) or is_trained(self.projector)))
        ):
            inputs["features"] = no_features(self.encode_grey_image())
        if input_ids is not None and self.config.image_token_id >= self.config.vocab_size:  # it has no embedding
            input_ids = input_ids.masked_fill(input_ids == self.config.image_token_id, 0)
        return input_ids, inputs | {"position_ids": position_ids, "rope_ids": rope_ids}

    def encode_images(self, images: Images) -> ImageFeatures:
        """Runs the tower and the projector. A tower of which nothing is trained keeps nothing for backward."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_trained(self.visual)):
            x, residual, tapped = self.visual(images.pixels, images.layout)
        deepstack = [merger(states, None) for merger, states in zip(self.deepstack, tapped, strict=True)]
        return ImageFeatures(self.projector(x, residual), images.places, tuple(deepstack), images.ahead)

    def encode_prompt(self, images: Images) -> PromptImages:
        """The features of one prompt's images, for generation. images: of the ids [1, T]."""
        order = images.places.argsort()
        features, there = self.encode_images(images.to(self.device)), order.to(self.device)
        rope_ids, offsets, ahead = images.rope_ids, images.rope_offsets, features.ahead
        return PromptImages(
            features.values[there], images.places[order], None if rope_ids is None else rope_ids[:, 0],
            0 if offsets is None else int(offsets), tuple(values[there] for values in features.deepstack),
            None if ahead is None else ahead.to_cpu(),
        )  # fmt: skip

    def encode_grey_image(self) -> ImageFeatures:
        """The features of a smallest image.

        Where the model is sharded, ranks without images run it too: all ranks gather weights and reduce gradients.
        Where nothing of the text model is trained, a batch without an image has zero gradients through it.
        """
        device, grid = self.device, self.placer.smallest_grid
        layout, _ = self.placer.layout([grid])
        pixels = torch.zeros(grid.patches, self.config.vision.pixels_per_patch, device=device)
        layout = tree_map_only(Tensor, lambda x: x.to(device), layout)
        return self.encode_images(Images(pixels, layout, pixels.new_empty(0)))

    @property
    def processor_settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.placer.settings

    def example_images(self, rows: int) -> tuple[int, dict[str, Tensor]]:
        return self.placer.example(rows)

    @torch.no_grad()
    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, mm_token_type_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Is `CausalLM.generate` with the pixel inputs of `forward` among the options.

        Raises InputError for tokens behind a prompt that is seen as a whole, by token_type_ids: all of it is seen.
        """
        if self.sees_prompt_ahead and token_type_ids is not None and token_type_ids.any():
            raise InputError("token_type_ids: has 1, which is behind a prompt; generate takes prompts alone")
        pixels = {name: options.pop(name) for name in PIXEL_INPUTS if options.get(name) is not None}
        if pixels:
            rows = input_ids if attention_mask is None else input_ids.masked_fill(attention_mask == 0, -1)
            options["images"] = self.placer.split_by_row(pixels, rows.cpu())
        return super().generate(input_ids, attention_mask, **options)

    @_disable_dynamo
    def prepare_images(self, input_ids: Tensor, **inputs: Any) -> Images:
        """Everything about the images of a batch that needs no weights, on the CPU but for the pixels.

        Arguments as those of `forward`. Uses the configuration alone: the model may be on the meta device.
        Raises InputError if the images are not those that the tokens of each row or packed document stand for.
        """
        return self.placer.prepare(input_ids, **inputs)

    def prepare_training_images(self, input_ids: Tensor, labels: Tensor | None, **inputs: Any) -> Images:
        inputs |= {"labels": labels} if self.sees_prompt_ahead else {}
        return self.prepare_images(input_ids, **inputs)


def is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
