"""A causal language model that sees images: a vision tower, a projector, and their features among the embeddings.

`prepare_images` does on the CPU what depends on grids and token ids alone; a data loader may call it, and pass its
result to `forward`, which then waits for nothing. Must not know any family, nor files or processors of images.
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map_only

from ligermodels.configs.multimodal import MultimodalConfig
from ligermodels.errors import InputError
from ligermodels.generation.image_features import ImageFeatures, PromptImages, SeenAhead, no_features
from ligermodels.layers.block import Block
from ligermodels.layers.decoder import CausalLM, CausalLMOutput
from ligermodels.layers.packed import name_parts
from ligermodels.vision.patch_positions import Grid, PatchLayout, patch_layout
from ligermodels.vision.token_places import TokenGrid, documents_of, place_images, read_grids, split_by_row
from ligermodels.vision.tower import PatchMerger, VisionTower
from ligermodels.weights.mapping import Concat, Rename, Rule, packed_projections
from ligermodels.weights.sharding import is_sharded

PIXEL_INPUTS = (
    "pixel_values", "image_grid_thw", "image_sizes", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts",
    "pixel_attention_mask",
)  # fmt: skip
MODEL_PARTS = ("vision", "projector", "text")
BLOCK, MERGER = "visual.blocks.{}", "visual.merger"
# The names of Qwen's towers: ours -> those on the Hub, without the feed-forward layers.
QWEN_NAMES = {
    "visual.patch_embed": "visual.patch_embed.proj",
    f"{BLOCK}.input_layernorm": f"{BLOCK}.norm1",
    f"{BLOCK}.post_attention_layernorm": f"{BLOCK}.norm2",
    f"{BLOCK}.self_attn.qkv_proj": f"{BLOCK}.attn.qkv",
    f"{BLOCK}.self_attn.o_proj": f"{BLOCK}.attn.proj",
    "projector.norm": f"{MERGER}.ln_q",
    "projector.fc1": f"{MERGER}.mlp.0",
    "projector.fc2": f"{MERGER}.mlp.2",
}


class Images(NamedTuple):
    """The images and videos of a batch [B, T], as the model reads them.

    pixels: [P, values of a patch], the patches of all images, then of all videos, in the order of the tower's windows.
    layout: of these patches. places: int64 [N], of the tokens of their features in the flattened batch.
    rope_ids: int64 [3, B, T], the positions of all tokens, from 0 in each row or packed document.
    rope_offsets: int64 [B, 1], of unpacked rows: what positions behind them are ahead of the number of tokens.
    These two are None where the tokens' own positions are those of RoPE.
    ahead: which tokens of the flattened batch see others behind them; None for none.
    """

    pixels: Tensor
    layout: PatchLayout
    places: Tensor
    rope_ids: Tensor | None = None
    rope_offsets: Tensor | None = None
    ahead: SeenAhead | None = None

    def continuing(self, offsets: Sequence[int], prefixes: Sequence[int | None]) -> Self:
        """The same where packed documents share prefixes: the positions of a document go on from those of its prefix.

        offsets: of the documents. prefixes: for each, the number of the document whose keys it reads before its own.
        """
        if self.rope_ids is None:
            return self
        rope_ids = self.rope_ids.clone()
        for document, prefix in enumerate(prefixes):
            if prefix is not None:
                behind = self.rope_ids[..., offsets[prefix] : offsets[prefix + 1]].max() + 1
                rope_ids[..., offsets[document] : offsets[document + 1]] += behind
        return self._replace(rope_ids=rope_ids)

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=non_blocking), self)


class ImageParts(CausalLM):
    """A causal language model with a vision tower, of which parts are trained or frozen.

    visual: the tower. projector: from its states to the width of the text model. deepstack: further projectors.
    """

    config: Any
    tower_lists: ClassVar[tuple[str, ...]] = ("visual.blocks",)  # of the tower's blocks, by name
    sees_prompt_ahead: ClassVar = False  # whether tokens of a prompt see those behind them
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
    """A causal language model with images. Subclasses are the architectures.

    visual: the tower. projector: from the tower's width to that of the text model.
    as_transformers: positions behind a video as in transformers 5, which departs from the models' training: see
    `text_positions`. For comparisons.
    """

    config: Any
    as_transformers = False
    takes_images = True
    pixel_inputs = PIXEL_INPUTS
    image_processor_type: ClassVar = "Qwen2VLImageProcessor"  # of the Hub's files
    splits_videos: ClassVar[bool] = False  # whether text stands between the frames of a video
    hub_text: ClassVar[str] = "model"  # the Hub's name of the text model
    hub_names: ClassVar[Mapping[str, str | tuple[str, ...]]]  # of tower and projector: ours -> the Hub's, or its parts

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

    def weight_rules(self) -> tuple[Rule, ...]:
        return self.rules(self.hub_text, "", self.text_rules())

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """The names that transformers 5 has in memory."""
        return (self.rules("model.language_model", "model.", self.text_rules()),)

    def rules(self, text: str, outer: str, text_rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        """The rules of the layout that has the text model at `text`, and `outer` before the names of the image side.

        text_rules: of the text model, under its names here.
        """
        return (
            Rename(text, "model", text_rules),
            *(
                Rename(outer + hub, ours) if isinstance(hub, str) else Concat(ours, tuple(outer + part for part in hub))
                for ours, hub in self.hub_names.items()
            ),
        )

    def text_rules(self) -> tuple[Rule, ...]:
        """Those of the text model in the Hub's layout, under its names here."""
        return packed_projections(self.config)

    @abstractmethod
    def tower(self, config: Any) -> VisionTower:
        """Builds the vision tower."""

    def merger(self, config: Any) -> nn.Module:
        """Builds the projector, which takes the tower's output (x, residual)."""
        return PatchMerger(config, self.config.hidden_size)

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        images: Images | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        image_sizes: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Sequence[float] | Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        rope_ids: Tensor | None = None,
        **inputs: Any,
    ) -> CausalLMOutput:
        """As `CausalLM.forward`, with images.

        images: what `prepare_images` returned, on the model's device. In its place the tensors of the Hub's processors:
        pixel_values: [P, values of a patch], patches of all images in the order of their tokens. image_grid_thw: int
        [images, 3], patches over time, height and width. pixel_values_videos, video_grid_thw: the same of videos.
        image_sizes: see `prepare_images` of the models that take it in place of grids.
        second_per_grid_ts: of each video, the seconds between two of its frames; None for one.
        pixel_attention_mask: of tiles [B, N, side, side], 0 at padding; None for no padding.
        mm_token_type_ids, token_type_ids: not needed; the token ids say it.
        position_ids: as those of `CausalLM.forward`; or [3, B, T], of time, height and width; or [4, B, T], both.

        Without `images` the ids are read on the host. Raises InputError for images that do not fit the tokens.
        """
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
        device = self.device
        layout, _ = self.patch_layout([self.smallest_grid])
        pixels = torch.zeros(self.smallest_grid.patches, self.config.vision.pixels_per_patch, device=device)
        layout = tree_map_only(Tensor, lambda x: x.to(device), layout)
        return self.encode_images(Images(pixels, layout, pixels.new_empty(0)))

    @property
    def smallest_grid(self) -> Grid:
        side = self.config.vision.spatial_merge_size
        return Grid(1, side, side)

    @property
    def processor_settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a new processor must know: the fields of preprocessor_config.json, and of processor_config.json."""
        vision = self.config.vision
        image = {
            "image_processor_type": self.image_processor_type, "patch_size": vision.patch_size,
            "merge_size": vision.spatial_merge_size, "temporal_patch_size": vision.temporal_patch_size,
        }  # fmt: skip
        return image, {}

    def example_images(self, rows: int) -> tuple[int, dict[str, Tensor]]:
        """Random pixel inputs of one image a row, and the image tokens of each."""
        vision, side = self.config.vision, self.config.vision.spatial_merge_size
        grid = Grid(1, 2 * side, 3 * side)
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randn(rows * grid.patches, vision.pixels_per_patch, generator=generator)
        return grid.merged(side).patches, {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid] * rows)}

    def patch_layout(self, grids: Sequence[Grid]) -> tuple[PatchLayout, Tensor | None]:
        """The layout of the patches of images with these grids, and the order of their squares in it."""
        return patch_layout(grids, self.config.vision.spatial_merge_size)

    def frame_interval(self, seconds: float) -> float:
        """What time advances from one frame of a video to the next, in positions. seconds: between them."""
        return 1.0

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        mm_token_type_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """As `CausalLM.generate`, with the pixel inputs of `forward` among the options."""
        pixels = {name: options.pop(name) for name in PIXEL_INPUTS if options.get(name) is not None}
        if pixels:
            rows = input_ids if attention_mask is None else input_ids.masked_fill(attention_mask == 0, -1)
            options["images"] = self.split_by_row(pixels, rows.cpu())
        return super().generate(input_ids, attention_mask, **options)

    def split_by_row(self, pixels: Mapping[str, Any], ids: Tensor) -> list[dict[str, Any]]:
        """The pixel inputs of a batch, for each of its rows alone. ids: [B, T] on the CPU, other ids at padding."""
        return split_by_row(pixels, ids, self.config)

    @_disable_dynamo
    def prepare_images(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Sequence[float] | Tensor | None = None,
        **others: Any,
    ) -> Images:
        """Everything about the images of a batch that needs no weights, on the CPU but for the pixels.

        Arguments as those of `forward`. Uses the configuration alone: the model may be on the meta device.
        Raises InputError if the images are not those that the tokens of each row or packed document stand for.
        """
        if others:
            raise InputError(f"{', '.join(others)}: the model takes pixels with grids; leave it out")
        vision, ids = self.config.vision, input_ids.cpu()
        pictures = read_grids("image_grid_thw", image_grid_thw, pixel_values, vision)
        videos = read_grids("video_grid_thw", video_grid_thw, pixel_values_videos, vision)
        seconds = [1.0] * len(videos) if second_per_grid_ts is None else [float(x) for x in second_per_grid_ts]
        if len(seconds) != len(videos):
            raise InputError(f"second_per_grid_ts: has {len(seconds)} numbers for {len(videos)} videos")
        side = vision.spatial_merge_size
        grids = [TokenGrid(self.config.image_token_id, grid.merged(side)) for grid in pictures]
        for grid, second in zip(videos, seconds, strict=True):
            if self.splits_videos:
                grids += [TokenGrid(self.config.video_token_id, Grid(1, *grid[1:]).merged(side))] * grid.t
            else:
                grids.append(TokenGrid(self.config.video_token_id, grid.merged(side), self.frame_interval(second)))
        documents = documents_of(ids, attention_mask, position_ids, cu_seqlens)
        placed = place_images(documents, grids, self.as_transformers)
        given = [x for x in (pixel_values, pixel_values_videos) if x is not None]
        pixels = given[0] if len(given) == 1 else torch.cat(given)
        layout, order = self.patch_layout([*pictures, *videos])
        if order is not None:
            squares = pixels.view(-1, vision.patches_per_feature * vision.pixels_per_patch)
            pixels, placed = squares[order.to(pixels.device)].view_as(pixels), placed.reordered(order)
        return Images(pixels, layout, *placed)


def is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
