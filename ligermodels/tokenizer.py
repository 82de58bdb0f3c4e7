"""Text to token ids and back, over the `tokenizers` library and a checkpoint's tokenizer.json."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from ligermodels.errors import CheckpointError


class Tokenizer:
    """The tokenizer of a checkpoint folder."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Raises CheckpointError where the folder has no tokenizer.json or a broken one."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: not found; copy the tokenizer's files into the folder")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer that `tokenizers` can read: {error}") from error

    @property
    def vocab_size(self) -> int:
        """How many ids there are, added tokens included."""
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
