"""Whether a model beside the trained one, a teacher or a reference, gives the same numbers to the same tokens."""

from pathlib import Path

from ligermodels.errors import InputError
from ligermodels.hub import load_tokenizer
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.files import has_tokenizer


def tokenizer_of(folder: Path) -> Tokenizer | None:
    return load_tokenizer(folder) if has_tokenizer(folder) else None


def refuse_other_tokens(own: Tokenizer, other: Tokenizer, title: str, flag: str) -> None:
    """Raises InputError where a number belongs to different tokens. title: of the trained model. flag: names the other
    one, as `--teacher FOLDER`."""
    mine, theirs = (tokenizer.tokenizer.get_vocab(with_added_tokens=True) for tokenizer in (own, other))
    if mine == theirs:
        return
    token = min(number for _, number in mine.items() ^ theirs.items())
    here, there = (next((text for text, number in v.items() if number == token), None) for v in (mine, theirs))
    raise InputError(
        f"{flag}: token {token} is {here!r} in the tokenizer of {title}, {there!r} in its own; take a model with the "
        "same vocabulary"
    )
