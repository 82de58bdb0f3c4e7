"""open_data: from the settings of a run to the rows that it trains on and validates with.

Everything that can be wrong with the data raises InputError here, before weights are loaded. This module knows nothing
about models.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.config import TrainConfig
from ligermodels.training.data.batches import TrainingRows, ValidationRows, split_global_batch
from ligermodels.training.data.embedded import EMBEDDED_VOCABULARY, RANDOM, Question
from ligermodels.training.data.packing import pack_documents
from ligermodels.training.data.reader import SourceDocuments, SourceReader
from ligermodels.training.data.sources import SourceSpec, parse_spec
from ligermodels.training.data.split import Selection, exclude_validation
from ligermodels.units import counted

TITLES = {"stories": "the embedded stories", "chats": "the embedded chats", RANDOM: "random tokens"}


@dataclass(frozen=True)
class Data:
    """The data of a run.

    tokenizer: the model's or a new one; None if none was needed. new_tokenizer: the same if it was trained on the data,
    because the model has none. floor: the lowest validation loss that any model can reach, in nats per supervised
    token; None if it is not known. questions: (prompt, answer) on the validation documents, of embedded data only.
    """

    description: str
    training: TrainingRows
    validation: ValidationRows
    tokenizer: Tokenizer | None
    new_tokenizer: Tokenizer | None
    floor: float | None
    questions: list[Question] | None


def open_data(config: TrainConfig, folder: Path | None, vocab_size: int, world: World) -> Data:
    """Opens the data of a run. Every rank must call this, and gets the same data.

    folder: the model's folder, whose tokenizer is used; None trains a new tokenizer on the data. vocab_size: the
    model's, and the largest size of a new tokenizer. Raises InputError for data that cannot be read, that is too
    little, or that does not fit the model.
    """
    specs = [parse_spec(text) for text in config.data or [default_source(vocab_size)]]
    weights = mixture_weights(specs)
    reader = SourceReader([spec.name for spec in specs], folder, vocab_size, config)
    sources = [reader.documents(spec.name, split=not config.validation_data) for spec in specs]
    names = [unweighted_name(text) for text in config.validation_data or []]
    validation_sources = [reader.documents(name, split=False) for name in names] or sources
    reader.refuse_too_many_bad_lines()
    reader.warn_of_unused_template()

    held_out = [part for source in validation_sources for part in source.validation]
    kept = [exclude_validation(source.training, held_out) for source in sources]
    excluded = sum(len(part) for source in sources for part in source.training) - sum(map(len, itertools.chain(*kept)))
    packing = config.packing and any(spec.name != RANDOM for spec in specs)
    pack = functools.partial(pack_documents, length=config.sequence_length, packing=packing)
    mixed = kept if weights else [list(itertools.chain(*kept))]
    training = TrainingRows([pack(parts) for parts in mixed], weights or [1.0], config.seed, packing)
    validation = ValidationRows(pack(held_out), packing)
    refuse_too_little(config, specs, training, world)
    questions = [question for source in validation_sources for question in source.questions]
    return Data(
        describe_data(specs, reader.skipped, excluded), training, validation, reader.used_tokenizer,
        reader.new_tokenizer, validation_floor(validation_sources, held_out), questions or None,
    )  # fmt: skip


def default_source(vocab_size: int) -> str:
    return "stories" if vocab_size == EMBEDDED_VOCABULARY else RANDOM


def mixture_weights(specs: Sequence[SourceSpec]) -> list[float] | None:
    """The weights of all sources; None if no source has one. Raises InputError if only some have one."""
    weights = [spec.weight for spec in specs if spec.weight is not None]
    if weights and len(weights) < len(specs):
        name = next(spec.name for spec in specs if spec.weight is None)
        raise InputError(f"--data {name}: has no weight, but other sources do; give each one, such as {name}=0.5")
    return weights or None


def unweighted_name(text: str) -> str:
    spec = parse_spec(text)
    if spec.weight is not None:
        raise InputError(f"--validation-data {text}: a validation source is used as a whole; remove the weight")
    return spec.name


def validation_floor(sources: Sequence[SourceDocuments], validation: Sequence[Selection]) -> float | None:
    """The entropy of the validation documents, in nats per supervised token; None if it is not known.

    Raises InputError if no token is supervised.
    """
    supervised = sum(part.supervised for part in validation)
    if not supervised:
        raise InputError("--data: the validation split has no supervised token; raise --validation-fraction")
    nats = [source.nats for source in sources]
    return None if None in nats else sum(n for n in nats if n is not None) / supervised


def describe_data(specs: Sequence[SourceSpec], skipped: int, excluded: int) -> str:
    names = (TITLES.get(spec.name, spec.name) + ("" if spec.weight is None else f"={spec.weight:g}") for spec in specs)
    notes = []
    if skipped:
        notes.append(f"{counted(skipped, 'bad line')} skipped")
    if excluded:
        notes.append(f"{counted(excluded, 'document')} excluded, also in the validation data")
    return " + ".join(names) + (f" ({', '.join(notes)})" if notes else "")


def refuse_too_little(config: TrainConfig, specs: Sequence[SourceSpec], training: TrainingRows, world: World) -> None:
    """Raises InputError if the training rows do not fill a step, or if ranks cannot share a global batch."""
    split_global_batch(config.batch_size, config.micro_batch_size, world)
    names = " ".join(spec.name for spec in specs)
    for source, spec in zip(training.sources, specs, strict=False):
        if not len(source):
            raise InputError(f"--data {spec.name}: has no document of two or more tokens outside the validation split")
    if training.packing and training.tokens < config.sequence_length:
        raise InputError(
            f"--data {names}: has {counted(training.tokens, 'token')} for training, less than one row; lower "
            f"--sequence-length {config.sequence_length}, or give more data"
        )
    if len(training) < config.batch_size:
        raise InputError(
            f"--data {names}: fills {counted(len(training), 'row')} of {config.sequence_length} tokens for training, "
            f"but a step takes {config.batch_size}; lower --batch-size or --sequence-length, or give more data"
        )
