"""Runs transformers, the reference implementation. Only this file imports it, and only inside functions."""

import importlib.metadata
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.configs.quantisation import scheme_of
from ligermodels.errors import CheckpointError, InputError, first_line

MIN_MAJOR_VERSION = 5  # the first version with an option to run experts as a plain loop


def require_transformers() -> None:
    """Raises InputError if transformers is not installed or too old."""
    remedy = f"pip install 'transformers>={MIN_MAJOR_VERSION}'"
    if importlib.util.find_spec("transformers") is None:
        raise InputError(f"verify: transformers is not installed, which it compares with: {remedy}")
    if int(version().partition(".")[0]) < MIN_MAJOR_VERSION:
        raise InputError(f"verify: transformers {version()} is too old to compare with: {remedy}")


def refuse_computing_in_bits(name: str | Path, raw: Mapping[str, Any]) -> None:
    """Raises InputError for a checkpoint that transformers keeps in few bits, without gradients. raw: its config.json.
    It dequantises MXFP4."""
    if (scheme := scheme_of(raw)) in ("nf4", "fp8"):
        raise InputError(
            f"verify: {name} is in {scheme.upper()}, in which transformers computes no gradients; verify its "
            f"dequantised weights: ligermodels export {name} dense --dtype bfloat16"
        )


def version() -> str:
    """The installed version of transformers."""
    return importlib.metadata.version("transformers")


def load_reference_model(folder: Path, dtype: torch.dtype, device: str, images: bool = False) -> nn.Module:
    """The model of transformers in evaluation mode, without fused implementations. Raises CheckpointError.

    images: it is to read images; some configurations have a model of text alone too.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    plain: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        causal = type(config) in AutoModelForCausalLM._model_mapping and not images
        loader: Any = AutoModelForCausalLM if causal else AutoModelForImageTextToText
        model: Any = loader.from_pretrained(folder, dtype=dtype, local_files_only=True, **plain)
    except Exception as error:  # any type: each family has its own code
        raise loading_error(folder, error) from error
    model.config.get_text_config().use_cache = False
    return model.to(device).eval()


def load_reference_tokenizer(folder: Path) -> Any:
    """The tokenizer of transformers. Raises CheckpointError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise loading_error(folder, error) from error


def loading_error(folder: Path, error: Exception) -> CheckpointError:
    """The error for a checkpoint that transformers cannot load."""
    reason = f"{type(error).__name__}: {first_line(error)}"
    return CheckpointError(f"{folder}: transformers {version()} cannot load it: {reason}")


def image_inputs(
    model: nn.Module, ids: Tensor, images: Mapping[str, Tensor], token: int | None, prompt: int | None = None
) -> dict[str, Tensor]:
    """The arguments for images of rows of ids: pixel inputs, and which tokens are of images.

    prompt: the first tokens, of a model whose prompts see all of themselves; it is told which tokens follow them.
    """
    if token is None:
        return {}
    named = inspect.signature(model.forward).parameters
    kinds = (ids == token).long() if prompt is None else token_types(ids, prompt)
    return {**images, **{name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in named}}


def token_types(ids: Tensor, prompt: int) -> Tensor:
    """0 at the first `prompt` tokens of each row, 1 behind them."""
    return (torch.arange(ids.shape[1], device=ids.device) >= prompt).long().expand_as(ids)


@torch.no_grad()
def greedy_continuation(
    model: nn.Module, prompt: Sequence[int], new_tokens: int, device: str,
    images: Mapping[str, Tensor] | None = None, token: int | None = None, ahead: bool = False,
) -> list[int]:  # fmt: skip
    """Greedy decoding without a cache and without the folder's generation settings: a full forward per token.

    images: pixel inputs of the prompt, whose image tokens are `token`. ahead: whether it sees all of itself.
    """
    ids = torch.tensor([list(prompt)], device=device)
    for _ in range(new_tokens):
        inputs = image_inputs(model, ids, images or {}, token, len(prompt) if ahead else None)
        ids = torch.cat([ids, model(ids, **inputs).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()
