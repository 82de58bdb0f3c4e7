"""Sources by their names: what their documents are, and which of them are for validation.

Texts are tokenised once, into the user's cache, and mapped from there by all ranks. Must not know rows.
"""

import argparse
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligermodels.errors import InputError
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.files import has_tokenizer
from ligermodels.training.data.cache import all_cached, cached
from ligermodels.training.data.chat import documents
from ligermodels.training.data.corpus import vocabulary_texts
from ligermodels.training.data.embedded import EMBEDDED, EMBEDDED_VOCABULARY, RANDOM, Part, Question, random_data
from ligermodels.training.data.new_tokenizer import END_OF_TEXT_ID, save_tokenizer, tokenizer_and_end, train_tokenizer
from ligermodels.training.data.progress import Progress
from ligermodels.training.data.records import BadLines, Record
from ligermodels.training.data.sources import HUB, TOKEN_SUFFIXES, WITHOUT_FILES, files_of, read, suffix_of
from ligermodels.training.data.split import Selection, all_of, hold_out, usual_fraction
from ligermodels.training.data.store import TokenStore, open_store, write
from ligermodels.training.data.tables import hub_files
from ligermodels.training.data.token_files import open_indexed, open_tokens, stated_end, write_index
from ligermodels.units import counted

# Of text that a new tokenizer is trained on, the first of the data: so many for each entry, and at most.
CHARACTERS_AN_ENTRY, MOST_CHARACTERS = 10**4, 10**8


@dataclass(frozen=True)
class Source:
    """nats: as `Embedded`'s, None where they are not known."""

    training: list[Selection]
    validation: list[Selection]
    nats: float | None
    questions: list[Question]


