"""Tiny random models of the reference implementation (transformers), with every parameter re-randomised."""

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion


def reference_model(raw: dict[str, Any], dtype: torch.dtype = torch.float32) -> nn.Module:
    """The reference model of a config: eager attention and experts, and no parameter at its initial value."""
    with TemporaryDirectory() as folder:  # read from a file, as for users
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        config = AutoConfig.from_pretrained(folder)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = auto_class(config).from_config(config, dtype=torch.float32, **eager)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.3 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.randn(buffer.shape, generator=generator))
    return model.to(dtype).eval()


class Fp32Products(TorchFunctionMode):
    """Linears of bf16 compute in fp32 and round once, as on a GPU. A CPU without instructions for bf16 takes seven
    times as long, for the same results but for one rounding in 10,000."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.linear or args[0].dtype is not torch.bfloat16:
            return func(*args, **kwargs or {})
        x, weight, *bias = (value if value is None else value.float() for value in args)
        return func(x, weight, *bias).bfloat16()


def products(device: str) -> AbstractContextManager[Any]:
    """How models in bf16 are computed on a device."""
    return Fp32Products() if device == "cpu" else nullcontext()


class KeepFp64(TorchFunctionMode):
    """Norms, softmaxes and scans of the reference cast to fp32. In this mode, fp64 tensors stay fp64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if len(args) == 1 and not kwargs and func is not Tensor.float:  # most calls: no dtype is given
            return func(*args)
        if func is Tensor.float and args[0].dtype == torch.int64:  # positions
            return args[0].double()
        options = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            options = {key: torch.float64 if value is torch.float32 else value for key, value in options.items()}
        return func(*args, **options)


def auto_class(config: PreTrainedConfig) -> type:
    """The class that builds the model of a config: text models with an image side are not always causal ones there."""
    with_images = hasattr(config, "vision_config")
    return AutoModelForImageTextToText if with_images else AutoModelForCausalLM


def save_reference(raw: dict[str, Any], folder: Path) -> nn.Module:
    """Writes the checkpoint of the reference model, with config.json exactly as given; returns the model."""
    model = reference_model(raw)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw, indent=2))
    return model


def hub_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a reference model under their Hub names, which differ from its names in memory."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return revert_weight_conversion(model, state)


def tokens(raw: dict[str, Any], batch: int = 2, length: int = 23, seed: int = 3) -> Tensor:
    """Random token ids [batch, length], including the padding id."""
    text = raw.get("text_config", raw)
    ids = torch.randint(3, text["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))
    if "pad_token_id" in text and length > 5:
        ids[0, 5] = text["pad_token_id"]
    return ids


def prompt_of(raw: dict[str, Any], length: int, seed: int) -> Tensor:
    """Random token ids [length] without the token of images, which a prompt without images must not have."""
    ids = tokens(raw, 1, length, seed)[0]
    return ids.masked_fill(ids == raw.get("image_token_id", raw.get("image_token_index", -1)), 1)


def labels_of(input_ids: Tensor) -> Tensor:
    """Labels: input_ids with some positions unsupervised (-100)."""
    labels = input_ids.clone()
    labels[0, :4] = -100
    labels[-1, -2:] = -100
    return labels
