"""From what --data and its companions name to what a run trains on and validates with.

All that can be wrong with data is found here, before weights are loaded. Must not know models.
"""

import argparse
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data.batches import Training, Validation, rows_a_rank
from ligermodels.training.data.embedded import EMBEDDED_VOCABULARY, RANDOM, Question
from ligermodels.training.data.packing import rows_of
from ligermodels.training.data.reader import Reader, Source
from ligermodels.training.data.sources import Spec, parse_spec
from ligermodels.training.data.split import Selection, without
from ligermodels.units import counted

TITLES = {"stories": "the embedded stories", "chats": "the embedded chats", RANDOM: "random tokens"}


@dataclass(frozen=True)
class Data:
    """tokenizer: the model's or a new one, None where none was needed. new_tokenizer: the same where it was trained on
    them, the model having none. floor: the least nats per predicted validation token that any model can reach, where
    that is known. questions: on validation documents, (prompt, answer), of the embedded data.
    """

    description: str
    training: Training
    validation: Validation
    tokenizer: Tokenizer | None
    new_tokenizer: Tokenizer | None
    floor: float | None
    questions: list[Question] | None


def open_data(args: argparse.Namespace, folder: Path | None, vocab_size: int, world: World) -> Data:
    """Every rank calls, and gets the same.

    folder: of the model, whose tokenizer is used; None trains one on the data. vocab_size: the model's, at most that of
    a new tokenizer. Raises InputError for what cannot be read, is too little, or does not fit the model.
    """
    specs = [parse_spec(text) for text in args.data or [default_name(vocab_size)]]
    weights = weights_of(specs)
    reader = Reader([spec.name for spec in specs], folder, vocab_size, args)
    sources = [reader.source(spec.name, split=not args.validation_data) for spec in specs]
    validating = [reader.source(unweighted(text), split=False) for text in args.validation_data or []] or sources
    reader.refuse_too_many_bad_lines()

    held_out = [part for source in validating for part in source.validation]
    kept = [without(source.training, held_out) for source in sources]
    left_out = sum(len(part) for source in sources for part in source.training) - sum(map(len, itertools.chain(*kept)))
    packing = args.packing and any(spec.name != RANDOM for spec in specs)
    rows = functools.partial(rows_of, length=args.sequence_length, packing=packing)
    mixed = kept if weights else [list(itertools.chain(*kept))]
    joined = [rows(parts) for parts in mixed]
    training = Training(joined, weights or [1.0], args.seed, packing)
    validation = Validation(rows(held_out), packing)
    refuse_too_little(args, specs, training, world)
    questions = [question for source in validating for question in source.questions]
    return Data(
        description(specs, reader.skipped, left_out), training, validation, reader.used, reader.trained,
        floor_of(validating, held_out), questions or None,
    )  # fmt: skip


def default_name(vocab_size: int) -> str:
    return "stories" if vocab_size == EMBEDDED_VOCABULARY else RANDOM


def weights_of(specs: Sequence[Spec]) -> list[float] | None:
    weights = [spec.weight for spec in specs if spec.weight is not None]
    if weights and len(weights) < len(specs):
        without_one = next(spec.name for spec in specs if spec.weight is None)
        raise InputError(
            f"--data {without_one}: has no weight, but others have; give one to each, as {without_one}=0.5"
        )
    return weights or None


def unweighted(text: str) -> str:
    spec = parse_spec(text)
    if spec.weight is not None:
        raise InputError(f"--validation-data {text}: all of it is validated with, whatever its weight; leave that out")
    return spec.name


def floor_of(sources: Sequence[Source], validation: Sequence[Selection]) -> float | None:
    """Raises InputError where no token is predicted."""
    predicted = sum(part.supervised for part in validation)
    if not predicted:
        raise InputError("--data: what is left for validation has no supervised token; raise --validation-fraction")
    nats = [source.nats for source in sources]
    return None if None in nats else sum(n for n in nats if n is not None) / predicted


def description(specs: Sequence[Spec], skipped: int, left_out: int) -> str:
    names = (TITLES.get(spec.name, spec.name) + ("" if spec.weight is None else f"={spec.weight:g}") for spec in specs)
    notes = []
    if skipped:
        notes.append(f"{counted(skipped, 'bad line')} skipped")
    if left_out:
        notes.append(f"{counted(left_out, 'document')} left out: also for validation")
    return " + ".join(names) + (f" ({', '.join(notes)})" if notes else "")


def refuse_too_little(args: argparse.Namespace, specs: Sequence[Spec], training: Training, world: World) -> None:
    rows_a_rank(args.batch_size, args.micro_batch_size, world)
    names = " ".join(spec.name for spec in specs)
    for source, spec in zip(training.sources, specs, strict=False):
        if not len(source):
            raise InputError(f"--data {spec.name}: has no document of two tokens that is not for validation")
    if training.packing and training.tokens < args.sequence_length:
        raise InputError(
            f"--data {names}: {counted(training.tokens, 'token')} for training, less than one row; lower "
            f"--sequence-length {args.sequence_length}, or give more data"
        )
    if len(training) < args.batch_size:
        raise InputError(
            f"--data {names}: fills {counted(len(training), 'row')} of {args.sequence_length} tokens for training; a "
            f"step takes {args.batch_size}; lower --batch-size or --sequence-length, or give more data"
        )
