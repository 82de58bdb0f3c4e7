"""The generation engine: requests on a paged cache, which enter and leave the running batch as there is room.

Of a model it uses forward, config, parameters and what its layers keep.
"""

import math
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Unpack, cast

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.generation.cache import GenerativeModel
from ligermodels.generation.capacity import check_room, tokens_that_fit
from ligermodels.generation.image_features import CrossPrompt, PromptImages
from ligermodels.generation.paged_cache import PagedCache
from ligermodels.generation.prefill import PrefillStep, PromptPiece
from ligermodels.generation.requests import GeneratedSample, Request, Sample
from ligermodels.generation.rows import (
    NO_TOKEN,
    Drawing,
    RowStates,
    StepGraphs,
    decode_step,
    only_first,
    ranks_of,
    rows_of_graph,
    uses_graphs,
)
from ligermodels.generation.sampling import Sampling, SamplingOptions
from ligermodels.generation.texts import RowText, StopStrings, TextTokenizer, model_stop_tokens, token_ids

DEFAULT_ROWS = 256
PREFILL_TOKENS = 8192  # of one prefill: enough for matrix products at full speed


@dataclass(frozen=True)
class Drawn:
    """A token that was drawn, and the text that has become final with it: "" without a tokenizer."""

    sample: Sample
    token: int
    text: str


@dataclass(eq=False)
class AdmittedRequest:
    """An admitted request, whose samples wait until its tokens are in the cache. done: how many are.

    images: those of its prompt, None without.
    """

    request: Request
    samples: list[Sample]
    images: PromptImages | CrossPrompt | None = None
    done: int = 0


@dataclass(frozen=True)
class Launched:
    """A step that the device may still be computing. read: waits for its (tokens, log-probabilities)."""

    samples: list[Sample]
    read: Callable[[], tuple[list[int], list[float]]]


