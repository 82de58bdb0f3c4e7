"""A causal language model that sees tiles of images by cross-attention.

A token sees the image whose token is before it, up to the next image; of images that follow one another the k-th token
sees the first k, and the text behind them all.

`prepare_images` does on the CPU what depends on masks and token ids alone; a data loader may call it, and pass its
result to `forward`, which then waits for nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map_only

from ligermodels.configs.mllama import MllamaConfig
from ligermodels.errors import InputError
from ligermodels.generation.image_features import CrossFeatures, CrossPrompt, TileSpan, cross_features
from ligermodels.layers.decoder import IGNORE_INDEX, CausalLMOutput
from ligermodels.layers.packed import name_parts
from ligermodels.vision.image_placer import Documents, documents_of
from ligermodels.vision.mllama import TiledVisionTower, TileLayout, tile_layout
from ligermodels.vision.multimodal import ImageParts, is_trained
from ligermodels.weights.sharding import is_sharded

TILE_INPUTS = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask")
Tiles = tuple[int, ...]
SQUARE_RATIO = 6  # of aspect_ratio_ids: two rows of two tiles


class TiledImages(NamedTuple):
    """The images of a batch [B, T], as the model reads them.

    pixels: [I, tiles, channels, s, s]. ratios: int64 [I], the aspect ratio of each. layout: of the tower's rows.
    used: int64 [R], the tiles that tokens see, numbered through all images. seen: who sees which of them, without
    values [0, states of a tile]. spans: the same for generation.
    """

    pixels: Tensor
    ratios: Tensor
    layout: TileLayout
    used: Tensor
    seen: CrossFeatures
    spans: tuple[TileSpan, ...]

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=non_blocking), self)


class TiledVisionLanguageModel(ImageParts):
    """A causal language model with images in tiles. Subclasses are the architectures.

    visual: the tower. projector: from its states to the width of the text model.
    as_transformers: compute as transformers 5 does where it departs from the models' training: see
    `TiledVisionTower.taps_after`; and tokens before any image attend to all images of their row. For comparisons, with
    the mask of its processor.
    """

    config: MllamaConfig
    takes_images = True
    pixel_inputs = TILE_INPUTS
    image_processor_type: ClassVar = "MllamaImageProcessor"
    tower_lists = ("visual.blocks", "visual.global_blocks")

    def __init__(self, config: MllamaConfig) -> None:
        super().__init__(config)
        vision = config.vision
        self.visual = TiledVisionTower(vision)
        self.projector = nn.Linear(vision.vision_output_dim, config.hidden_size)
        self.deepstack = nn.ModuleList()
        name_parts(self, self.weight_rules())

    @property
    def as_transformers(self) -> bool:
        return self.visual.taps_after

    @as_transformers.setter
    def as_transformers(self, value: bool) -> None:
        self.visual.taps_after = value

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, *, images: TiledImages | None = None,
        pixel_values: Tensor | None = None, aspect_ratio_ids: Tensor | None = None,
        aspect_ratio_mask: Tensor | None = None, cross_attention_mask: Tensor | None = None, **inputs: Any,
    ) -> CausalLMOutput:  # fmt: skip
        """Is `CausalLM.forward` with images.

        images: what `prepare_images` returned, on the model's device. In its place the tensors of the Hub's processor,
        for at most I images a row, of at most four tiles:
        pixel_values: [B, I, 4, channels, s, s]. aspect_ratio_ids: int [B, I], 0 for no image. aspect_ratio_mask: int
        [B, I, 4], 1 for the tiles of an image. cross_attention_mask: int [B, T, I, 4], which tiles a token sees; None
        for what the image tokens say. In packed documents it is not read.

        Without `images` the ids are read on the host. Raises InputError for images that do not fit the tokens.
        """
        every = pixel_values, aspect_ratio_ids, aspect_ratio_mask, cross_attention_mask
        pixels = {name: x for name, x in zip(TILE_INPUTS, every, strict=True) if x is not None}
        input_ids, inputs = self.with_features(input_ids, images, pixels, **inputs)
        if labels is not None:  # the image token has no row of the head
            labels = labels.masked_fill(labels >= self.config.vocab_size, IGNORE_INDEX)
        return super().forward(input_ids, labels, **inputs)

    def with_features(
        self, input_ids: Tensor | None, images: TiledImages | None, pixels: Mapping[str, Any], **inputs: Any
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """The ids and other arguments of `forward`, with what cross-attention reads of the images."""
        if "pixel_values" in pixels:
            if images is not None or input_ids is None:
                raise ValueError("forward: pixel_values need input_ids, without images")
            given: dict[str, Any] = {
                name: inputs.get(name) for name in ("attention_mask", "position_ids", "cu_seqlens")
            }
            images = self.prepare_images(input_ids, **given, **pixels).to(input_ids.device)
        elif pixels:
            raise InputError(f"images: {', '.join(pixels)} without pixel_values; pass both")
        if images is not None:
            inputs["features"] = images.seen._replace(values=self.encode_tiles(images))
        elif (
            "features" not in inputs and inputs.get("cache") is None and (is_sharded(self) or self.trains_images_alone)
        ):
            inputs["features"] = self.unseen_image()
        return input_ids, inputs

    def encode_tiles(self, images: TiledImages) -> Tensor:
        """The states of the used tiles, [R, N, H]. A tower of which nothing is trained keeps nothing for backward."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_trained(self.visual)):
            states = self.visual(images.pixels, images.ratios, images.layout)
        return self.projector(states.flatten(0, 1)[images.used])

    def encode_prompt(self, images: TiledImages) -> CrossPrompt:
        """The images of one prompt, for generation. images: of the ids [1, T]."""
        return CrossPrompt(self.encode_tiles(images.to(self.device)), images.spans)

    def unseen_image(self) -> CrossFeatures:
        """An image of one black tile that no token sees.

        Where the model is sharded, ranks without images run it too: all ranks gather weights and reduce gradients.
        Where nothing of the text model is trained, a batch without an image has zero gradients through it.
        """
        vision = self.config.vision
        pixels = torch.zeros(1, vision.max_num_tiles, vision.in_channels, vision.image_size, vision.image_size)
        layout, one = tile_layout([1], vision), torch.ones(1, dtype=torch.int64)
        spans = (TileSpan(0, ()),)
        seen = cross_features(pixels.new_empty(1, vision.tokens_per_tile, 0), spans, 1, [()], pixels.device)
        images = TiledImages(pixels, one, layout, one - 1, seen, spans).to(self.device)
        return images.seen._replace(values=self.encode_tiles(images))

    def example_images(self, rows: int) -> tuple[int, dict[str, Tensor]]:
        """Random pixel inputs of one image of the most tiles a row, and the image tokens of each."""
        vision = self.config.vision
        shape = rows, 1, vision.max_num_tiles, vision.in_channels, vision.image_size, vision.image_size
        pixels = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
        ratios, mask = torch.full((rows, 1), SQUARE_RATIO), torch.ones(*shape[:3], dtype=torch.int64)
        return 1, {"pixel_values": pixels, "aspect_ratio_ids": ratios, "aspect_ratio_mask": mask}

    @property
    def processor_settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        vision = self.config.vision
        size = {"height": vision.image_size, "width": vision.image_size}
        return {
            "image_processor_type": self.image_processor_type, "size": size, "max_image_tiles": vision.max_num_tiles,
        }, {}  # fmt: skip

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Is `CausalLM.generate` with the pixel inputs of `forward` among the options."""
        pixels = {name: options.pop(name) for name in TILE_INPUTS if options.get(name) is not None}
        if pixels:
            tokens = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            options["images"] = [
                {name: value[row : row + 1] for name, value in pixels.items()}
                | ({"cross_attention_mask": seen[row : row + 1, tokens[row].bool()]} if seen is not None else {})
                if bool((pixels["aspect_ratio_ids"][row] > 0).any())
                else None
                for seen in [pixels.get("cross_attention_mask")]
                for row in range(len(input_ids))
            ]
        return super().generate(input_ids, attention_mask, **options)

    @_disable_dynamo
    def prepare_images(
        self, input_ids: Tensor, *, pixel_values: Tensor, aspect_ratio_ids: Tensor | None = None,
        aspect_ratio_mask: Tensor | None = None, cross_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None,
    ) -> TiledImages:  # fmt: skip
        """Everything about the images of a batch that needs no weights, on the CPU but for the pixels.

        Arguments as those of `forward`. Uses the configuration alone: the model may be on the meta device.
        Raises InputError if the images are not those that the tokens of each row stand for.
        """
        if aspect_ratio_ids is None or aspect_ratio_mask is None:
            raise InputError(
                "images: pixel_values need aspect_ratio_ids and aspect_ratio_mask; pass what the processor made"
            )
        vision, every = self.config.vision, self.as_transformers
        ids, ratios, mask = input_ids.cpu(), aspect_ratio_ids.cpu(), aspect_ratio_mask.cpu() > 0
        side, most = vision.image_size, vision.max_num_tiles
        rows, slots = ratios.shape
        expected = [rows, slots, most, vision.in_channels, side, side]
        if list(pixel_values.shape) != expected or mask.shape != (rows, slots, most) or rows != len(ids):
            raise InputError(
                f"images: pixel_values have shape {list(pixel_values.shape)}, aspect_ratio_mask {list(mask.shape)}; "
                f"{len(ids)} rows of text and {slots} images each need {[len(ids), *expected[1:]]} and "
                f"{[len(ids), slots, most]}"
            )
        given = mask.new_ones(rows, slots) if every else ratios > 0
        numbers = torch.full((rows, slots), -1).masked_scatter(given, torch.arange(int(given.sum())))
        real = mask.sum(-1)
        column = torch.arange(most)
        shown = given[..., None] & ((column < real[..., None]) | every)  # tiles that tokens may see
        used = torch.where(shown, numbers[..., None] * most + column, -1)
        order = used[shown]
        tiles = torch.full_like(used, -1).masked_scatter(shown, torch.arange(len(order)))
        documents = documents_of(ids, attention_mask, position_ids, cu_seqlens)
        if cross_attention_mask is None or cu_seqlens is not None:
            spans, last = self.spans_by_tokens(
                documents,
                [[tuple(t[t >= 0].tolist()) for t in row[has]] for row, has in zip(tiles, given, strict=True)],
            )
        else:
            spans, last = self.spans_by_mask(documents, cross_attention_mask.cpu(), tiles, every)
        pixels = pixel_values.flatten(0, 1)[given.flatten().to(pixel_values.device)]
        seen = cross_features(torch.empty(1, vision.tokens_per_tile, 0), spans, ids.numel(), last, ids.device)
        layout = tile_layout(real[given].tolist(), vision)
        return TiledImages(pixels, ratios[given], layout, order, seen, tuple(spans))

    def spans_by_tokens(
        self, documents: Documents, images: Sequence[Sequence[Tiles]]
    ) -> tuple[list[TileSpan], list[Tiles]]:
        """The spans of all documents, and the tiles that each sees at its end. images: of each row, their tiles."""
        spans, last, taken = [], [], [0] * documents.shape[0]
        for first, stop in zip(documents.offsets, documents.offsets[1:], strict=False):
            places = (documents.ids[first:stop] == self.config.image_token_id).nonzero()[:, 0].tolist()
            row = int(documents.places[first]) // documents.shape[1] if stop > first else 0
            mine = images[row][taken[row] : taken[row] + len(places)]
            taken[row] += len(places)
            if len(mine) < len(places):
                raise InputError(
                    f"images: row {row} has more image tokens than images, {len(images[row])}; remove them"
                )
            if stop > first:
                inside = spans_of_tokens(places, mine)
                spans += [moved(span, int(documents.places[first + span.first])) for span in inside]
                last.append(inside[-1].tiles)
        for row, (count, all_images) in enumerate(zip(taken, images, strict=True)):
            if count < len(all_images):
                raise InputError(
                    f"images: {len(all_images) - count} of {len(all_images)} images of row {row} have no token in the "
                    "text; remove them"
                )
        return spans, last

    def spans_by_mask(
        self, documents: Documents, mask: Tensor, tiles: Tensor, every: bool
    ) -> tuple[list[TileSpan], list[Tiles]]:
        """Finds spans by a mask [B, T, I, 4]. tiles: int64 [B, I, 4], their numbers. every: see `as_transformers`."""
        expected = (*documents.shape, *tiles.shape[1:])
        if mask.shape != expected:
            raise InputError(f"cross_attention_mask: has shape {list(mask.shape)}; must be {list(expected)}")
        spans, last = [], []
        for first, stop in zip(documents.offsets, documents.offsets[1:], strict=False):
            places = documents.places[first:stop]
            row = int(places[0]) // documents.shape[1]
            blind = tuple(tiles[row].flatten().tolist()) if every else ()
            inside = spans_of_mask(mask.flatten(0, 1)[places].flatten(1) > 0, tiles[row].flatten().tolist(), blind)
            spans += [moved(span, int(places[span.first])) for span in inside]
            last.append(inside[-1].tiles)
        return spans, last


def spans_of_tokens(image_places: Sequence[int], images: Sequence[Tiles]) -> list[TileSpan]:
    """The spans of a document whose image tokens stand at these places. images: the tiles of each."""
    spans = [] if image_places and image_places[0] == 0 else [TileSpan(0, ())]
    seen: Tiles = ()
    for number, place in enumerate(image_places):
        follows = number > 0 and image_places[number - 1] == place - 1
        seen = (*seen, *images[number]) if follows else images[number]
        spans.append(TileSpan(place, seen))
    return spans


def spans_of_mask(mask: Tensor, tiles: Sequence[int], blind: Tiles) -> list[TileSpan]:
    """The spans of a row by a mask [T, tiles] of the tiles that each token sees. tiles: the number of each column, -1
    for a tile that no image has. blind: the tiles that tokens attend to which see none."""
    changes = (mask[1:] != mask[:-1]).any(1).nonzero()[:, 0] + 1
    spans = []
    for first in (0, *changes.tolist()):
        seen = tuple(tiles[column] for column in mask[first].nonzero()[:, 0].tolist() if tiles[column] >= 0)
        spans.append(TileSpan(first, seen or blind, is_blind=not seen))
    return spans


def moved(span: TileSpan, place: int) -> TileSpan:
    return span._replace(first=place)
