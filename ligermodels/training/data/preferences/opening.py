"""open_preferences: from the settings of a run to the groups that it trains on and validates with.

    options = GroupOptions(kind="pairs", max_length=1024)
    data = open_preferences(config, options, folder, model.config.vocab_size)
    step = data.training.step(progress.rows, config.batch_size, world)        # progress.rows counts units
    for batch in step.batches:
        logprobs = model.logprobs(**batch.model_inputs).logprobs              # [N]
        result = losses.dpo(logprobs[: batch.supervised], batch.completions, …)

Everything that can be wrong with the data raises InputError here, before weights are loaded.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from ligermodels.errors import InputError
from ligermodels.images.inputs import Processor
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data.embedded import EMBEDDED_GROUPS, VALIDATION_QUESTIONS, Question
from ligermodels.training.data.formats.records import BadLines, GroupRecord, Record, TeacherRecord
from ligermodels.training.data.formats.sources import TOKEN_SUFFIXES, read_records, suffix_of
from ligermodels.training.data.formats.specs import BUILT_IN_SOURCES, describe_sources, parse_sources
from ligermodels.training.data.formats.streams import ReadingProgress
from ligermodels.training.data.opening import USED_TWICE, sample_pictures
from ligermodels.training.data.preferences.formats import GroupFormats
from ligermodels.training.data.preferences.steps import GroupSelection, TrainingGroups, ValidationGroups
from ligermodels.training.data.preferences.store import GroupOptions, GroupStore, open_groups, write_groups
from ligermodels.training.data.preferences.tokenization import GroupTokenizer, Lengths
from ligermodels.training.data.reader import (
    ReadRecords,
    SourceDocuments,
    SourceReader,
    hub_names,
    input_files,
    total_bytes,
)
from ligermodels.training.data.rows.packing import exclude_validation
from ligermodels.training.data.run_tokenizer import NewImages
from ligermodels.training.settings.config import TrainConfig
from ligermodels.units import counted

COMPLETIONS = {"pairs": 2, "judged": 1, "prompts": 0}  # of a group


class GroupReader(SourceReader):
    """Opens sources of groups by name. lengths: how many groups so far were too long."""

    def __init__(
        self, names: Sequence[str], folder: Path | None, vocab_size: int, config: TrainConfig, options: GroupOptions,
        adapter: Path | None = None, images: NewImages | None = None,
    ) -> None:  # fmt: skip
        formats = GroupFormats(options.kind)
        super().__init__(names, folder, vocab_size, config, options.tokens_per_row, adapter, formats, images)
        self.options, self.lengths = options, Lengths()

    def documents(self, name: str, *, split: bool) -> SourceDocuments:
        """Returns the groups of a source, as `GroupSelection`."""
        if name in EMBEDDED_GROUPS:
            training, validation = (
                all_groups(self.group_store(f"the {name}", lambda *_, part=part: part.records(), embedded=part))
                for part in EMBEDDED_GROUPS[name]
            )
            return SourceDocuments([training], [validation])
        return self.documents_of_files(name, split, all_groups, split_by_prompt)

    def stores(self, name: str) -> list[Any]:
        """Returns the store of the groups of files; none without a group."""
        if name in BUILT_IN_SOURCES:
            raise InputError(f"--data {name}: is for supervised training; here, {' and '.join(EMBEDDED_GROUPS)} fit")
        files = input_files(name)
        if any(suffix_of(file) in TOKEN_SUFFIXES for file in files):
            raise InputError(f"--data {name}: is of token ids, which have no prompts and completions; give records")
        read = functools.partial(read_records, name, fields=self.fields)
        store = self.group_store(name, read, files, hub=hub_names([name]))
        return [store] if len(store) else []

    def group_store(self, title: str, read: ReadRecords, files: Sequence[Path] = (), **key: Any) -> GroupStore:
        """Returns the store of the groups of records. key: what the records depend on beside files."""
        options = dataclasses.asdict(self.options) | {"row_length": None, "share_prompts": None}  # of rows alone
        described = self.cache_key(files, groups=options, **key)
        size = total_bytes(files) if files else None
        folder, counts = self.tokenized_folder(title, lambda *given: self.units(read(*given), title), described, size)
        for name, count in counts["lengths"].items():
            setattr(self.lengths, name, getattr(self.lengths, name) + count)
        return open_groups(folder)

    def write(
        self, records: Iterable[Record], bad_lines: BadLines, progress: ReadingProgress, folder: Path
    ) -> Mapping[str, Any]:
        grouping = GroupTokenizer(*self.tokenizer, self.options, bad_lines, lambda: self.processor, self.image_tokens)
        units = cast(Iterable[GroupRecord | TeacherRecord], records)
        write_groups(progress.track(grouping.groups(units)), self.vocab_size, folder)
        return {"lengths": dataclasses.asdict(grouping.lengths)}

    def units(self, records: Iterable[Record], title: str) -> Iterator[GroupRecord]:
        """Yields the records as units of the kind: of pairs, each side is a judged completion of its own.

        Raises InputError for embedded data of another kind, which no format has checked.
        """
        for record in cast(Iterable[GroupRecord], records):
            if self.options.kind == "judged" and len(record.completions) == 2:
                for side, label in enumerate((1.0, 0.0)):
                    yield record.side(side)._replace(value=label)
            elif isinstance(record, GroupRecord) and len(record.completions) != COMPLETIONS.get(self.options.kind):
                raise InputError(f"{title}: its records do not fit the objective, which takes {self.options.kind}")
            else:
                yield record


def all_groups(store: GroupStore) -> GroupSelection:
    return GroupSelection(store, np.arange(len(store)))


def split_by_prompt(store: GroupStore, fraction: float) -> tuple[GroupSelection, GroupSelection]:
    """Returns (training, validation).

    Validation has the prompts whose hashes are the smallest: `fraction` of the prompts, at least one, and nothing where
    there is one alone. All groups of a prompt are on the same side. The split depends on nothing else.
    """
    hashes = store.prompt_hashes
    prompts = np.unique(hashes)
    count = min(max(1, round(len(prompts) * fraction)), len(prompts) - 1)  # something is left to train on
    chosen = hashes < prompts[count]
    return all_groups(store).select(~chosen), all_groups(store).select(chosen)


@dataclass(frozen=True)
class PreferenceData:
    """The data of a run. names: of the sources. description: with what was skipped, dropped or cut. lengths: counts of
    groups that were too long. tokenizer, new_tokenizer, processor, new_images, picture_sizes: as in `Data`. questions:
    (prompt, answer) of unseen sums."""

    names: str
    description: str
    training: TrainingGroups
    validation: ValidationGroups
    lengths: Lengths
    tokenizer: Tokenizer
    new_tokenizer: Tokenizer | None
    questions: list[Question] | None
    processor: Processor | None = None
    new_images: NewImages | None = None
    picture_sizes: Sequence[tuple[int, int]] = ()


def open_preferences(
    config: TrainConfig, options: GroupOptions, folder: Path | None, vocab_size: int, adapter: Path | None = None,
    images: NewImages | None = None, prepare_inputs: Callable[..., Any] | None = None,
) -> PreferenceData:  # fmt: skip
    """Opens the data of a run. Every rank must call this, and gets the same data.

    config: data, validation_data, validation_fraction, seed, chat_template and allow_bad_lines are read. folder,
    vocab_size, adapter, images, prepare_inputs: as for `open_data`. Sources are files, folders and data sets, or
    "preferences" (pairs or judged completions) and "sums" (prompts with a column `answer`).
    Raises InputError for data that cannot be read, that are too few, or that do not fit the kind or the model.
    """
    if not config.data:
        raise InputError(f"--data is missing: a file, a folder or hub:NAME; or {' or '.join(EMBEDDED_GROUPS)}")
    specs, weights, separate = parse_sources(config, config.data)
    names = [spec.name for spec in specs]
    reader = GroupReader(names, folder, vocab_size, config, options, adapter, images)

    sources, validation_sources = reader.sources(separate)
    held_out = [part for source in validation_sources for part in source.validation]
    if separate:
        refuse_no_groups("--validation-data", separate, [held_out], reader)
    reader.refuse_too_many_bad_lines()
    refuse_no_groups("--data", names, [source.training for source in sources], reader)
    kept = [exclude_validation(source.training, held_out) for source in sources]
    refuse_no_groups("--data", names, kept, reader)
    excluded = sum(count(source.training) for source in sources) - sum(map(count, kept))
    used_twice = 0
    if not count(held_out):
        held_out = [*itertools.chain(*kept)]
        used_twice = count(held_out)

    selections = number_completions([*kept, held_out])
    *trained, validated = selections
    mixed = trained if weights else [[*itertools.chain(*trained)]]
    stores = [part.store.tokens for selection in selections for part in selection]
    decoder = reader.image_decoder(stores, prepare_inputs)
    training = TrainingGroups(mixed, weights or [1.0], config.seed, options, decoder)
    validation = ValidationGroups(validated, options, decoder)
    tokenizer, _ = reader.tokenizer
    return PreferenceData(
        " ".join(names), describe_sources(specs, notes_on(reader, excluded, used_twice)), training, validation,
        reader.lengths, tokenizer, reader.new_tokenizer,
        questions(validation) if "sums" in (separate or names) else None,
        decoder.processor if decoder else None, images if reader.new_tokenizer else None,
        sample_pictures(stores, decoder.processor) if decoder else (),
    )  # fmt: skip


def refuse_no_groups(
    flag: str, names: Sequence[str], parts: Sequence[Sequence[GroupSelection]], reader: GroupReader
) -> None:
    """Raises InputError for a source without a group. parts: of each name; or of all names together."""
    for name, part in zip(names if len(parts) > 1 else [" ".join(names)], parts, strict=True):
        if not count(part):
            raise InputError(
                f"{flag} {name}: has no group outside the validation split{too_long_note(reader)}; give more "
                "data, or --validation-data"
            )


def count(parts: Sequence[GroupSelection]) -> int:
    """Returns the number of groups."""
    return sum(map(len, parts))


def number_completions(sources: Sequence[Sequence[GroupSelection]]) -> list[list[GroupSelection]]:
    """Returns selections in which every completion of the data has one number, whichever selection it is in."""
    firsts: dict[int, int] = {}
    total = 0
    for store in (part.store for parts in sources for part in parts):
        if id(store) not in firsts:
            firsts[id(store)] = total
            total += len(store.tokens)
    return [[dataclasses.replace(part, first=firsts[id(part.store)]) for part in parts] for parts in sources]


def questions(validation: ValidationGroups) -> list[Question]:
    asked = (validation.groups.prompt(number, number) for number in range(min(len(validation), VALIDATION_QUESTIONS)))
    return [(prompt.text, prompt.columns["answer"]) for prompt in asked if "answer" in prompt.columns]


def notes_on(reader: GroupReader, excluded: int, used_twice: int) -> list[tuple[int, str, str]]:
    """Returns what `describe_sources` says about records and groups.

    excluded: groups with a prompt of the validation data. used_twice: groups of a single prompt.
    """
    lengths, options = reader.lengths, reader.options
    limit = f"{options.max_length} tokens" if options.kind == "prompts" else f"--max-length {options.max_length}"
    return [
        *reader.notes_on_splits(),
        (reader.skipped, "bad line", "skipped"),
        (lengths.dropped, "group", f"longer than {limit} dropped"),
        (lengths.cut_prompts, "prompt", f"cut to --max-prompt-length {options.max_prompt_length}"),
        (lengths.cut_completions, "group", f"cut to --max-length {options.max_length}"),
        (excluded, "group", "excluded, with a prompt of the validation data"),
        (used_twice, "group", USED_TWICE),
    ]


def too_long_note(reader: GroupReader) -> str:
    if not reader.lengths.dropped:
        return ""
    of_prompts = reader.options.kind == "prompts"
    remedy = "lower --max-completion-length" if of_prompts else "raise --max-length, or use --too-long cut"
    return f" ({counted(reader.lengths.dropped, 'group')} dropped as too long; {remedy})"
