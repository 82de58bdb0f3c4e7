"""Batched decoding with a key-value cache. Of a model it uses only forward and config; must not know any family."""

import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Unpack, overload

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.generation.kv_cache import KVCache
from ligermodels.generation.sampling import Sampling, sample_tokens
from ligermodels.generation.texts import TextTokenizer, encode_prompts, text_steps
from ligermodels.weights.config_file import CONFIG_FILE, GENERATION_CONFIG_FILE, end_of_text_ids
from ligermodels.weights.module import HubModule


@overload
def generate(
    model: HubModule,
    prompts: Tensor | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    tokenizer: TextTokenizer | None = None,
    stop_tokens: Collection[int] | None = None,
    **sampling: Unpack[Sampling],
) -> list[list[int]]: ...
@overload
def generate(
    model: HubModule,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    tokenizer: TextTokenizer,
    stop_tokens: Collection[int] | None = None,
    **sampling: Unpack[Sampling],
) -> list[str]: ...
def generate(
    model: HubModule,
    prompts: Tensor | Sequence[Sequence[int]] | Sequence[str],
    *,
    max_new_tokens: int,
    tokenizer: TextTokenizer | None = None,
    stop_tokens: Collection[int] | None = None,
    **sampling: Unpack[Sampling],
) -> list[list[int]] | list[str]:
    """Generates a continuation of every prompt; returns what is new in each row.

    prompts: token ids, as [B, T] or a sequence of prompts of any lengths: returns lists of ids, including the stop
    token. Or texts, with the `tokenizer` of `load_tokenizer`: returns texts, without the stop token.
    stop_tokens: tokens that end a row; None for the end-of-text tokens of the checkpoint and of the tokenizer.
    sampling: temperature, top_k, top_p, seed; see `Sampling`. Greedy decoding without them.
    Warns when a row exceeds the length that the model was trained for. Raises ValueError for an empty prompt,
    InputError for a token id outside the vocabulary and for texts without a tokenizer.
    """
    ids, decoder = encode_prompts(prompts, tokenizer)
    stops = model_stop_tokens(model, tokenizer) if stop_tokens is None else set(stop_tokens)
    steps = token_steps(model, ids, max_new_tokens, **sampling)  # type: ignore[misc]  # has not all of them yet
    if decoder is not None:
        texts = [""] * len(ids)
        for pieces in text_steps(steps, ids, decoder, stops):
            texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        return texts
    rows: list[list[int]] = [[] for _ in ids]
    running = [True] * len(ids)
    for tokens in steps:
        for row, token in enumerate(tokens):
            if running[row]:
                rows[row].append(token)
                running[row] = token not in stops
        if not any(running):
            break
    return rows


@overload
def stream(
    model: HubModule,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    tokenizer: None = None,
    **sampling: Unpack[Sampling],
) -> Iterator[list[int]]: ...
@overload
def stream(
    model: HubModule,
    prompts: Sequence[str],
    max_new_tokens: int,
    *,
    tokenizer: TextTokenizer,
    **sampling: Unpack[Sampling],
) -> Iterator[list[str]]: ...
def stream(
    model: HubModule,
    prompts: Sequence[Sequence[int]] | Sequence[str],
    max_new_tokens: int,
    *,
    tokenizer: TextTokenizer | None = None,
    **sampling: Unpack[Sampling],
) -> Iterator[list[int]] | Iterator[list[str]]:
    """Yields what is new in every row, one step at a time. Arguments as those of `generate`.

    Of token ids: the next token of every row; stop tokens have no effect. Of texts: the text that has become final, up
    to each row's stop token; "" for a row that has ended, or has an incomplete character.
    """
    ids, decoder = encode_prompts(prompts, tokenizer)
    steps = token_steps(model, ids, max_new_tokens, **sampling)  # type: ignore[misc]  # has not all of them yet
    return steps if decoder is None else text_steps(steps, ids, decoder, model_stop_tokens(model, decoder))


@torch.no_grad()
def token_steps(
    model: HubModule,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Iterator[list[int]]:
    """Yields the next token of every row, one step at a time.

    Shorter prompts are padded on the right. Each row writes the cache at its own positions, so that entries of padding
    are always ahead of the row: they are masked until they are overwritten.
    """
    device = model.device
    if device.type == "meta":
        raise ValueError("generate: the model has no weights in memory: they are not loaded yet, or offloaded")
    if not all(prompts):
        raise ValueError("generate: a prompt is empty; give each at least one token")
    check_token_ids(prompts, model.config.vocab_size)
    longest = max(len(prompt) for prompt in prompts)
    history = pad_right(prompts, longest + max_new_tokens).to(device)
    last = torch.tensor([[len(prompt) - 1] for prompt in prompts], device=device)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    cache = KVCache(model.config.num_hidden_layers, len(prompts), history.shape[1], device)
    # The cache is filled at first, and again where LongRoPE's frequencies change for all positions.
    prefills = {longest, (model.config.longrope_switch_length or -1) + 1}
    trained_length = model.config.trained_length
    for length in range(longest, longest + max_new_tokens):
        if length == max(longest, trained_length + 1):
            warn_beyond(trained_length)
        if length in prefills:
            cache.lengths.zero_()
            model(history[:, :length], cache=cache, logits_to_keep=1)
            cache.lengths.copy_(last[:, 0])
        logits = model(history.gather(1, last), cache=cache).logits[:, -1]
        token = sample_tokens(logits, temperature, top_k, top_p, generator)[:, None]
        last = last + 1
        history.scatter_(1, last, token)
        yield token[:, 0].tolist()


def check_token_ids(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raises InputError for a token id outside the vocabulary."""
    outside = [token for prompt in prompts for token in prompt if not 0 <= token < vocab_size]
    if outside:
        raise InputError(
            f"generate: token id {outside[0]} is outside the vocabulary of {vocab_size}; "
            "encode the prompt with the model's own tokenizer"
        )


def pad_right(prompts: Sequence[Sequence[int]], length: int) -> Tensor:
    """The prompts as rows of `length` token ids, [B, length] int64, padded with 0 on the right."""
    padded = torch.zeros(len(prompts), length, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    return padded


def warn_beyond(trained_length: int) -> None:
    warnings.warn(
        f"the text is longer than the {trained_length:,} tokens that the model was trained for "
        "(max_position_embeddings), and may become worse from here on",
        stacklevel=2,
    )


def model_stop_tokens(model: HubModule, tokenizer: TextTokenizer | None = None) -> set[int]:
    """eos_token_id of generation_config.json, which has more of them for chat models; else that of config.json.

    tokenizer: its end-of-text token is one more.
    """
    more = set() if tokenizer is None or tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    if "eos_token_id" in model.generation_config:
        return more | set(end_of_text_ids(model.generation_config, GENERATION_CONFIG_FILE))
    return more | set(end_of_text_ids(model.config.raw, CONFIG_FILE))
