"""Text generation with a key-value cache. Knows models by their forward only."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.generation.sampling import sample
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.kv_cache import KVCache


def generate(
    model: CausalLM,
    input_ids: Tensor | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop_tokens: Collection[int] | None = None,
) -> list[list[int]]:
    """Continues every prompt; returns each row's new tokens, its stop token included.

    input_ids: [B, T], or a sequence of prompts of any lengths. temperature 0 takes the most likely token; otherwise
    tokens are drawn from the top_k most likely, and of these from the smallest set whose probability reaches top_p.
    stop_tokens: end a row; by default the end-of-text tokens of the checkpoint. Raises ValueError for an empty prompt,
    InputError for a token id that the model does not have.
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
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Iterator[list[int]]:
    """Yields the next token of every row, step by step, without regard to stop tokens.

    Shorter prompts are padded on the right: each row writes the cache at its own positions, and what padding leaves
    there lies ahead of the row, unseen, until it is overwritten.
    """
    device, switch = model.lm_head.weight.device, model.config.rope_switch
    if not all(prompts):
        raise ValueError("generate: a prompt is empty; give each at least one token")
    beyond = [token for prompt in prompts for token in prompt if not 0 <= token < model.config.vocab_size]
    if beyond:
        fix = "encode it with the model's own tokenizer"
        raise InputError(
            f"generate: token id {beyond[0]} is outside the vocabulary of {model.config.vocab_size}; {fix}"
        )
    longest = max(len(prompt) for prompt in prompts)
    padded = torch.zeros(len(prompts), longest + max_new_tokens, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    history = padded.to(device)
    last = torch.tensor([[len(prompt) - 1] for prompt in prompts], device=device)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    cache = KVCache(model.config.num_hidden_layers, len(prompts), history.shape[1], device)
    for length in range(longest, longest + max_new_tokens):
        if length in (longest, (switch or -1) + 1):  # at first, and where RoPE's frequencies change for all positions
            cache.lengths.zero_()
            model(history[:, :length], cache=cache, logits_to_keep=1)
            cache.lengths.copy_(last[:, 0])
        logits = model(history.gather(1, last), cache=cache).logits[:, -1]
        token = sample(logits, temperature, top_k, top_p, generator)[:, None]
        last = last + 1
        history.scatter_(1, last, token)
        yield token[:, 0].tolist()


def model_stop_tokens(model: CausalLM) -> set[int]:
    """eos_token_id of generation_config.json, which lists more for chat models, or else config.json's."""
    eos = model.generation_config.get("eos_token_id", model.config.raw.get("eos_token_id"))
    if eos is None:
        return set()
    return set(eos) if isinstance(eos, list) else {eos}
