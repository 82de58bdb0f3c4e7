"""Generation for a batch of prompts: all at once, or step by step."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Unpack, overload

from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.generation.cache import GenerativeModel
from ligermodels.generation.capacity import check_length, check_samples, longest_request
from ligermodels.generation.engine import DEFAULT_ROWS, Drawn, Engine, check_prompt
from ligermodels.generation.paged_cache import PAGE_SIZE, pages_for
from ligermodels.generation.sampling import Sampling, SamplingOptions
from ligermodels.generation.texts import TextTokenizer, encode_prompts, model_stop_tokens

PixelInputs = Sequence[Mapping[str, Any] | None] | None  # of each prompt


@overload
def generate(
    model: GenerativeModel, prompts: Tensor | Sequence[Sequence[int]], *, max_new_tokens: int,
    tokenizer: TextTokenizer | None = None, stop_tokens: Collection[int] | None = None, images: PixelInputs = None,
    **sampling: Unpack[Sampling],
) -> list[list[int]]: ...  # fmt: skip
@overload
def generate(
    model: GenerativeModel, prompts: Sequence[str], *, max_new_tokens: int, tokenizer: TextTokenizer,
    stop_tokens: Collection[int] | None = None, images: PixelInputs = None, **sampling: Unpack[Sampling],
) -> list[str]: ...  # fmt: skip
def generate(
    model: GenerativeModel, prompts: Tensor | Sequence[Sequence[int]] | Sequence[str], *, max_new_tokens: int,
    tokenizer: TextTokenizer | None = None, stop_tokens: Collection[int] | None = None, images: PixelInputs = None,
    **sampling: Unpack[Sampling],
) -> list[list[int]] | list[str]:  # fmt: skip
    """Generates a continuation of every prompt; returns what is new in each row.

    prompts: token ids, as [B, T] or a sequence of prompts of any lengths: returns lists of ids, including the stop
    token. Or texts, with the `tokenizer` of `load_tokenizer`: returns texts, without the stop token. With n > 1, the n
    completions of a prompt are consecutive rows.
    stop_tokens: tokens that end a row; None for the end-of-text tokens of the checkpoint and of the tokenizer.
    images: of each prompt the pixel inputs of its images, see `Engine.submit`, or None.
    sampling: see `Sampling`; greedy decoding without it. Stop strings need the tokenizer for token ids, too.
    Each call has a cache of its own; `Engine` keeps one, takes requests with different options, and returns
    log-probabilities. Warns when a row exceeds the length that the model was trained for.
    Raises InputError for an empty prompt, a token id outside the vocabulary, options out of range, texts without a
    tokenizer, and a prompt that is longer than `longest_request` allows.
    """
    ids, decoder = encode_prompts(prompts, tokenizer)
    if max_new_tokens == 0 or not ids:
        rows = len(ids) * SamplingOptions(**sampling).n
        return [""] * rows if decoder is not None else list[list[int]]([] for _ in range(rows))
    if stop_tokens is None:
        stop_tokens = model_stop_tokens(model, tokenizer)
    reader = tokenizer if sampling.get("stop") else decoder
    engine = engine_for(model, reader, ids, max_new_tokens, stop_tokens, sampling, images=images)
    completions = sorted(engine, key=lambda completion: (completion.request, completion.sample))
    if decoder is not None:
        return [completion.text or "" for completion in completions]
    return [completion.ids for completion in completions]


@overload
def stream(
    model: GenerativeModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, tokenizer: None = None,
    images: PixelInputs = None, **sampling: Unpack[Sampling],
) -> Iterator[list[int]]: ...  # fmt: skip
@overload
def stream(
    model: GenerativeModel, prompts: Sequence[str], max_new_tokens: int, *, tokenizer: TextTokenizer,
    images: PixelInputs = None, **sampling: Unpack[Sampling],
) -> Iterator[list[str]]: ...  # fmt: skip
def stream(
    model: GenerativeModel, prompts: Sequence[Sequence[int]] | Sequence[str], max_new_tokens: int, *,
    tokenizer: TextTokenizer | None = None, images: PixelInputs = None, **sampling: Unpack[Sampling],
) -> Iterator[list[int]] | Iterator[list[str]]:  # fmt: skip
    """Yields what is new in every row, one step at a time. Arguments as those of `generate`.

    Of token ids: the next token of every row; stop tokens have no effect. Of texts: the text that has become final, up
    to each row's stop token; "" for a row that has ended, or has an incomplete character.
    """
    ids, decoder = encode_prompts(prompts, tokenizer)
    if max_new_tokens == 0 or not ids:
        return iter(())
    stop_tokens = () if decoder is None else None
    engine = engine_for(model, decoder, ids, max_new_tokens, stop_tokens, sampling, images=images)
    if decoder is None:
        return ([drawn.token for drawn in row if drawn] for row in steps(engine))
    return ([drawn.text if drawn else "" for drawn in row] for row in steps(engine))


def engine_for(
    model: GenerativeModel, tokenizer: TextTokenizer | None, prompts: Sequence[Sequence[int]], max_new_tokens: int,
    stop_tokens: Collection[int] | None, sampling: Sampling, shown: Sequence[int] | None = None,
    images: PixelInputs = None,
) -> Engine:  # fmt: skip
    """An engine with these requests, and a cache for all of them if the GPU has the memory; see `Engine.submit`."""
    options, images = SamplingOptions(**sampling), [None] * len(prompts) if images is None else images
    if len(images) != len(prompts):
        raise InputError(f"generate: images has {len(images)} entries for {len(prompts)} prompts; None stands for none")
    check_samples(options.n, DEFAULT_ROWS)
    rows = min(DEFAULT_ROWS, options.n * len(prompts))
    longest = longest_request(model, rows)
    for prompt in prompts:
        check_prompt(prompt, max_new_tokens, model.config.embedded_tokens)
        check_length(len(prompt), max_new_tokens, longest)
    lengths = [len(prompt) + max_new_tokens - 1 for prompt in prompts]
    tokens = sum(options.n * pages_for(length) * PAGE_SIZE for length in lengths)
    if model.device.type == "cuda":
        tokens = min(tokens, longest)
    engine = Engine(model, tokenizer=tokenizer, max_tokens=tokens, max_length=max(lengths), max_rows=rows)
    for prompt, pixels in zip(prompts, images, strict=True):
        engine.submit(
            prompt, max_new_tokens=max_new_tokens, stop_tokens=stop_tokens, shown=shown, images=pixels, **sampling
        )
    return engine


def steps(engine: Engine) -> Iterator[list[Drawn | None]]:
    """The engine's tokens as steps of all rows, which are its samples; None for a row that has ended.

    Rows that are ahead of others wait for them.
    """
    rows = sum(request.options.n for request in engine.waiting)
    waiting: list[deque[Drawn]] = [deque() for _ in range(rows)]
    ended = [False] * rows
    for tokens in engine.run():
        for drawn in tokens:
            sample = drawn.sample
            row = sample.request.number * sample.request.options.n + sample.number
            waiting[row].append(drawn)
            ended[row] = sample.finish_reason is not None
        while any(waiting) and all(queue or done for queue, done in zip(waiting, ended, strict=True)):
            yield [queue.popleft() if queue else None for queue in waiting]
