"""Prompts as texts or token ids, and the text of generated tokens.

Must not know models, nor how a tokenizer works.
"""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

from ligermodels.errors import InputError


class TextDecoder(Protocol):
    """Decodes token by token. `step` returns the text that has become final, or None; `flush` the rest."""

    def step(self, token: int) -> str | None: ...

    def flush(self) -> str: ...


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
        self.decoder, self.hidden, self.ended = tokenizer.decode_stream(), len(tokenizer.decode(shown)), False
        for token in shown:
            self.step(token)

    def step(self, token: int) -> str:
        return self.visible(self.decoder.step(token) or "")

    def end(self) -> str:
        """The text that was held back for a next token."""
        self.ended = True
        return self.visible(self.decoder.flush())

    def visible(self, piece: str) -> str:
        """The piece without what belongs to `shown`."""
        hidden, self.hidden = self.hidden, max(0, self.hidden - len(piece))
        return piece[hidden:]
