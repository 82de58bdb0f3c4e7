"""Whole training steps with images on one GPU: tokens/s and peak memory of full fine-tuning in bf16.

    python -m benchmarks.image_step --model gemma-3-4b --batch 8 --images 2 --text 512

Each sequence has its images, then text, all of which is supervised. An image of Llama 3.2 Vision is one token, whatever
its tiles. A Liger row has the number of modules that its patch has put into the model; none is an error. Weights,
tokens and pixels are random; the pixels are made before the clock starts. Rows are measured as in `train_step`,
which also says which AdamW a provider has.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ligermodels
from benchmarks import results, timing
from benchmarks.processes import print_rows_of_providers
from benchmarks.train_step import (
    OURS,
    OURS_OFFLOADED,
    fill_memory,
    make_optimizer,
    plan_settings,
    time_steps,
    training_step,
)
from ligermodels.vision.fixed_size import PicturePlacer
from ligermodels.vision.multimodal import ImageParts
from ligermodels.vision.siglip_tiles import TilePlacer
from ligermodels.vision.tiled_model import TiledVisionLanguageModel

# (family, preset, patches along a side of an image, or its tiles; None where the model fixes its size).
IMAGE_MODELS = {
    "gemma-3-4b": ("gemma3", "4b", None),
    "llama-3.2-11b-vision": ("mllama", "11b", 4),
    "llama-3.2-11b-vision-1-tile": ("mllama", "11b", 1),
    "llava-1.5-7b": ("llava", "7b", None),
    "paligemma-3b": ("paligemma", "3b", None),
    "qwen2-vl-2b": ("qwen2_vl", "2b", 64),
    "qwen2-vl-7b": ("qwen2_vl", "7b", 72),
    "qwen2.5-vl-3b": ("qwen2_5_vl", "3b", 64),
    "qwen2.5-vl-7b": ("qwen2_5_vl", "7b", 72),
    "qwen3-vl-4b": ("qwen3_vl", "4b", 64),
    "smolvlm-500m": ("smolvlm", "500m", None),
}


# Which tokens are of images, under the argument of transformers; other families need none.
KINDS = {"gemma": "token_type_ids", "qwen": "mm_token_type_ids"}


def skeleton(name: str) -> ImageParts:
    """The model on the meta device: its configuration, and how its inputs are made."""
    family, size, _ = IMAGE_MODELS[name]
    model = ligermodels.create(family, size=size, device="meta")
    assert isinstance(model, ImageParts)
    return model


def hugging_face(model: ImageParts, checkpointing: bool) -> nn.Module:
    from transformers import AutoConfig, AutoModelForImageTextToText

    raw = {name: value for name, value in model.config.raw.items() if name != "architectures"}
    config = AutoConfig.for_model(**raw)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        theirs = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    theirs.config.get_text_config().use_cache = False
    if checkpointing:
        theirs.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return theirs.train()


def hugging_face_liger(model: ImageParts, checkpointing: bool) -> nn.Module:
    import liger_kernel.transformers as patches

    getattr(patches, f"apply_liger_kernel_to_{model.config.raw['model_type']}")()
    built = hugging_face(model, checkpointing)
    if not patched_modules(built):
        raise SystemExit("the patch of Liger replaced no module of the model")
    return built


def patched_modules(model: nn.Module) -> int:
    """How many modules are Liger's, or run a forward of Liger's."""
    return sum("liger_kernel" in f"{type(m).__module__} {m.forward.__module__}" for m in model.modules())


def ours(model: ImageParts, checkpointing: bool) -> nn.Module:
    built = ligermodels.create(dict(model.config.raw), dtype=torch.bfloat16, device="cuda")
    if checkpointing:
        built.checkpoint_activations()
    return built


PROVIDERS = {
    "ligermodels": ours,
    OURS: ours,
    OURS_OFFLOADED: ours,
    "hugging face": hugging_face,
    "hugging face + liger": hugging_face_liger,
}


def make_inputs(model: Any, size: int | None, batch: int, images: int, text: int) -> dict[str, Tensor]:
    """A batch, under the Hub's names. size: the last value of IMAGE_MODELS."""
    vision, token, total = model.config.vision, model.config.image_token_id, batch * images
    if isinstance(model, TiledVisionLanguageModel):
        tokens, pixels = 1, {}
    elif isinstance(model.placer, PicturePlacer):
        tokens, pixels = model.example_images(total)
        if isinstance(model.placer, TilePlacer):
            pixels = {name: x.view(batch, images, *x.shape[2:]) for name, x in pixels.items()}
    else:
        assert size is not None
        tokens = (size // vision.spatial_merge_size) ** 2
        pixels = {
            "pixel_values": torch.randn(total * size**2, vision.pixels_per_patch),
            "image_grid_thw": torch.tensor([[1, size, size]] * total),
        }
    image = torch.tensor([5, *[token] * tokens, 6])  # between two tokens of text
    words = torch.randint(1000, 49_000, (batch, text))
    ids = torch.cat([image.repeat(images).expand(batch, -1), words], 1)
    if isinstance(model, TiledVisionLanguageModel):
        assert size is not None
        pixels = make_tiles(model, size, ids, images)
    labels = ids.masked_fill(ids == token, -100)
    if model.sees_prompt_ahead:  # the prompt ends with the last image
        pixels["token_type_ids"] = (torch.arange(ids.shape[1]) >= len(image) * images).long().expand_as(ids)
        labels = labels.masked_fill(pixels["token_type_ids"] == 0, -100)
    return {"input_ids": ids, "labels": labels, **pixels}


def make_tiles(model: TiledVisionLanguageModel, count: int, ids: Tensor, images: int) -> dict[str, Tensor]:
    """Images of `count` tiles, one or four. A token sees the image before it, up to the next."""
    vision, batch = model.config.vision, len(ids)
    most, side = vision.max_num_tiles, vision.image_size
    there = torch.arange(most) < count
    number = (ids == model.config.image_token_id).cumsum(1) - 1  # of the image that each token sees
    seen = number[..., None] == torch.arange(images)
    return {
        "pixel_values": torch.randn(batch, images, most, 3, side, side) * there.view(-1, 1, 1, 1),
        "aspect_ratio_ids": torch.full((batch, images), {1: 1, 4: 6}[count]),  # a tile; two rows of two
        "aspect_ratio_mask": there.long().expand(batch, images, most).contiguous(),
        "cross_attention_mask": (seen[..., None] & there).long(),
    }


def count_patches(model: Any, inputs: dict[str, Tensor], image_tokens: int) -> int:
    """The patches of a batch: of images in tiles those of the most tiles."""
    if isinstance(model, TiledVisionLanguageModel):
        vision, (batch, images) = model.config.vision, inputs["pixel_values"].shape[:2]
        return batch * images * vision.max_num_tiles * vision.patches_per_tile
    return image_tokens * model.config.vision.patches_per_feature


def measure(
    provider: str, name: str, batch: int, images: int, text: int, checkpointing: str, steps: int, gib: float
) -> dict:
    torch.manual_seed(0)
    blueprint: Any = skeleton(name)
    model: Any = PROVIDERS[provider](blueprint, checkpointing == "full")
    optimizer = make_optimizer(provider, model)
    inputs: dict[str, Any] = make_inputs(blueprint, IMAGE_MODELS[name][2], batch, images, text)
    kinds = (inputs["input_ids"] == blueprint.config.image_token_id).long()
    facts = {"image_tokens": int(kinds.sum())}
    if checkpointing == "auto":
        patches = count_patches(blueprint, inputs, facts["image_tokens"])
        batch, length = kinds.shape
        facts |= fill_memory(model, batch, length, gib, patches=patches, **plan_settings(provider, optimizer))
    if PROVIDERS[provider] is ours:  # as a data loader prepares them
        pixels = {key: inputs.pop(key) for key in inputs.keys() - {"input_ids", "labels"}}
        prepared = blueprint.prepare_images(inputs["input_ids"], **pixels)
        inputs = {key: value.cuda() for key, value in inputs.items()} | {"images": prepared.to(torch.device("cuda"))}
    else:
        argument = next((each for family, each in KINDS.items() if name.startswith(family)), None)
        inputs |= {argument: kinds} if argument else {}
        inputs = {key: value.cuda() for key, value in inputs.items()}
        inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
        facts |= {"modules_of_liger": patched_modules(model)} if "liger" in provider else {}
    step = training_step(provider, model, optimizer, inputs)
    return facts | time_steps(step, steps, kinds.numel())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=IMAGE_MODELS, default="gemma-3-4b")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--images", type=int, default=2, help="images of a sequence")
    parser.add_argument("--text", type=int, default=512, help="tokens of text of a sequence")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after a warm-up of 3")
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder for the dated JSON file")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=[*PROVIDERS])
    parser.add_argument(
        "--activation-checkpointing", choices=("full", "auto", "none"), nargs="+", default=["full", "none"]
    )
    parser.add_argument("--memory", type=float, default=130.0, help="GiB that auto fills, of ligermodels alone")
    parser.add_argument("--row", nargs=2, metavar=("PROVIDER", "CHECKPOINTING"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = args.batch, args.images, args.text
    if args.row:
        provider, checkpointing = args.row
        print(json.dumps(measure(provider, args.model, *shape, checkpointing, args.steps, args.memory)))
        return
    rows = print_rows_of_providers("benchmarks.image_step", args.providers, args.activation_checkpointing)
    settings = {"model": args.model, "batch": args.batch, "images": args.images, "text": args.text}
    report = results.environment() | {"ceilings": timing.ceilings()} | settings | {"rows": rows}
    print(results.save(args.output, f"image-step-{args.model}-{'x'.join(map(str, shape))}", report))


if __name__ == "__main__":
    main()
