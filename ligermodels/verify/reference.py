"""Runs transformers, the reference implementation. Only this file imports it, and only inside functions."""

import importlib.metadata
import importlib.util
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
    with quiet_libraries():
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    plain: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with loading(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        causal = type(config) in AutoModelForCausalLM._model_mapping and not images
        loader: Any = AutoModelForCausalLM if causal else AutoModelForImageTextToText
        model: Any = loader.from_pretrained(folder, dtype=dtype, local_files_only=True, **plain)
    model.config.get_text_config().use_cache = False
    return model.to(device).eval()


def load_reference_tokenizer(folder: Path, as_stored: bool = False) -> Any:
    """The tokenizer of transformers. Raises CheckpointError.

    as_stored: of the class that takes all of tokenizer.json; others, as GPT2Tokenizer, make their own pre-tokenizer.
    """
    with quiet_libraries():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with loading(folder):
        loader: Any = PreTrainedTokenizerFast if as_stored else AutoTokenizer
        return loader.from_pretrained(folder, local_files_only=True)


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Surrounds a load by transformers. Raises CheckpointError for a checkpoint that it cannot load."""
    try:
        with quiet_libraries():
            yield
    except Exception as error:  # any type: each family has its own code
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{folder}: transformers {version()} cannot load it: {reason}") from error


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silences progress bars, and the notes of libraries on themselves. What they say of a checkpoint, checks find."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    from transformers.utils import logging as of_transformers

    shown = of_transformers.is_progress_bar_enabled()
    of_transformers.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if shown:
            of_transformers.enable_progress_bar()


def image_inputs(model: nn.Module, images: Mapping[str, Tensor], token_types: Tensor) -> dict[str, Tensor]:
    """The arguments for images: pixel inputs, and the types of the tokens, [B, T]; none without images."""
    taken = inspect.signature(model.forward).parameters.keys() & {"mm_token_type_ids", "token_type_ids"}
    return {**images, **dict.fromkeys(taken, token_types)} if images else {}


@torch.no_grad()
def greedy_continuation(
    model: nn.Module, ids: Tensor, images: Mapping[str, Tensor], token_types: Callable[[Tensor], Tensor],
    new_tokens: int,
) -> list[int]:  # fmt: skip
    """Greedy decoding without a cache and without the folder's generation settings: a full forward per token.

    ids: [1, T], the prompt. images: its pixel inputs. token_types: of ids, as `image_inputs` takes them.
    """
    prompt_length = ids.shape[1]
    for _ in range(new_tokens):
        inputs = image_inputs(model, images, token_types(ids))
        ids = torch.cat([ids, model(ids, **inputs).logits[:, -1:].argmax(-1)], 1)
    return ids[0, prompt_length:].tolist()
