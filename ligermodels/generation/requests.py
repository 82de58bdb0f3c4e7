"""What the engine is given and what it returns: requests, their samples, and the text of these."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ligermodels.generation.paged_cache import Tables
from ligermodels.generation.rows import NewRow
from ligermodels.generation.sampling import SamplingOptions
from ligermodels.generation.texts import RowText, StopStrings

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GeneratedSample:
    """A finished sample of a request.

    request: what `submit` returned. sample: its number among the request's samples. prompt, ids: token ids, of the
    prompt and of what is new, a stop token included. logprobs: of each new token under the distribution that it was
    drawn from, in nats; of greedy decoding, under the softmax. text: of the new tokens, without the stop token or stop
    string; None without a tokenizer. finish_reason: "stop" at a stop token or string, "length" at max_new_tokens.
    """

    request: int
    sample: int
    prompt: Sequence[int]
    ids: list[int]
    logprobs: list[float]
    text: str | None
    finish_reason: FinishReason


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt and how it is continued.

    number: of the request. seed, stream: of its random numbers. shown: tokens whose text the text
    of the results continues. images: what the model's `prepare_images` returned, None without.
    """

    number: int
    stream: int
    ids: Sequence[int]
    max_new_tokens: int
    stop_tokens: frozenset[int]
    options: SamplingOptions
    seed: int
    shown: Sequence[int]
    images: Any = None

    @property
    def length(self) -> int:
        """The most tokens that a row of the cache holds: the last one that is drawn is never fed."""
        return len(self.ids) + self.max_new_tokens - 1


@dataclass(eq=False)
class Sample:
    """One continuation of a request, in a row of its own.

    tables: its pages. text: turns its tokens into text, None without a tokenizer. launched: tokens that were drawn or
    are being drawn on the device.
    """

    request: Request
    number: int
    tables: Tables
    text: RowText | None
    stop_strings: StopStrings
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    launched: int = 0
    finish_reason: FinishReason | None = None

    @property
    def position(self) -> int:
        """The position of the token that the next step feeds."""
        return len(self.request.ids) + self.launched - 1

    def new_row(self, rope_offset: int) -> NewRow:
        """The row that continues the prompt."""
        request = self.request
        return NewRow(
            request.ids, request.length, request.seed, request.stream << 32 | self.number, request.options.row,
            request.stop_tokens, self.tables, rope_offset,
        )  # fmt: skip

    def append(self, token: int, logprob: float) -> str:
        """Takes the next token, and returns the text that has become final with it; "" without a tokenizer."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in self.request.stop_tokens:
            self.finish_reason = "stop"
        elif len(self.ids) == self.request.max_new_tokens:
            self.finish_reason = "length"
        piece = "" if self.text is None else self.next_piece(self.text, token)
        self.pieces.append(piece)
        return piece

    def next_piece(self, text: RowText, token: int) -> str:
        """The text that has become final with a token; looks for stop strings in it."""
        piece, skipped = "", ""
        if self.finish_reason != "stop":
            piece, skipped = text.step(token), text.skipped_text(token) if self.stop_strings.stops else ""
        if self.finish_reason is not None or skipped:
            piece += text.flush()
        piece = self.stop_strings.step(piece) + self.stop_strings.step(skipped, shown=False)
        if self.stop_strings.matched is not None:
            self.finish_reason = "stop"
        elif self.finish_reason is not None:
            piece += self.stop_strings.end()
        return piece

    def completion(self) -> GeneratedSample:
        assert self.finish_reason is not None
        text = None if self.text is None else "".join(self.pieces)
        return GeneratedSample(
            self.request.number, self.number, self.request.ids, self.ids, self.logprobs, text, self.finish_reason
        )