class Reader:
    """Opens sources by name, with one tokenizer for all that are text: the model's or, where it has none, a new one.

    skipped: bad lines so far. used: the tokenizer, once there was text. trained: the same, if it is new.
    """

    def __init__(self, names: Sequence[str], folder: Path | None, vocab_size: int, args: argparse.Namespace) -> None:
        self.names, self.folder, self.vocab_size, self.args = names, folder, vocab_size, args
        self.skipped = 0
        self.used: Tokenizer | None = None
        self.trained: Tokenizer | None = None

    def source(self, name: str, *, split: bool) -> Source:
        """split: whether a part of it is for validation alone; else all of it is for both."""
        if name in EMBEDDED:
            data = EMBEDDED[name]()
            seen, unseen = (all_of(self.embedded(part)) for part in (data.training, data.validation))
            return Source([seen], [unseen], data.nats, data.questions)
        if name == RANDOM:
            seen, unseen, nats = random_data(self.vocab_size, self.args.sequence_length)
            return Source([seen], [unseen], nats, [])
        stores = self.stores(name)
        if not split:
            whole = [all_of(store) for store in stores]
            return Source(whole, whole, None, [])
        fraction = self.args.validation_fraction or usual_fraction(stores)
        training, validation = zip(*(hold_out(store, fraction) for store in stores), strict=True)
        return Source(list(training), list(validation), None, [])

    def stores(self, name: str) -> list[TokenStore]:
        files = files_read(name)
        if files and all(suffix_of(file) in TOKEN_SUFFIXES for file in files):
            return self.token_files(files)
        key = self.key(files, hub=of_the_hub([name]))
        return [self.tokenised(name, functools.partial(read, name), key, size_of(files))]

    def embedded(self, part: Part) -> TokenStore:
        return self.tokenised(f"the {part.kind}", lambda *_: part.records(), self.key([], embedded=part), None)

    def tokenised(
        self,
        title: str,
        records: Callable[[BadLines, Progress], Iterator[Record]],
        key: dict[str, Any],
        size: int | None,
    ) -> TokenStore:
        """key: what the records follow from. size: bytes to read."""
        tokenizer, end = self.tokenizer

        def fill(folder: Path) -> None:
            bad = BadLines(self.args.allow_bad_lines)
            with Progress(f"Tokenising {title}", size) as progress:
                made = documents(records(bad, progress), tokenizer, end, bad)
                write(progress.over(made), self.vocab_size, folder)
            (folder / "skipped").write_text(str(bad.skipped))

        folder = cached(key | {"tokenizer": identity(tokenizer), "end": end}, fill)
        self.skipped += int((folder / "skipped").read_text())
        return open_store(folder)

    def token_files(self, files: Sequence[Path]) -> list[TokenStore]:
        mapped, ends = [open_tokens(file) for file in files], [self.end_of(file) for file in files]
        indices = [
            (self.key([file], end=end), functools.partial(write_index, tokens, end, self.vocab_size, str(file)))
            for file, tokens, end in zip(files, mapped, ends, strict=True)
        ]
        opened = zip(mapped, files, all_cached(indices), strict=True)
        return [open_indexed(tokens, str(file), folder) for tokens, file, folder in opened]

    def end_of(self, file: Path) -> int:
        """The end-of-text token of a file of tokens: what is stated beside it, else the tokenizer's."""
        end = stated_end(file)
        if end is None and self.folder is None:
            raise InputError(f"{file.with_suffix('.json')}: must give end_of_text: the model has no tokenizer yet")
        return self.tokenizer[1] if end is None else end

    def key(self, files: Sequence[Path], **others: Any) -> dict[str, Any]:
        """What the content of a cached folder follows from."""
        return {"files": [stamp(file) for file in files], "vocab_size": self.vocab_size} | others

    @functools.cached_property
    def tokenizer(self) -> tuple[Tokenizer, int]:
        """And the end-of-text token."""
        named = [name for name in self.names if name not in WITHOUT_FILES]
        if self.folder and (named or has_tokenizer(self.folder)):
            self.used, end = tokenizer_and_end(self.folder)
            return self.used, end
        self.used = self.trained = self.new_tokenizer(named)
        return self.used, END_OF_TEXT_ID

    def new_tokenizer(self, names: Sequence[str]) -> Tokenizer:
        """Trained on these sources; where there are none, as all data is embedded, that of the embedded data."""
        files = [file for name in names for file in files_read(name)]
        tokens = next((file for file in files if suffix_of(file) in TOKEN_SUFFIXES), None)
        if tokens:
            raise InputError(f"--data {tokens}: tokens and text together need a model that has a tokenizer")
        size = self.vocab_size if names else min(self.vocab_size, EMBEDDED_VOCABULARY)

        def fill(folder: Path) -> None:
            about = min(self.characters, size_of(files)) if names else None
            with Progress("Training a tokenizer", about) as progress:
                texts = self.texts_of(names, progress) if names else vocabulary_texts()
                save_tokenizer(train_tokenizer(progress.over(texts), size), folder)

        return Tokenizer.from_folder(cached(self.key(files, hub=of_the_hub(names), new="tokenizer"), fill))

    @property
    def characters(self) -> int:
        """That a new tokenizer is trained on."""
        return min(MOST_CHARACTERS, CHARACTERS_AN_ENTRY * self.vocab_size)

    def texts_of(self, names: Sequence[str], progress: Progress) -> Iterator[str]:
        left = self.characters
        bad = BadLines(self.args.allow_bad_lines)
        for record in itertools.chain.from_iterable(read(name, bad, progress) for name in names):
            for text in record.texts:
                yield text
                left -= len(text)
            if left <= 0:
                return

    def refuse_too_many_bad_lines(self) -> None:
        """Each source by itself stops at the first line too many; together they may have more."""
        if self.skipped > self.args.allow_bad_lines:
            raise InputError(
                f"--data: {counted(self.skipped, 'bad line')}; --allow-bad-lines {self.args.allow_bad_lines}"
            )


def files_read(name: str) -> list[Path]:
    return hub_files(name) if name.startswith(HUB) else files_of(name)


def of_the_hub(names: Sequence[str]) -> list[str]:
    """The names of data sets of the Hub: its files do not tell which part of one is meant."""
    return [name for name in names if name.startswith(HUB)]


def size_of(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def stamp(file: Path) -> list[Any]:
    status = file.stat()
    return [str(file.resolve()), status.st_size, status.st_mtime_ns]


def identity(tokenizer: Tokenizer) -> str:
    templates = sorted((name, template.source) for name, template in tokenizer.templates.items())
    whole = repr((tokenizer.tokenizer.to_str(), sorted(tokenizer.named.items()), templates))
    return hashlib.sha256(whole.encode()).hexdigest()
