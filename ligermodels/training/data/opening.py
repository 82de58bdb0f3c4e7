"""open_data: from the settings of a run to the rows that it trains on and validates with.

Everything that can be wrong with the data raises InputError here, before weights are loaded.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ligermodels.errors import InputError
from ligermodels.images.inputs import Processor
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data.embedded import EMBEDDED_VOCABULARY, Question
from ligermodels.training.data.formats.specs import RANDOM, SourceSpec, describe_sources, missing_data, parse_sources
from ligermodels.training.data.reader import SourceDocuments, SourceReader
from ligermodels.training.data.rows.packing import Selection, count_segments, exclude_validation, pack_documents
from ligermodels.training.data.rows.run_rows import TrainingRows, ValidationRows
from ligermodels.training.data.rows.store import TokenStore
from ligermodels.training.data.run_tokenizer import NewImages
from ligermodels.training.settings.config import TrainConfig
from ligermodels.units import counted

DEFAULT_SEQUENCE_LENGTH = 2048
SAMPLED_IMAGES = 64  # of a store, whose mean size stands for that of all
MOST_DOCUMENTS = 0.99  # a sequence length that would hold so many as a whole is shown
USED_TWICE = "for training and for validation, too few to hold one out"


class DocumentLengths(NamedTuple):
    """The lengths in tokens of the training documents.

    cut: how many are longer than a row, and cut into pieces. holds_most: the length that 99 % do not exceed.
    """

    documents: int
    longest: int
    cut: int
    holds_most: int


@dataclass(frozen=True)
class Data:
    """The data of a run.

    names: of the sources. tokenizer: the model's or a new one; None if none was needed. new_tokenizer: the same if it
    was trained on the data, because the model has none. floor: the lowest validation loss that any model can reach, in
    nats per supervised token; None if it is not known. questions: (prompt, answer) on the validation documents, of
    embedded data only. processor: of the images in the data; None if there are none. new_images: if the model is new
    and reads images, what is exported about them. picture_sizes: the pixels, (height, width), of pictures as the model
    gets them, of some of the images; empty without images.
    """

    names: str
    description: str
    training: TrainingRows
    validation: ValidationRows
    lengths: DocumentLengths
    tokenizer: Tokenizer | None
    new_tokenizer: Tokenizer | None
    floor: float | None
    questions: list[Question] | None
    processor: Processor | None = None
    new_images: NewImages | None = None
    picture_sizes: Sequence[tuple[int, int]] = ()


def open_data(
    config: TrainConfig, folder: Path | None, vocab_size: int, positions: int, adapter: Path | None = None,
    images: NewImages | None = None, prepare_inputs: Callable[..., Any] | None = None,
) -> Data:  # fmt: skip
    """Opens the data of a run. Every rank must call this, and gets the same data.

    folder: the model's folder, whose tokenizer is used; None trains a new tokenizer on the data. adapter: the folder of
    the adapter that the run continues; a tokenizer in it comes first. vocab_size: the model's, and the largest size of
    a new tokenizer. positions: the model's max_position_embeddings. Without a sequence length in `config`, rows are as
    long as the longest document, at most DEFAULT_SEQUENCE_LENGTH and positions. images: what a new model that reads
    images fixes about them. prepare_inputs: as in `ImageDecoder`. Raises InputError for data that cannot
    be read, that is too little, or that does not fit the model.
    """
    specs, weights, separate = parse_sources(config, config.data or [default_source(config, vocab_size)])
    longest_row = config.sequence_length or min(DEFAULT_SEQUENCE_LENGTH, positions)
    reader = SourceReader(
        [spec.name for spec in specs], folder, vocab_size, config, longest_row, adapter, images=images
    )
    sources, validation_sources = reader.sources(separate)
    reader.refuse_too_many_bad_lines()
    reader.warn_of_unused_template()

    held_out = [part for source in validation_sources for part in source.validation]
    kept = [exclude_validation(source.training, held_out) for source in sources]
    excluded = sum(len(part) for source in sources for part in source.training) - sum(map(len, itertools.chain(*kept)))
    names = " ".join(spec.name for spec in specs)
    refuse_no_documents(specs, kept)
    used_twice = 0
    if not any(map(len, held_out)):
        held_out = [*itertools.chain(*kept)]
        used_twice = sum(map(len, held_out))
    sizes = np.concatenate([part.ends - part.begins for part in itertools.chain(*kept)])
    length = config.sequence_length or min(longest_row, int(sizes.max()))
    # Random documents fill whole rows, which need no mask unless ranks share them.
    packing = config.packing and (config.context_parallel > 1 or any(spec.name != RANDOM for spec in specs))
    refuse_cut_images([*itertools.chain(*kept), *held_out], length)
    pack = functools.partial(pack_documents, length=length, packing=packing)
    mixed = kept if weights else [list(itertools.chain(*kept))]
    decoder = reader.image_decoder([part.store for part in (*itertools.chain(*kept), *held_out)], prepare_inputs)
    training = TrainingRows([pack(parts) for parts in mixed], weights or [1.0], config.seed, packing, decoder)
    validation = ValidationRows(pack(held_out), packing, decoder)
    if packing and sizes.sum() < length:
        raise InputError(
            f"--data {names}: has {counted(int(sizes.sum()), 'token')} for training, less than one row; lower "
            f"--sequence-length {length}, or give more data"
        )
    questions = [question for source in validation_sources for question in source.questions]
    notes = [
        *reader.notes_on_splits(),
        (reader.skipped, "bad line", "skipped"),
        (reader.empty_answers, "answer", "without text, trained to end at once"),
        (excluded, "document", "excluded, also in the validation data"),
        (used_twice, "document", USED_TWICE),
        (unsupervised_pieces(kept, training), "piece", "of long documents without a supervised token left out"),
    ]
    return Data(
        names, describe_sources(specs, notes), training, validation, document_lengths(sizes, length),
        reader.used_tokenizer, reader.new_tokenizer, validation_floor(validation_sources, held_out), questions or None,
        decoder.processor if decoder else None, images if reader.new_tokenizer else None,
        sample_pictures([part.store for part in itertools.chain(*kept)], decoder.processor) if decoder else (),
    )  # fmt: skip


def default_source(config: TrainConfig, vocab_size: int) -> str:
    """Returns the source of a run without data: the embedded stories for a new model that has their vocabulary size."""
    if config.has_new_weights and vocab_size == EMBEDDED_VOCABULARY:
        return "stories"
    raise missing_data(config)


def refuse_no_documents(specs: Sequence[SourceSpec], kept: Sequence[Sequence[Selection]]) -> None:
    for spec, parts in zip(specs, kept, strict=True):
        if not any((part.ends - part.begins > 1).any() for part in parts):
            raise InputError(f"--data {spec.name}: has no document of two or more tokens outside the validation split")


def refuse_cut_images(parts: Sequence[Selection], length: int) -> None:
    """Raises InputError for a document with images that is longer than a row: it would be cut, maybe in an image."""
    for part in parts:
        images = part.store.images
        longer = np.flatnonzero(part.ends - part.begins > length) if images is not None else ()
        for begin, end in ((int(part.begins[number]), int(part.ends[number])) for number in longer):
            if images is not None and images.between(begin, end):
                raise InputError(
                    f"{part.store.place(begin)}: has {end - begin} tokens, with those of its images, more than a row "
                    f"of {length}; raise --sequence-length, or make the images smaller"
                )


def unsupervised_pieces(kept: Sequence[Sequence[Selection]], training: TrainingRows) -> int:
    """Counts the pieces of training documents that no row has, because nothing in them is supervised."""
    cut = sum(int(count_segments(part.begins, part.ends, training.length).sum()) for part in itertools.chain(*kept))
    return cut - sum(len(part.starts) for part in training.rows.parts)


def sample_pictures(stores: Sequence[TokenStore], processor: Processor) -> list[tuple[int, int]]:
    """Returns the sizes of pictures as the model gets them, of images that are spread over these stores."""
    sizes: list[tuple[int, int]] = []
    for images in (store.images for store in stores):
        if images is not None:
            for number in np.linspace(0, len(images.starts) - 1, SAMPLED_IMAGES).astype(int):
                plan = processor.plan_size(int(images.heights[number]), int(images.widths[number]))
                sizes += [processor.images.picture_size(plan)] * (1 + len(plan.crops))
    return sizes


def document_lengths(sizes: np.ndarray, length: int) -> DocumentLengths:
    """Counts the lengths of documents. sizes: their tokens [D]. length: the tokens of a row."""
    holds_most = int(np.quantile(sizes, MOST_DOCUMENTS, method="higher"))
    return DocumentLengths(len(sizes), int(sizes.max()), int((sizes > length).sum()), holds_most)


def validation_floor(sources: Sequence[SourceDocuments], validation: Sequence[Selection]) -> float | None:
    """Returns the entropy of the validation documents, in nats per supervised token; None if it is not known.

    Raises InputError if no token is supervised.
    """
    supervised = sum(part.supervised for part in validation)
    if not supervised:
        raise InputError("--data: the validation split has no supervised token; raise --validation-fraction")
    nats = [source.nats for source in sources]
    return None if None in nats else sum(n for n in nats if n is not None) / supervised


def refuse_short_epoch(data: Data, batch_size: int) -> None:
    """Raises InputError if the training rows do not fill a step of `batch_size` rows."""
    if len(data.training) < batch_size:
        raise InputError(
            f"--data {data.names}: fills {counted(len(data.training), 'row')} of {data.training.length} tokens for "
            f"training, but a step takes {batch_size}; lower --batch-size or --sequence-length, or give more data"
        )