class Engine:
    """Generates for many requests at a time (continuous batching).

    A step feeds one token of every running sample. Samples that end leave at once; waiting requests enter in their
    order, as soon as rows and pages of the key-value cache are free. The samples of a request share the pages of its
    prompt, which is computed once; layers with a window keep the keys of their window alone. On a GPU, a step is
    replayed from a CUDA graph, and its tokens are read while the next step runs.

    What a request gives depends on its prompt, its options and its random numbers: on other requests only by rounding.

    model: its weights may change between steps. Where they are sharded over ranks (FSDP2), every rank has an engine and
    submits the same requests, because all ranks gather weights at the same time. tokenizer: of `load_tokenizer`, for
    prompts and results that are texts.
    max_tokens: tokens that the cache holds, of all requests together; None for what 80 % of the GPU's free memory
    holds. max_length: tokens of one request; None for max_tokens. max_rows: samples that run at a time.
    vocab_size: only token ids below it are drawn, where a head is padded beyond those of a text; None for all.
    allow_undefined: goes on where logits are NaN or infinite, as their log-probabilities say; else raises InputError.

    Raises InputError for a model that has no weights in memory, for a size below 1, and on the CPU without max_tokens.
    """

    def __init__(
        self, model: GenerativeModel, *, tokenizer: TextTokenizer | None = None, max_tokens: int | None = None,
        max_length: int | None = None, max_rows: int = DEFAULT_ROWS, vocab_size: int | None = None,
        allow_undefined: bool = False,
    ) -> None:  # fmt: skip
        if model.device.type == "meta":
            raise InputError("generate: the model has no weights in memory: they are not loaded yet, or offloaded")
        for name, size in (("max_tokens", max_tokens), ("max_length", max_length), ("max_rows", max_rows)):
            if size is not None and size < 1:
                raise InputError(f"generate: {name} is {size}; must be at least 1")
        self.model, self.tokenizer, self.device = model, tokenizer, model.device
        self.max_rows, self.vocab_size, self.allow_undefined = max_rows, vocab_size, allow_undefined
        self.max_tokens = max_tokens or tokens_that_fit(model, max_rows)
        self.cache = PagedCache(model.kept_by_layers(), self.max_tokens, max_length or self.max_tokens, max_rows)
        self.rows = RowStates.allocate(self.cache, max_rows, model.config.vocab_size, self.device, model.takes_images)
        self.ranks = ranks_of(model)
        self.graphs = StepGraphs() if uses_graphs(model) else None
        self.waiting: deque[Request] = deque()
        self.prompts: deque[AdmittedRequest] = deque()
        self.samples: list[Sample] = []  # of the rows in use, in their order
        self.launched: deque[Launched] = deque()
        self.submitted = 0
        self.longest = 0  # position that was fed

    # -- requests

    def submit(
        self, prompt: Sequence[int] | Tensor | str, *, max_new_tokens: int, stop_tokens: Collection[int] | None = None,
        shown: Sequence[int] | None = None, stream: int | None = None, images: Mapping[str, Any] | None = None,
        **sampling: Unpack[Sampling],
    ) -> int:  # fmt: skip
        """Adds a request and returns its number. It runs while the engine is iterated over.

        prompt: token ids, or a text if the engine has a tokenizer. stop_tokens: what ends a sample; None for the
        end-of-text tokens of the checkpoint and of the tokenizer, () for none. shown: tokens whose text the results
        continue; None for those of the prompt. stream: which of the seed's sequences of random numbers; None for the
        request's number. images: pixel_values, image_grid_thw and so on, as the model's forward takes them, of the
        images whose tokens the prompt has; None for none.
        sampling: see `Sampling`.

        Raises InputError for an empty prompt, a token id outside the vocabulary, options out of range, and a request
        that the cache cannot hold, and images that do not fit the prompt, or are missing.
        """
        vocab_size = self.model.config.vocab_size
        readable = self.model.config.embedded_tokens
        ids = self.encode(prompt) if isinstance(prompt, str) else token_ids(prompt)
        check_prompt(ids, max_new_tokens, readable)
        if stop_tokens is None:
            stop_tokens = model_stop_tokens(self.model, self.tokenizer)
        stops = token_ids(stop_tokens)
        check_in_vocabulary(stops, vocab_size, "leave it out of stop_tokens")
        options = SamplingOptions(**sampling)
        if options.stop and self.tokenizer is None:
            raise InputError("generate: stop strings need a tokenizer; give that of load_tokenizer, or use stop_tokens")
        if self.ranks > 1 and options.temperature > 0 and options.seed is None:
            raise InputError(
                f"generate: the weights are sharded over {self.ranks} ranks, which must draw equal tokens; give a seed"
            )
        if options.has_penalties and not self.rows.history.shape[1]:
            self.rows = self.rows.with_history()
        # Greedy decoding has no use for one: a training run that decodes in validation keeps its random state.
        seed = options.resolved_seed() if options.temperature else 0
        number = self.submitted
        request = Request(
            number, number if stream is None else stream, ids, max_new_tokens, frozenset(stops),
            options, seed, ids if shown is None else shown, self.prepare_images(ids, images),
        )  # fmt: skip
        check_room(self.cache, request, self.max_rows)
        self.waiting.append(request)
        self.submitted += 1
        return number

    def prepare_images(self, ids: Sequence[int], images: Mapping[str, Any] | None) -> Any:
        if not images:
            token = cast(Any, self.model.config).image_token_id if self.model.takes_images else None
            if token in ids:
                raise InputError(
                    f"generate: prompt {self.submitted} has the token {token}, which stands for an image, but no "
                    "images; pass its pixel values, or remove the token"
                )
            return None
        if not self.model.takes_images:
            raise InputError("generate: the model takes no images; leave them out")
        return cast(Any, self.model).prepare_images(torch.tensor(ids)[None], **images)

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise InputError("generate: a prompt is a text; give the engine a tokenizer, that of load_tokenizer")
        return self.tokenizer.encode_batch([text])[0]

    def __iter__(self) -> Iterator[GeneratedSample]:
        """Runs the requests until none is left, and yields each sample when it has ended."""
        for step in self.run():
            yield from (drawn.sample.completion() for drawn in step if drawn.sample.finish_reason is not None)

    @torch.no_grad()
    def run(self) -> Iterator[list[Drawn]]:
        """Runs the requests until none is left, and yields the tokens of each step.

        Requests that are left when the caller stops earlier, or when an error ends the run, are dropped.
        """
        if self.graphs is not None:
            self.graphs.refresh(self.model.parameters())
        try:
            while self.waiting or self.prompts or self.samples:
                yield self.advance()
        finally:
            self.drop_all()

    def drop_all(self) -> None:
        """Forgets all requests and frees their rows and pages, wherever a step was interrupted."""
        self.cache.release_all()
        self.launched.clear()
        self.waiting.clear()
        self.prompts.clear()
        self.samples.clear()
        self.rows.running.zero_()

    # -- steps

    def advance(self) -> list[Drawn]:
        """Launches a prefill or a decode step, and returns the tokens of the one before, on the CPU those of this."""
        self.admit()
        may_wait = False
        if self.prompts:
            self.prefill()
        elif any(sample.launched < sample.request.max_new_tokens for sample in self.samples):
            self.decode_all()
            may_wait = self.device.type == "cuda"
        drawn: list[Drawn] = []
        while len(self.launched) > may_wait:
            drawn += self.read()
        return drawn

    def admit(self) -> None:
        """Gives rows and pages to waiting requests, in their order, as long as there are enough for the next."""
        in_use = len(self.samples) + sum(len(prompt.samples) for prompt in self.prompts)
        while self.waiting:
            request = self.waiting[0]
            count, prompt_length = request.options.n, len(request.ids)
            if in_use + count > self.max_rows:
                return
            if not self.cache.has_free(self.cache.pages_needed(prompt_length, request.length, count)):
                return
            self.waiting.popleft()
            in_use += count
            tables = self.cache.take(prompt_length, request.length, count)
            self.prompts.append(
                AdmittedRequest(request, [self.sample(request, i, pages) for i, pages in enumerate(tables)])
            )

    def sample(self, request: Request, number: int, tables: list[list[int]]) -> Sample:
        text = None if self.tokenizer is None else RowText(self.tokenizer, request.shown)
        return Sample(request, number, tables, text, StopStrings(request.options.stop or ()))

    def prefill(self) -> None:
        """Computes up to PREFILL_TOKENS tokens of the admitted prompts; samples whose prompt is complete get rows."""
        pieces, complete, room = [], [], PREFILL_TOKENS
        for prompt in self.prompts:
            ids, tables = prompt.request.ids, prompt.samples[0].tables
            if prompt.request.images is not None and prompt.images is None:
                prompt.images = cast(Any, self.model).encode_prompt(prompt.request.images)
            stop = min(prompt.done + room, len(ids))
            if prompt.images is not None:
                stop = prompt.images.last_cut(prompt.done, stop)
            piece = PromptPiece(ids[prompt.done : stop], prompt.done, len(ids), tables, prompt.images)
            pieces.append(piece)
            complete.append(piece.stop == len(ids))
            prompt.done, room = piece.stop, room - len(piece.ids)
            if room <= 0 or not complete[-1]:
                break
        logits = self.forward_pieces(pieces)
        done = [self.prompts.popleft() for _ in range(sum(complete))]  # all but perhaps the last
        if done:
            self.start(done, logits)

    def forward_pieces(self, pieces: Sequence[PromptPiece]) -> Tensor:
        """Fills the cache with pieces of sequences; returns the logits [pieces, V] after the last token of each."""
        step = PrefillStep(self.cache, pieces, self.device)
        self.warn_beyond(max(piece.stop for piece in pieces) - 1)
        logits = self.model(
            step.input_ids, position_ids=step.position_ids, cu_seqlens=step.cu_seqlens, max_seqlen=step.max_seqlen,
            cache=step, logits_to_keep=step.last, **step.image_inputs,
        ).logits[0]  # fmt: skip
        return only_first(logits, self.vocab_size)

    def start(self, prompts: Sequence[AdmittedRequest], logits: Tensor) -> None:
        """Gives the samples of complete prompts rows behind those in use, and draws their first tokens.

        logits: [prompts or more, V], after each prompt.
        """
        begin = len(self.samples)
        for prompt in prompts:
            self.samples += prompt.samples
            request, tables = prompt.request, [sample.tables for sample in prompt.samples]
            self.cache.copy_prompt(len(request.ids), request.length, tables, self.device)
        new = self.samples[begin:]
        counts = torch.tensor([len(prompt.samples) for prompt in prompts])
        repeated = torch.arange(len(prompts)).repeat_interleave(counts).to(self.device)
        rows = self.rows.view(begin, len(self.samples))
        offsets = [prompt.images.rope_offset if prompt.images else 0 for prompt in prompts for _ in prompt.samples]
        rows.assign([sample.new_row(offset) for sample, offset in zip(new, offsets, strict=True)])
        rows.append(logits[repeated], drawing_of(new))
        self.note_launched(new, rows)

    def decode_all(self) -> None:
        """Launches a decode step of all rows in use."""
        positions = [sample.position for sample in self.samples]
        if self.model.config.longrope_switch_length in positions:
            self.refill()
        self.warn_beyond(max(positions))
        count = len(self.samples)
        drawing = drawing_of(self.samples)
        if self.graphs is None:
            self.decode(count, drawing)
        else:
            self.graphs.run(self.decode, rows_of_graph(count, self.max_rows), drawing)
        self.note_launched(list(self.samples), self.rows.view(0, count))

    def decode(self, count: int, drawing: Drawing) -> None:
        """A decode step of the first `count` rows."""
        decode_step(self.model, self.cache, self.rows.view(0, count), drawing, self.vocab_size)

    def refill(self) -> None:
        """Computes the keys of samples anew whose next token makes LongRoPE change its frequencies for all tokens."""
        switch = self.model.config.longrope_switch_length
        for sample in [sample for sample in self.samples if sample.position == switch]:
            ids = [*sample.request.ids, *sample.ids][: sample.position]
            for start in range(0, len(ids), PREFILL_TOKENS):
                piece = PromptPiece(ids[start : start + PREFILL_TOKENS], start, sample.position + 1, sample.tables)
                self.forward_pieces([piece])

    def note_launched(self, samples: list[Sample], rows: RowStates) -> None:
        for sample in samples:
            sample.launched += 1
        self.launched.append(Launched(samples, read_later(rows.drawn, rows.logprobs)))

    def read(self) -> list[Drawn]:
        """The tokens of the oldest step that was not read; samples that end with it leave their rows."""
        step = self.launched.popleft()
        drawn = []
        for sample, token, logprob in zip(step.samples, *step.read(), strict=True):
            if token != NO_TOKEN and sample.finish_reason is None:
                if not self.allow_undefined:
                    refuse_undefined(sample, logprob)
                drawn.append(Drawn(sample, token, sample.append(token, logprob)))
        self.remove([d.sample for d in drawn if d.sample.finish_reason is not None])
        return drawn

    def remove(self, ended: Sequence[Sample]) -> None:
        """Frees the rows and pages of samples; the last rows in use move to the places that they leave."""
        if not ended:
            return
        places = list(range(len(self.samples)))  # before the moves
        for sample in ended:
            self.cache.release(sample.tables)
            place = self.samples.index(sample)
            last, last_place = self.samples.pop(), places.pop()
            if last is not sample:
                self.samples[place], places[place] = last, last_place
        targets = [target for target, source in enumerate(places) if target != source]
        if targets:
            self.rows.move([places[target] for target in targets], targets)
        self.rows.running[len(self.samples) :] = False

    def warn_beyond(self, position: int) -> None:
        """Warns once when a position is fed that the model was not trained for."""
        trained = self.model.config.trained_length
        if self.longest < trained <= position:
            warnings.warn(
                f"the text is longer than the {trained:,} tokens that the model was trained for "
                "(max_position_embeddings), and may become worse from here on",
                stacklevel=1,  # one place, so that Python shows it once
            )
        self.longest = max(self.longest, position)


