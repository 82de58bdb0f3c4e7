"""Prompts as texts or token ids, the text of generated tokens, and the tokens and texts that end it."""

import itertools
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.generation.cache import GenerativeModel
from ligermodels.weights.config_file import CONFIG_FILE, GENERATION_CONFIG_FILE, end_of_text_ids


class TextDecoder(Protocol):
    """Decodes token by token. `step` returns the text that has become final, or None; `flush` the rest. `skipped_text`
    is that of a token which decoding leaves out, such as <|im_end|>; "" of any other."""

    def step(self, token: int) -> str | None: ...

    def flush(self) -> str: ...

    def skipped_text(self, token: int) -> str: ...


@runtime_checkable
class TextTokenizer(Protocol):
    """What generation needs of a tokenizer; that of `ligermodels.load_tokenizer` has it."""

    @property
    def eos_token_id(self) -> int | None: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def decode_stream(self) -> TextDecoder: ...


def encode_prompts(
    prompts: Tensor | Sequence[Sequence[int]] | Sequence[str], tokenizer: TextTokenizer | None
) -> tuple[list[list[int]], TextTokenizer | None]:
    """The token ids of each prompt, and what decodes the results: the tokenizer if the prompts are texts, else None.

    Raises InputError for texts without a tokenizer, or with one of another library, for a single text, and for token
    ids that are no whole numbers.
    """
    if isinstance(prompts, str):
        raise InputError("generate: prompts is one text; pass a list of texts")
    if not any(isinstance(prompt, str) for prompt in prompts):
        return [token_ids(prompt) for prompt in prompts], None
    if not isinstance(tokenizer, TextTokenizer):
        given = "missing" if tokenizer is None else f"of type {type(tokenizer).__name__}"
        raise InputError(f"generate: tokenizer is {given}; texts need that of ligermodels.load_tokenizer")
    return tokenizer.encode_batch(cast(Sequence[str], prompts)), tokenizer


def token_ids(tokens: Iterable[Any]) -> list[int]:
    """Token ids, of a tensor [T] too, as a list. Raises InputError for anything that is no whole number."""
    ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    if all(type(token) is int for token in ids):
        return ids
    wrong = [token for token in ids if not isinstance(token, Integral) or isinstance(token, bool)]
    if wrong:
        raise InputError(f"generate: {wrong[0]!r} is not a token id, which is a whole number")
    return [int(token) for token in ids]


class RowText:
    """The text of one row's tokens, behind that of the tokens `shown`."""

    def __init__(self, tokenizer: TextTokenizer, shown: Sequence[int]) -> None:
        self.decoder, self.hidden = tokenizer.decode_stream(), len(tokenizer.decode(shown))
        for token in shown:
            self.step(token)

    def step(self, token: int) -> str:
        return self.visible(self.decoder.step(token) or "")

    def skipped_text(self, token: int) -> str:
        """The text of a special token, which `step` leaves out; "" of any other."""
        return self.decoder.skipped_text(token)

    def flush(self) -> str:
        """The text that was held back for a next token."""
        return self.visible(self.decoder.flush())

    def visible(self, piece: str) -> str:
        """The piece without what belongs to `shown`."""
        hidden, self.hidden = self.hidden, max(0, self.hidden - len(piece))
        return piece[hidden:]


def model_stop_tokens(model: GenerativeModel, tokenizer: TextTokenizer | None = None) -> set[int]:
    """eos_token_id of generation_config.json, which has more of them for chat models; else that of config.json.

    tokenizer: its end-of-text token is one more. Without tokens beyond the vocabulary, which the model cannot draw.
    """
    if "eos_token_id" in model.generation_config:
        tokens = end_of_text_ids(model.generation_config, GENERATION_CONFIG_FILE)
    else:
        tokens = end_of_text_ids(model.config.raw, CONFIG_FILE)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        tokens = [*tokens, tokenizer.eos_token_id]
    return {token for token in tokens if token < model.config.vocab_size}


class StopStrings:
    """The text of one row up to its first stop string.

    A piece of text becomes visible as soon as it cannot be part of a stop string. The first stop string is the one that
    ends first, as if the text came character by character; of those that end together, the longest. The result does
    not depend on how the text is cut into pieces. Stop strings also see the text of special tokens, which is not shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.held = ""  # may be the beginning of a stop string
        self.shown: list[bool] = []  # whether each of its characters is
        self.matched: str | None = None  # the stop string that was found

    def step(self, piece: str, shown: bool = True) -> str:
        """The text that becomes visible with this piece; "" after a stop string. shown: false for special tokens."""
        if self.matched is not None:
            return ""
        self.held += piece
        self.shown += [shown] * len(piece)
        text = self.held
        found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self.stops if stop in text]
        if found:
            end, _, self.matched = min(found)
            visible = self.take(end - len(self.matched))
            self.end()
            return visible
        return self.take(len(text) - max((beginning_at_end(text, stop) for stop in self.stops), default=0))

    def take(self, count: int) -> str:
        """Removes the first characters of the text that is held; returns those that are shown."""
        visible = "".join(itertools.compress(self.held[:count], self.shown))
        self.held, self.shown = self.held[count:], self.shown[count:]
        return visible

    def end(self) -> str:
        """The text that was held back, when no more comes."""
        return self.take(len(self.held))


def beginning_at_end(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`; less than all of it."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
