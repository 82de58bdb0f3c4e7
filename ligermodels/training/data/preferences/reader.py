"""The groups of a source, by its name: tokenised once into the user's cache, and memory-mapped from there by all ranks.

Must not know rows or steps.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import numpy as np

from ligermodels.errors import InputError
from ligermodels.training.data.embedded.embedded import EMBEDDED_GROUPS
from ligermodels.training.data.formats.progress import ReadingProgress
from ligermodels.training.data.formats.records import BadLines, GroupRecord, Record
from ligermodels.training.data.formats.sources import TOKEN_SUFFIXES, read_records, suffix_of
from ligermodels.training.data.formats.specs import BUILT_IN_SOURCES
from ligermodels.training.data.preferences.groups import GroupOptions
from ligermodels.training.data.preferences.store import GroupStore, open_groups, write_groups
from ligermodels.training.data.preferences.tokenization import GroupTokenizer, Lengths
from ligermodels.training.data.reader import SourceReader, hub_names, input_files, tokenizer_hash, total_bytes
from ligermodels.training.data.rows.cache import cached_folder


class GroupReader:
    """Opens sources of groups by name. lengths: how many groups so far were too long."""

    def __init__(self, sources: SourceReader, options: GroupOptions) -> None:
        self.sources, self.options, self.lengths = sources, options, Lengths()

    def stores(self, name: str) -> list[GroupStore]:
        """The groups of a source; of an embedded one, those for training and those for validation."""
        if name in EMBEDDED_GROUPS:
            return [self.store(f"the {name}", lambda *_, part=part: part.records(), embedded=part)
                    for part in EMBEDDED_GROUPS[name]]  # fmt: skip
        if name in BUILT_IN_SOURCES:
            raise InputError(f"--data {name}: is for supervised training; here, {' and '.join(EMBEDDED_GROUPS)} fit")
        files = input_files(name)
        if any(suffix_of(file) in TOKEN_SUFFIXES for file in files):
            raise InputError(f"--data {name}: is of token ids, which have no prompts and completions; give records")
        read = functools.partial(read_records, name, fields=self.sources.fields)
        return [self.store(name, read, files, hub=hub_names([name]))]

    def store(self, title: str, read, files: Iterable[Path] = (), **key) -> GroupStore:
        """read: (bad_lines, progress) -> records. key: what the records depend on beside files."""
        files = list(files)
        tokenizer, end = self.sources.tokenizer
        allowed = self.sources.config.allow_bad_lines

        def fill(folder: Path) -> None:
            bad_lines = BadLines(allowed)
            grouping = GroupTokenizer(tokenizer, end, self.options, bad_lines, lambda: self.sources.processor)
            with ReadingProgress(f"Tokenising {title}", total_bytes(files) if files else None) as progress:
                records = self.units(read(bad_lines, progress), title)
                write_groups(progress.track(grouping.groups(records)), self.sources.vocab_size, folder)
            counted = {"skipped": bad_lines.skipped, "lengths": dataclasses.asdict(grouping.lengths)}
            (folder / "counts.json").write_text(json.dumps(counted))

        options = dataclasses.asdict(self.options) | {"row_length": None, "share_prompts": None}  # of rows alone
        described = {"groups": options, "tokenizer": tokenizer_hash(tokenizer), "end": end}
        described |= {"images": self.sources.image_settings}
        folder = cached_folder(self.sources.cache_key(files, **key) | described, fill)
        counts = json.loads((folder / "counts.json").read_text())
        self.sources.skipped += counts["skipped"]
        for name, count in counts["lengths"].items():
            setattr(self.lengths, name, getattr(self.lengths, name) + count)
        return open_groups(folder)

    def units(self, records: Iterable[Record], title: str) -> Iterator[GroupRecord]:
        """The records as units of the kind: of pairs, each side is a judged completion of its own."""
        for record in cast(Iterable[GroupRecord], records):
            if self.options.kind == "judged" and len(record.completions) == 2:
                for side, label in enumerate((1.0, 0.0)):
                    yield record.side(side)._replace(value=label)
            else:
                refuse_other_kind(record, self.options.kind, title)
                yield record


def refuse_other_kind(record: GroupRecord, kind: str, title: str) -> None:
    """Raises InputError for embedded data of another kind, which no format has checked."""
    fits = {"pairs": 2, "judged": 1, "prompts": 0}
    if isinstance(record, GroupRecord) and fits.get(kind) != len(record.completions):
        raise InputError(f"{title}: its records do not fit the objective, which takes {kind}")


def split_by_prompt(store: GroupStore, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """(training, validation): numbers of groups, int64. Validation has those prompts whose hashes are the smallest.

    `fraction` of the prompts, at least one; all groups of a prompt are on the same side. Depends on nothing else.
    """
    hashes = store.prompt_hashes
    prompts = np.unique(hashes)
    count = max(1, round(len(prompts) * fraction))
    chosen = hashes <= prompts[count - 1]
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)
