"""Whole training steps with images on one GPU: tokens/s and peak memory of full fine-tuning in bf16.

    python -m benchmarks.image_step --model gemma-3-4b --batch 8 --images 2 --text 512

Each sequence has its images, then text, all of which is supervised. Weights, tokens and pixels are random; the pixels
are made before the clock starts. Rows are measured as in `train_step`.
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
from benchmarks.train_step import time_steps
from ligermodels.layers.multimodal import VisionLanguageModel
from ligermodels.layers.pictures import PictureLanguageModel

# (family, preset, patches along a side of an image; None where the model fixes its size).
IMAGE_MODELS = {
    "gemma-3-4b": ("gemma3", "4b", None),
    "qwen2-vl-2b": ("qwen2_vl", "2b", 64),
    "qwen2-vl-7b": ("qwen2_vl", "7b", 72),
    "qwen2.5-vl-3b": ("qwen2_5_vl", "3b", 64),
    "qwen2.5-vl-7b": ("qwen2_5_vl", "7b", 72),
    "qwen3-vl-4b": ("qwen3_vl", "4b", 64),
}


def skeleton(name: str) -> VisionLanguageModel:
    """The model on the meta device: its configuration, and how its inputs are made."""
    family, size, _ = IMAGE_MODELS[name]
    model = ligermodels.create(family, size=size, device="meta")
    assert isinstance(model, VisionLanguageModel)
    return model


def hugging_face(model: VisionLanguageModel, checkpointing: bool) -> nn.Module:
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


def hugging_face_liger(model: VisionLanguageModel, checkpointing: bool) -> nn.Module:
    import liger_kernel.transformers as patches

    getattr(patches, f"apply_liger_kernel_to_{model.config.raw['model_type']}")()
    return hugging_face(model, checkpointing)


def ours(model: VisionLanguageModel, checkpointing: bool) -> nn.Module:
    built = ligermodels.create(dict(model.config.raw), dtype=torch.bfloat16, device="cuda")
    if checkpointing:
        built.checkpoint_activations()
    return built


PROVIDERS = {"ligermodels": ours, "hugging face": hugging_face, "hugging face + liger": hugging_face_liger}


def make_inputs(model: VisionLanguageModel, side: int | None, batch: int, images: int, text: int) -> dict[str, Tensor]:
    """A batch, under the Hub's names. side: patches along a side of an image."""
    vision, token, total = model.config.vision, model.config.image_token_id, batch * images
    if isinstance(model, PictureLanguageModel):
        tokens, pixels = model.example_images(total)
    else:
        assert side is not None
        tokens = (side // vision.spatial_merge_size) ** 2
        pixels = {
            "pixel_values": torch.randn(total * side**2, vision.pixels_per_patch),
            "image_grid_thw": torch.tensor([[1, side, side]] * total),
        }
    image = torch.tensor([5, *[token] * tokens, 6])  # between two tokens of text
    words = torch.randint(1000, 50_000, (batch, text))
    ids = torch.cat([image.repeat(images).expand(batch, -1), words], 1)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == token, -100), **pixels}


def measure(provider: str, name: str, batch: int, images: int, text: int, checkpointing: bool, steps: int) -> dict:
    torch.manual_seed(0)
    blueprint = skeleton(name)
    model = PROVIDERS[provider](blueprint, checkpointing)
    inputs: dict[str, Any] = make_inputs(blueprint, IMAGE_MODELS[name][2], batch, images, text)
    kinds = (inputs["input_ids"] == blueprint.config.image_token_id).long()
    if provider == "ligermodels":  # as a data loader prepares them
        pixels = {key: inputs.pop(key) for key in ("pixel_values", "image_grid_thw") if key in inputs}
        prepared = blueprint.prepare_images(inputs["input_ids"], **pixels)
        inputs = {key: value.cuda() for key, value in inputs.items()} | {"images": prepared.to(torch.device("cuda"))}
    else:
        inputs["token_type_ids" if "gemma" in name else "mm_token_type_ids"] = kinds
        inputs = {key: value.cuda() for key, value in inputs.items()}
        inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> Tensor:
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return {"image_tokens": int(kinds.sum())} | time_steps(step, steps, kinds.numel())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=IMAGE_MODELS, default="gemma-3-4b")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--images", type=int, default=2, help="images of a sequence")
    parser.add_argument("--text", type=int, default=512, help="tokens of text of a sequence")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after a warm-up of 3")
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder for the dated JSON file")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=[*PROVIDERS])
    parser.add_argument("--activation-checkpointing", choices=("full", "none"), nargs="+", default=["full", "none"])
    parser.add_argument("--row", nargs=2, metavar=("PROVIDER", "CHECKPOINTING"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = args.batch, args.images, args.text
    if args.row:
        provider, checkpointing = args.row
        print(json.dumps(measure(provider, args.model, *shape, checkpointing == "full", args.steps)))
        return
    rows = print_rows_of_providers("benchmarks.image_step", args.providers, args.activation_checkpointing)
    settings = {"model": args.model, "batch": args.batch, "images": args.images, "text": args.text}
    report = results.environment() | {"ceilings": timing.ceilings()} | settings | {"rows": rows}
    print(results.save(args.output, f"image-step-{args.model}-{'x'.join(map(str, shape))}", report))


if __name__ == "__main__":
    main()
