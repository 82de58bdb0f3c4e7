"""open_preferences: from the settings of a run to the groups that it trains on and validates with.

    options = GroupOptions(kind="pairs", max_length=1024)
    data = open_preferences(config, options, folder, model.config.vocab_size)
    step = data.training.step(progress.rows, config.batch_size, world)        # progress.rows counts units
    for batch in step.batches:
        logprobs = model.logprobs(**batch.model_inputs).logprobs              # [N]
        result = losses.dpo(logprobs[: batch.supervised], batch.completions, …)

Everything that can be wrong with the data raises InputError here, before weights are loaded. Must not know models.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ligermodels.errors import InputError
from ligermodels.images.inputs import Processor
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data.embedded.embedded import EMBEDDED_GROUPS, VALIDATION_QUESTIONS, Question
from ligermodels.training.data.embedded.new_image_tokenizer import NewImages
from ligermodels.training.data.formats.specs import SourceSpec, parse_spec
from ligermodels.training.data.opening import mixture_weights, sample_pictures, unweighted_name
from ligermodels.training.data.preferences.formats import GroupFormats
from ligermodels.training.data.preferences.groups import GroupOptions
from ligermodels.training.data.preferences.reader import GroupReader, split_by_prompt
from ligermodels.training.data.preferences.steps import GroupSelection, TrainingGroups, ValidationGroups
from ligermodels.training.data.preferences.store import GroupStore
from ligermodels.training.data.preferences.tokenization import Lengths
from ligermodels.training.data.reader import SourceReader
from ligermodels.training.data.rows.decoding import ImageDecoder
from ligermodels.training.data.rows.split import default_fraction, is_member
from ligermodels.training.settings.config import TrainConfig
from ligermodels.units import counted

NumberedStore: TypeAlias = tuple[GroupStore, np.ndarray]  # a store, and the numbers of some of its groups


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
    specs = [parse_spec(text) for text in config.data]
    weights = mixture_weights(specs)
    separate = [unweighted_name(text) for text in config.validation_data or []]
    formats = GroupFormats(options.kind)
    names = [spec.name for spec in specs]
    sources = SourceReader(names, folder, vocab_size, config, options.tokens_per_row, adapter, formats, images)
    reader = GroupReader(sources, options)

    split = [split_source(reader, name, config, split=not separate) for name in names]
    held_out = [part for _, validation in split for part in validation]
    if separate:
        held_out = [part for name in separate for part in validation_source(reader, name)]
        refuse_no_groups("--validation-data", separate, [held_out], reader)
    sources.refuse_too_many_bad_lines()
    refuse_no_groups("--data", names, [training for training, _ in split], reader)
    hashes = np.unique(np.concatenate([store.prompt_hashes[numbers] for store, numbers in held_out]))
    kept = [[without(part, hashes) for part in training] for training, _ in split]
    refuse_no_groups("--data", names, kept, reader)
    excluded = sum(count(training) for training, _ in split) - sum(map(count, kept))

    selections = number_completions([*kept, held_out])
    *trained, validated = selections
    mixed = trained if weights else [[part for parts in trained for part in parts]]
    stores = [part.store.tokens for selection in selections for part in selection]
    has_images = any(store.images is not None for store in stores)
    decoder = ImageDecoder(sources.processor, prepare_inputs) if has_images else None
    training = TrainingGroups(mixed, weights or [1.0], config.seed, options, decoder)
    validation = ValidationGroups(validated, options, decoder)
    tokenizer, _ = sources.tokenizer
    return PreferenceData(
        " ".join(names), describe_groups(specs, reader, excluded), training, validation, reader.lengths, tokenizer,
        sources.new_tokenizer, questions(validation) if "sums" in (separate or names) else None,
        decoder.processor if decoder else None, images if sources.new_tokenizer else None,
        sample_pictures(stores, decoder.processor) if decoder else (),
    )  # fmt: skip


def refuse_no_groups(
    flag: str, names: Sequence[str], parts: Sequence[Sequence[NumberedStore]], reader: GroupReader
) -> None:
    """Raises InputError for a source without a group. parts: of each name; or of all names together."""
    for name, part in zip(names if len(parts) > 1 else [" ".join(names)], parts, strict=True):
        if not count(part):
            raise InputError(
                f"{flag} {name}: has no group outside the validation split{too_long_note(reader.lengths)}; give more "
                "data, or --validation-data"
            )


def count(parts: Sequence[NumberedStore]) -> int:
    """The number of groups."""
    return sum(len(numbers) for _, numbers in parts)


def split_source(
    reader: GroupReader, name: str, config: TrainConfig, *, split: bool
) -> tuple[list[NumberedStore], list[NumberedStore]]:
    """(training, validation): stores with the numbers of their groups. split: whether to hold out a part."""
    stores = reader.stores(name)
    if name in EMBEDDED_GROUPS:
        training, validation = map(everything, stores)
        return [training], [validation] if split else []
    whole = [everything(store) for store in stores if len(store)]
    if not split or not whole:
        return whole, []
    fraction = config.validation_fraction or default_fraction([store.tokens for store, _ in whole])
    parts = [(store, *split_by_prompt(store, fraction)) for store, _ in whole]
    return [(store, training) for store, training, _ in parts], [(store, rest) for store, _, rest in parts]


def validation_source(reader: GroupReader, name: str) -> list[NumberedStore]:
    """All groups of a source; of an embedded one, those for validation."""
    stores = reader.stores(name)
    return list(map(everything, stores[1:] if name in EMBEDDED_GROUPS else stores))


def everything(store: GroupStore) -> NumberedStore:
    return store, np.arange(len(store))


def without(part: NumberedStore, hashes: np.ndarray) -> NumberedStore:
    """The groups whose prompts are not among `hashes`, ascending."""
    store, numbers = part
    return store, numbers[~is_member(store.prompt_hashes[numbers], hashes)]


def number_completions(sources: Sequence[Sequence[NumberedStore]]) -> list[list[GroupSelection]]:
    """Selections in which every completion of the data has one number, whichever selection it is in."""
    firsts: dict[int, int] = {}
    total = 0
    for store in (store for parts in sources for store, _ in parts):
        if id(store) not in firsts:
            firsts[id(store)] = total
            total += len(store.tokens)
    return [[GroupSelection(store, numbers, firsts[id(store)]) for store, numbers in parts] for parts in sources]


def questions(validation: ValidationGroups) -> list[Question]:
    asked = (validation.groups.prompt(number, number) for number in range(min(len(validation), VALIDATION_QUESTIONS)))
    return [(prompt.text, prompt.columns["answer"]) for prompt in asked if "answer" in prompt.columns]


def describe_groups(specs: Sequence[SourceSpec], reader: GroupReader, excluded: int) -> str:
    names = (
        (f"the embedded {spec.name}" if spec.name in EMBEDDED_GROUPS else spec.name)
        + ("" if spec.weight is None else f"={spec.weight:g}")
        for spec in specs
    )
    lengths, options = reader.lengths, reader.options
    notes = [
        (reader.sources.skipped, "bad line", "skipped"),
        (lengths.dropped, "group", f"longer than --max-length {options.max_length} dropped"),
        (lengths.cut_prompts, "prompt", f"cut to --max-prompt-length {options.max_prompt_length}"),
        (lengths.cut_completions, "group", f"cut to --max-length {options.max_length}"),
        (excluded, "group", "excluded, with a prompt of the validation data"),
    ]
    said = [f"{counted(number, noun)} {what}" for number, noun, what in notes if number]
    return " + ".join(names) + (f" ({', '.join(said)})" if said else "")


def too_long_note(lengths: Lengths) -> str:
    if not lengths.dropped:
        return ""
    return f" ({counted(lengths.dropped, 'group')} dropped as too long; raise --max-length, or use --too-long cut)"
