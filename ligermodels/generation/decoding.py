"""Batched decoding with a key-value cache. Of a model it uses only forward and config; must not know any family."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.generation.kv_cache import KVCache
from ligermodels.generation.sampling import sample_tokens
from ligermodels.weights.config_file import CONFIG_FILE, GENERATION_CONFIG_FILE, end_of_text_ids
from ligermodels.weights.module import HubModule


def generate(
    model: HubModule,
    input_ids: Tensor | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop_tokens: Collection[int] | None = None,
) -> list[list[int]]:
    """Generates a continuation of every prompt; returns only the new tokens of each row, including its stop token.

    input_ids: [B, T], or a sequence of prompts of any lengths.
    temperature: 0 for greedy decoding; otherwise tokens are sampled.
    top_k: sample from the k most likely tokens. top_p: then from the smallest set of them whose probability reaches it.
    seed: makes sampling reproducible.
    stop_tokens: tokens that end a row; None for the end-of-text tokens of the checkpoint.
    Raises ValueError for an empty prompt, InputError for a token id outside the vocabulary.
    """
    prompts = [list(map(int, prompt)) for prompt in input_ids]
    stops = model_stop_tokens(model) if stop_tokens is None else set(stop_tokens)
    rows: list[list[int]] = [[] for _ in prompts]
    running = [True] * len(prompts)
    for tokens in stream(model, prompts, max_new_tokens, temperature, top_k, top_p, seed):
        for row, token in enumerate(tokens):
            if running[row]:
                rows[row].append(token)
                running[row] = token not in stops
        if not any(running):
            break
    return rows


@torch.no_grad()
def stream(
    model: HubModule,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Iterator[list[int]]:
    """Yields the next token of every row, one step at a time; stop tokens have no effect. Options as in `generate`.

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
    for length in range(longest, longest + max_new_tokens):
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


def model_stop_tokens(model: HubModule) -> set[int]:
    """eos_token_id of generation_config.json, which has more of them for chat models; else that of config.json."""
    if "eos_token_id" in model.generation_config:
        return set(end_of_text_ids(model.generation_config, GENERATION_CONFIG_FILE))
    return set(end_of_text_ids(model.config.raw, CONFIG_FILE))
