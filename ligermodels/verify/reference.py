"""transformers, the reference implementation: the one file of the package that imports it, and only when called."""

import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import CheckpointError, InputError, first_line

MIN_MAJOR_VERSION = 5  # major version: the first whose experts run by a plain loop if asked to


def require_transformers() -> None:
    """Raises InputError where there is nothing to compare with."""
    remedy = f"pip install 'transformers>={MIN_MAJOR_VERSION}'"
    if importlib.util.find_spec("transformers") is None:
        raise InputError(f"verify: transformers, which it compares with, is not installed: {remedy}")
    if int(version().partition(".")[0]) < MIN_MAJOR_VERSION:
        raise InputError(f"verify: transformers {version()} is too old to compare with: {remedy}")


def version() -> str:
    return importlib.metadata.version("transformers")


def load_reference_model(folder: Path, dtype: torch.dtype, device: str) -> nn.Module:
    """Its model in evaluation mode, with nothing of it fused. Raises CheckpointError."""
    from transformers import AutoModelForCausalLM

    plain: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, **plain)
    except Exception as error:  # of any kind, as its code is another for each family
        raise loading_error(folder, error) from error
    model.config.get_text_config().use_cache = False
    return model.to(device).eval()


def load_reference_tokenizer(folder: Path) -> Any:
    """Its tokenizer. Raises CheckpointError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise loading_error(folder, error) from error


def loading_error(folder: Path, error: Exception) -> CheckpointError:
    reason = f"{type(error).__name__}: {first_line(error)}"
    return CheckpointError(f"{folder}: transformers {version()} cannot load it: {reason}")


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters()


@torch.no_grad()
def greedy_continuation(model: nn.Module, prompt: Sequence[int], new_tokens: int, device: str) -> list[int]:
    """The likeliest next token, again and again, each time from the whole text: no cache, no settings of the folder."""
    ids = torch.tensor([list(prompt)], device=device)
    for _ in range(new_tokens):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


def render_conversation(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By the names in memory, without parameters that the text does not reach."""
    return {name: parameter.grad for name, parameter in named_parameters(model) if parameter.grad is not None}