def check_prompt(ids: Sequence[int], max_new_tokens: int, vocab_size: int) -> None:
    """Raises InputError for an empty prompt, an id outside the vocabulary, and fewer than one new token."""
    if not ids:
        raise InputError("generate: a prompt is empty; give each at least one token")
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
        raise InputError(f"generate: max_new_tokens is {max_new_tokens}; must be at least 1")
    check_in_vocabulary(ids, vocab_size, "encode the prompt with the model's own tokenizer")


def check_in_vocabulary(ids: Collection[int], vocab_size: int, remedy: str) -> None:
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise InputError(f"generate: token id {outside} is outside the vocabulary of {vocab_size}; {remedy}")


def refuse_undefined(sample: Sample, logprob: float) -> None:
    """Raises InputError for a token that was drawn from logits that are NaN or infinite."""
    if not math.isfinite(logprob):
        raise InputError(
            f"generate: the logits of prompt {sample.request.number}, token {len(sample.ids)}, are not finite: the "
            "model's weights have NaN or infinity, or overflow in its dtype; load other weights, or another dtype"
        )


def drawing_of(samples: Sequence[Sample]) -> Drawing:
    options = [sample.request.options for sample in samples]
    return Drawing(any(each.has_filters for each in options), any(each.has_penalties for each in options))


def read_later(tokens: Tensor, logprobs: Tensor) -> Callable[[], tuple[list[int], list[float]]]:
    """Starts the copy of a step's results to the host, and returns a function that waits for them alone."""
    if not tokens.is_cuda:
        values = tokens.tolist(), logprobs.tolist()
        return lambda: values
    copies = [
        torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in (tokens, logprobs)
    ]
    copied = torch.cuda.Event()
    copied.record()

    def read() -> tuple[list[int], list[float]]:
        copied.synchronize()
        return copies[0].tolist(), copies[1].tolist()

    return read
