"""How many tokens the cache of the engine can hold, and whether a request fits into it."""

from bisect import bisect_right

import torch

from ligermodels.errors import InputError
from ligermodels.generation.cache import GenerativeModel, Kept, PerRow
from ligermodels.generation.paged_cache import PAGE_SIZE, PagedCache, layer_groups
from ligermodels.generation.requests import Request
from ligermodels.generation.sampling import CACHE_TOKENS
from ligermodels.units import counted, memory_size

SHARE = 0.8  # of the free memory; the rest is for activations and logits
MOST_PAGES = 2**24  # that are considered: a billion tokens


def cache_bytes(
    model: GenerativeModel, max_tokens: int, max_rows: int, max_length: int | None = None,
    dtype: torch.dtype | None = None,
) -> int:  # fmt: skip
    """The memory of a paged cache; sizes as those of `Engine`. dtype: of what layers keep; None for the model's."""
    kept, size = model.kept_by_layers(), (dtype or model.dtype).itemsize
    groups = layer_groups(kept, max_tokens, max_length or max_tokens, max_rows)
    return sum(group.slots * slot_bytes(kept[layer], size) for group in groups for layer in group.layers)


def slot_bytes(kept: Kept, size: int) -> int:
    """What a layer keeps of a token, or of a row; elements of the model's dtype have `size` bytes."""
    states = kept.fp32_elements if isinstance(kept, PerRow) else 0
    return kept.elements * size + states * torch.float32.itemsize


def tokens_that_fit(model: GenerativeModel, max_rows: int) -> int:
    """The most tokens, in whole pages, whose cache takes at most SHARE of the GPU's free memory.

    Raises InputError on the CPU, and if not even one page fits.
    """
    if model.device.type != "cuda":
        raise InputError("generate: max_tokens is missing; on the CPU, give the tokens that the cache must hold")
    free = free_memory(model.device)

    def size(pages: int) -> int:
        return cache_bytes(model, pages * PAGE_SIZE, max_rows)

    pages = bisect_right(range(1, MOST_PAGES), int(SHARE * free), key=size)
    if not pages:
        raise InputError(
            f"generate: the key-value cache needs at least {memory_size(size(1))}, but the GPU has {memory_size(free)} "
            "of free memory; free some, or use a smaller model"
        )
    return pages * PAGE_SIZE


def free_memory(device: torch.device) -> int:
    """Bytes on the GPU that nothing uses; what PyTorch keeps for reuse counts as free."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def longest_request(model: GenerativeModel, max_rows: int) -> int:
    """The most tokens of a request whose cache is made for it: on a GPU what its free memory holds, on a CPU what the
    model was trained for, or CACHE_TOKENS."""
    if model.device.type == "cuda":
        return tokens_that_fit(model, max_rows)
    return max(model.config.trained_length, CACHE_TOKENS)


def check_length(prompt_length: int, max_new_tokens: int, longest: int) -> None:
    """Raises InputError for a request of more tokens than `longest`; see `Request.length`."""
    if prompt_length + max_new_tokens - 1 > longest:
        raise InputError(
            f"generate: a prompt of {request_size(prompt_length, max_new_tokens)} is longer than the {longest:,} that "
            "the engine holds for one request; shorten it, lower max_new_tokens, or give the engine a larger "
            "max_length (--cache-tokens of --chat and --file)"
        )


def check_samples(samples: int, max_rows: int) -> None:
    """Raises InputError for more samples of a request than run at a time."""
    if samples > max_rows:
        raise InputError(f"generate: n is {samples}, but the engine runs {counted(max_rows, 'sample')} at a time")


def request_size(prompt_length: int, max_new_tokens: int) -> str:
    return f"{counted(prompt_length, 'token')} and {max_new_tokens:,} new ones"


def check_room(cache: PagedCache, request: Request, max_rows: int) -> None:
    """Raises InputError for a request that the cache could not hold even if it were empty."""
    samples, prompt_length = request.options.n, len(request.ids)
    check_samples(samples, max_rows)
    longest = min((group.longest for group in cache.groups if group.longest is not None), default=request.length)
    check_length(prompt_length, request.max_new_tokens, longest)
    size = request_size(prompt_length, request.max_new_tokens)
    needed = cache.pages_needed(prompt_length, request.length, samples)
    for group, pages in zip(cache.groups, needed, strict=True):
        if pages > group.pages:
            raise InputError(
                f"generate: {counted(samples, 'sample')} of a prompt of {size} need {pages * PAGE_SIZE:,} tokens of "
                f"the cache, which holds {group.pages * PAGE_SIZE:,}; lower max_new_tokens or n, or give the engine a "
                "larger max_tokens (--cache-tokens)"
            )
