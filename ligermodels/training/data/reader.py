"""The documents of a source, by its name, and which of them are for validation.

Texts are tokenised once, into the user's cache, and memory-mapped from there by all ranks.
"""

import functools
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from ligermodels.errors import InputError, at_place
from ligermodels.images.inputs import Processor, image_tokens
from ligermodels.images.processors import MAX_FEATURES, ImageProcessor
from ligermodels.images.settings import IMAGE_PROCESSOR_FILE, PROCESSOR_FILE
from ligermodels.layers.decoder import CausalLM
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.files import has_tokenizer
from ligermodels.training.data.chat import tokenize_records
from ligermodels.training.data.embedded import (
    EMBEDDED,
    EMBEDDED_GROUPS,
    EMBEDDED_VOCABULARY,
    EmbeddedSplit,
    Question,
    embedded_dataset,
    random_tokens,
    shape_texts,
)
from ligermodels.training.data.embedded_stories import vocabulary_texts
from ligermodels.training.data.formats.record_formats import FieldNames, RecordFormats
from ligermodels.training.data.formats.records import BadLines, Conversation, Record, empty_answers
from ligermodels.training.data.formats.sources import (
    NO_RECORD_SUFFIXES,
    TOKEN_SUFFIXES,
    TRAIN,
    VALIDATION,
    find_files,
    named_splits,
    read_records,
    suffix_of,
)
from ligermodels.training.data.formats.specs import BUILT_IN_SOURCES, RANDOM
from ligermodels.training.data.formats.streams import ReadingProgress, print_status
from ligermodels.training.data.formats.tables import HUB_PREFIX, hub_cache_files
from ligermodels.training.data.rows.image_documents import ImageDecoder
from ligermodels.training.data.rows.packing import all_documents, default_fraction, split_documents
from ligermodels.training.data.rows.store import TokenStore, cached_folder, cached_folders, open_store, write_store
from ligermodels.training.data.rows.token_files import described_end, open_indexed, open_tokens, write_index
from ligermodels.training.data.run_tokenizer import (
    END_OF_TEXT_ID,
    NewImages,
    save_tokenizer,
    train_image_tokenizer,
    train_tokenizer,
    use_template,
)
from ligermodels.training.settings.config import TrainConfig
from ligermodels.training.settings.fields import token_range
from ligermodels.units import counted
from ligermodels.vision.multimodal import ImageParts
from ligermodels.weights.config_file import CONFIG_FILE, end_of_text_ids, read_config, read_generation_config
from ligermodels.weights.reading import read_text

MAX_IMAGE_SETTINGS_BYTES = 10**6
MOST_IMAGE_TOKENS = 1024  # of an image, unless --image-tokens says otherwise; files allow 16,384
# A new tokenizer is trained on the start of the data: so many characters for each entry, and at most so many.
CHARACTERS_PER_ENTRY, MAX_CHARACTERS = 10**4, 10**8

COUNTS = "counts.json"  # of a folder of the cache

ReadRecords: TypeAlias = Callable[[BadLines, ReadingProgress], Iterator[Record]]


@dataclass(frozen=True)
class SourceDocuments:
    """The documents or groups of a source, selections of its stores. nats, questions: as in `EmbeddedDataset`; nats is
    None if the entropy is not known."""

    training: list[Any]
    validation: list[Any]
    nats: float | None = None
    questions: Sequence[Question] = ()


def image_options(model: CausalLM, folder: Path | None) -> tuple[NewImages | None, Callable[..., Any] | None]:
    """Returns the arguments images and prepare_inputs of `open_data` for a model.

    folder: holds the model with its image processor; None for a new model.
    """
    if not model.takes_images:
        return None, None
    images = None
    if folder is None and isinstance(model, ImageParts):
        images = NewImages(model.config.image_token_id, *model.processor_settings)
    return images, cast(Any, model).prepare_training_images


class SourceReader:
    """Opens sources by name, with one tokenizer for all text: the model's, or a new one if the model has none.

    row_length: tokens of a row of random data. formats: those of records; None for supervised training's. images: those
    of a new model that reads images. skipped, chats, empty_answers: the numbers of bad lines, of conversations and of
    answers without text so far.
    used_tokenizer: the tokenizer, None until there is text. new_tokenizer: the same if it is a new one.
    """

    def __init__(
        self, names: Sequence[str], folder: Path | None, vocab_size: int, config: TrainConfig, row_length: int,
        adapter: Path | None = None, formats: RecordFormats | None = None, images: NewImages | None = None,
    ) -> None:  # fmt: skip
        self.names, self.folder, self.vocab_size, self.config = names, folder, vocab_size, config
        self.row_length, self.adapter, self.new_images = row_length, adapter, images
        self.skipped, self.chats, self.empty_answers = 0, 0, 0
        self.used_tokenizer: Tokenizer | None = None
        self.new_tokenizer: Tokenizer | None = None
        named = FieldNames(config.text_field, config.prompt_field, config.completion_field)
        if named.flags and (formats is not None or not any(map(has_fields, names))):
            flag = next(iter(named.flags.values()))
            raise InputError(f"--data {' '.join(names)}: has no fields that {flag} could name; leave it out")
        self.fields: RecordFormats = formats or named
        if config.chat_template is not None:
            self.tokenizer  # noqa: B018  read now: a template that does not fit is refused before any data are read

    def sources(self, separate: Sequence[str]) -> tuple[list[SourceDocuments], list[SourceDocuments]]:
        """Returns the sources to train on, and those to validate with: the `separate` ones, or the same without any."""
        sources = [self.documents(name, split=not separate) for name in self.names]
        return sources, [self.validation_documents(name) for name in separate] or sources

    def validation_documents(self, name: str) -> SourceDocuments:
        """Returns all documents of a source for validation. Its InputError names --validation-data as the flag."""
        try:
            return self.documents(name, split=False)
        except InputError as error:
            raise InputError(str(error).replace(f"--data {name}:", f"--validation-data {name}:", 1)) from error

    def documents(self, name: str, *, split: bool) -> SourceDocuments:
        """Returns the documents of a source.

        split: whether to hold out a part for validation; otherwise both sides have all documents.
        Embedded and random data always have their own validation documents.
        """
        if name in EMBEDDED:
            dataset = embedded_dataset(name)
            training, validation = (
                all_documents(self.embedded_store(part)) for part in (dataset.training, dataset.validation)
            )
            return SourceDocuments([training], [validation], dataset.nats, dataset.questions)
        if name == RANDOM:
            training, validation, nats = random_tokens(self.vocab_size, self.row_length)
            return SourceDocuments([training], [validation], nats)
        if name in EMBEDDED_GROUPS:
            raise InputError(f"--data {name}: is for post-training; supervised training takes {' or '.join(EMBEDDED)}")
        return self.documents_of_files(name, split, all_documents, split_documents)

    def documents_of_files(
        self, name: str, split: bool, whole: Callable[[Any], Any], divide: Callable[[Any, float], tuple[Any, Any]]
    ) -> SourceDocuments:
        """Returns what `documents` does for files. whole: selects all of a store. divide: two parts, by a fraction."""
        stores = self.stores(name)
        everything = [whole(store) for store in stores]
        separate = self.validation_split(name) if split else None
        if separate is not None:
            return SourceDocuments(everything, [whole(store) for store in self.stores(separate)])
        if not split or not stores:
            return SourceDocuments(everything, everything)
        fraction = self.config.validation_fraction or default_fraction(sum(part.tokens for part in everything))
        parts = [divide(store, fraction) for store in stores]
        return SourceDocuments([training for training, _ in parts], [held_out for _, held_out in parts])

    def validation_split(self, name: str) -> str | None:
        """Returns the source that validates a folder whose files are named after splits, unless a setting says more."""
        given = self.config.validation_data is not None or self.config.validation_fraction is not None
        return f"{name}:{VALIDATION}" if VALIDATION in named_splits(name) and not given else None

    def notes_on_splits(self) -> list[tuple[int, str, str]]:
        """Returns what `describe_sources` says about files whose names tell that they are not for training."""
        validation = unused = 0
        for name in self.names:
            splits, used = named_splits(name), [TRAIN]
            if self.validation_split(name) is not None:
                validation += len(splits[VALIDATION])
                used.append(VALIDATION)
            unused += sum(len(files) for split, files in splits.items() if split not in used)
        return [
            (validation, "file", "named for validation, and used so"),
            (unused, "file", "not named for training left out"),
        ]

    def stores(self, name: str) -> list[Any]:
        """Returns the token stores of files."""
        files = input_files(name)
        if files and all(suffix_of(file) in TOKEN_SUFFIXES for file in files):
            return self.token_file_stores(files)
        key = self.cache_key(files, hub=hub_names([name]), fields=self.fields)
        read = functools.partial(read_records, name, fields=self.fields)
        return [self.tokenized_store(name, read, key, total_bytes(files))]

    def embedded_store(self, part: EmbeddedSplit) -> TokenStore:
        key = self.cache_key([], embedded=part)
        return self.tokenized_store(f"the {part.kind}", lambda *_: part.records(), key, None)

    def tokenized_store(self, title: str, read: ReadRecords, key: dict[str, Any], size: int | None) -> TokenStore:
        """Returns the store of tokenised records.

        key: what the records depend on. size: bytes to read, for the progress.
        """
        folder, counts = self.tokenized_folder(title, read, key, size)
        self.chats += counts["chats"]
        self.empty_answers += counts["empty_answers"]
        return open_store(folder)

    def tokenized_folder(
        self, title: str, read: ReadRecords, key: dict[str, Any], size: int | None
    ) -> tuple[Path, dict[str, Any]]:
        """Returns the folder of the user's cache that `write` makes of records, and its counts; arguments as above."""

        def fill(folder: Path) -> None:
            bad_lines = BadLines(self.config.allow_bad_lines)
            with ReadingProgress(f"Tokenising {title}", size) as progress:
                counts = self.write(read(bad_lines, progress), bad_lines, progress, folder)
            (folder / COUNTS).write_text(json.dumps({"skipped": bad_lines.skipped, **counts}))

        tokenizer, end = self.tokenizer
        key = key | {"tokenizer": tokenizer_hash(tokenizer), "end": end, "images": self.image_settings}
        folder = cached_folder(key, fill)
        counts = json.loads((folder / COUNTS).read_text())
        self.skipped += counts["skipped"]
        return folder, counts

    def write(
        self, records: Iterable[Record], bad_lines: BadLines, progress: ReadingProgress, folder: Path
    ) -> Mapping[str, Any]:
        """Tokenises records, and writes their store to an empty folder; returns what was counted."""
        counts = Counter(chats=0, empty_answers=0)
        documents = tokenize_records(
            counted_records(records, counts), *self.tokenizer, bad_lines, lambda: self.processor, self.image_tokens
        )
        write_store(progress.track(documents), self.vocab_size, folder)
        return counts

    def token_file_stores(self, files: Sequence[Path]) -> list[TokenStore]:
        arrays, ends = [open_tokens(file) for file in files], [self.end_of_text(file) for file in files]
        # A model without a tokenizer may read token files: then nobody knows which tokens these are.
        images = {} if self.folder is None else self.image_tokens
        requests = [
            (
                self.cache_key([file], end=end, images=[*images.items()]),
                functools.partial(write_index, tokens, end, self.vocab_size, images, str(file)),
            )
            for file, tokens, end in zip(files, arrays, ends, strict=True)
        ]
        indexed = zip(arrays, files, cached_folders(requests), strict=True)
        return [open_indexed(tokens, str(file), folder) for tokens, file, folder in indexed]

    def end_of_text(self, file: Path) -> int:
        """Returns the end-of-text token of a token file: the one given beside it, otherwise the tokenizer's."""
        end = described_end(file)
        if end is None and self.folder is None:
            raise InputError(f"{file.with_suffix('.json')}: must give end_of_text, because the model has no tokenizer")
        if end is not None and end >= self.vocab_size:
            raise InputError(
                f"{file.with_suffix('.json')}: field end_of_text is {end}, outside the model's vocabulary of "
                f"{self.vocab_size}: no document would end"
            )
        return self.tokenizer[1] if end is None else end

    def cache_key(self, files: Sequence[Path], **others: Any) -> dict[str, Any]:
        """Describes everything that the content of a cached folder depends on."""
        return {"files": [file_version(file) for file in files], "vocab_size": self.vocab_size} | others

    @functools.cached_property
    def tokenizer(self) -> tuple[Tokenizer, int]:
        """The tokenizer, with the chat template of the run, and the end-of-text token."""
        names = [name for name in self.names if name not in BUILT_IN_SOURCES]
        has_one = any(folder is not None and has_tokenizer(folder) for folder in (self.folder, self.adapter))
        if self.folder and (names or has_one):
            tokenizer, end = read_tokenizer_and_end(self.folder, self.adapter)
        else:
            tokenizer, end = self.trained_tokenizer(names), END_OF_TEXT_ID
            self.new_tokenizer = tokenizer
        if self.config.chat_template is not None:
            use_template(tokenizer, self.config.chat_template, "the new tokenizer" if self.new_tokenizer else None)
        self.used_tokenizer = tokenizer
        return tokenizer, end

    @functools.cached_property
    def processor(self) -> Processor:
        """The model's image processor with the tokenizer of the run. Raises InputError for a model without one."""
        tokenizer, _ = self.tokenizer
        folder = self.folder if self.new_tokenizer is None else tokenizer.file.parent
        if folder is None or not self.image_settings:
            raise InputError("has images, but the model has no image processor, so that it reads no images")
        processor = Processor.from_folder(folder, tokenizer)
        processor.images = limited_images(processor.images, self.config.image_tokens)
        return processor

    @property
    def image_settings(self) -> list[str]:
        """What decides about images: the content of the processor's files, and limits; empty for a model without it."""
        limit = str(self.config.image_tokens)
        if self.new_images is not None:
            return [repr(self.new_images), limit]
        files = [] if self.folder is None else [self.folder / name for name in (IMAGE_PROCESSOR_FILE, PROCESSOR_FILE)]
        found = [read_text(file, MAX_IMAGE_SETTINGS_BYTES) for file in files if file.exists()]
        return [*found, limit] if found else []

    @functools.cached_property
    def image_tokens(self) -> Mapping[int, str]:
        """The tokens that stand for images, by id; none of a model whose image processor is missing or unusable."""
        return image_tokens(lambda: self.processor) if self.image_settings else {}

    def image_decoder(
        self, stores: Sequence[TokenStore], prepare_inputs: Callable[..., Any] | None
    ) -> ImageDecoder | None:
        """Returns what decodes the images of stores; None if they have none. prepare_inputs: as in `ImageDecoder`."""
        has_images = any(store.images is not None for store in stores)
        return ImageDecoder(self.processor, prepare_inputs) if has_images else None

    def trained_tokenizer(self, names: Sequence[str]) -> Tokenizer:
        """Returns a tokenizer trained on these sources.

        Without any, as all data is embedded, it is trained on the embedded corpus.
        """
        files = [file for name in names for file in input_files(name)]
        token_file = next((file for file in files if suffix_of(file) in TOKEN_SUFFIXES), None)
        if token_file:
            raise InputError(f"--data {token_file}: token files beside text need a model that has a tokenizer")
        size = self.vocab_size if names else min(self.vocab_size, EMBEDDED_VOCABULARY)

        def fill(folder: Path) -> None:
            total = min(self.tokenizer_characters, total_bytes(files)) if names else None
            with ReadingProgress("Training a tokenizer", total) as progress:
                texts = self.tokenizer_texts(names, progress) if names else self.embedded_texts()
                self.save_new_tokenizer(progress.track(texts), size, folder)

        key = self.cache_key(files, hub=hub_names(names), fields=self.fields, new=repr(self.new_images))
        return Tokenizer.from_folder(cached_folder(key, fill))

    def embedded_texts(self) -> Iterator[str]:
        """Returns what a tokenizer for embedded data is trained on."""
        return vocabulary_texts() if self.new_images is None else itertools.chain(vocabulary_texts(), shape_texts())

    def save_new_tokenizer(self, texts: Iterable[str], size: int, folder: Path) -> None:
        if self.new_images is None:
            save_tokenizer(train_tokenizer(texts, size), folder)
            return
        save_tokenizer(train_image_tokenizer(texts, size, self.new_images), folder)
        self.new_images.write(folder)

    @property
    def tokenizer_characters(self) -> int:
        """The number of characters that a new tokenizer is trained on."""
        return min(MAX_CHARACTERS, CHARACTERS_PER_ENTRY * self.vocab_size)

    def tokenizer_texts(self, names: Sequence[str], progress: ReadingProgress) -> Iterator[str]:
        left = self.tokenizer_characters
        bad_lines = BadLines(self.config.allow_bad_lines)
        sources = (read_records(name, bad_lines, progress, self.fields) for name in names)
        for record in itertools.chain.from_iterable(sources):
            for text in record.texts:
                yield text
                left -= len(text)
            if left <= 0:
                return

    def refuse_too_many_bad_lines(self) -> None:
        """Raises InputError if all sources together have too many bad lines; each source checks only its own."""
        if self.skipped > self.config.allow_bad_lines:
            raise InputError(
                f"--data: {counted(self.skipped, 'bad line')}, but --allow-bad-lines {self.config.allow_bad_lines}"
            )

    def warn_of_unused_template(self) -> None:
        """Prints a warning if all sources together have no conversation that --chat-template could render."""
        if self.config.chat_template is not None and not self.chats:
            print_status(
                f"warning: --chat-template {self.config.chat_template}: no record of --data is a chat; the template is "
                "exported, but the model does not learn it"
            )


def counted_records(records: Iterable[Record], counts: Counter[str]) -> Iterator[Record]:
    """Yields the records, and counts their chats and empty answers while they are read."""
    for record in records:
        counts["chats"] += isinstance(record, Conversation)
        counts["empty_answers"] += empty_answers(record)
        yield record


def input_files(name: str) -> list[Path]:
    return hub_cache_files(name) if name.startswith(HUB_PREFIX) else find_files(name)


def has_fields(name: str) -> bool:
    """Returns whether a source has records with named fields: text files and token files have none."""
    if name.startswith(HUB_PREFIX):
        return True
    files = [] if name in BUILT_IN_SOURCES else find_files(name)
    return any(suffix_of(file) not in NO_RECORD_SUFFIXES for file in files)


def read_tokenizer_and_end(folder: Path, adapter: Path | None = None) -> tuple[Tokenizer, int]:
    """Returns the tokenizer of a model folder, and its end-of-text token.

    The token is the first eos_token_id of config.json, otherwise of generation_config.json. An adapter's folder with a
    tokenizer comes first. Raises InputError if none gives one.
    """
    own = adapter if adapter is not None and has_tokenizer(adapter) else None
    configs = [read_config(folder), read_generation_config(folder)]
    if own is not None:
        configs.insert(0, read_generation_config(own))
    ends = [token for config in configs for token in end_of_text_ids(config, folder)]
    if not ends:
        raise InputError(f"{folder / CONFIG_FILE}: eos_token_id is missing; it must be the end-of-text token")
    return Tokenizer.from_folder(own or folder), ends[0]


def hub_names(names: Sequence[str]) -> list[str]:
    """Returns the names of Hub datasets, for cache keys: the files of a dataset do not show which split is read."""
    return [name for name in names if name.startswith(HUB_PREFIX)]


def total_bytes(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def file_version(file: Path) -> list[Any]:
    """Returns the path, size and modification time of a file."""
    status = file.stat()
    return [str(file.resolve()), status.st_size, status.st_mtime_ns]


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    templates = sorted((name, template.source) for name, template in tokenizer.templates.items())
    content = repr((tokenizer.tokenizer.to_str(), sorted(tokenizer.named.items()), templates))
    return hashlib.sha256(content.encode()).hexdigest()


def limited_images(images: ImageProcessor, image_tokens: str | None) -> ImageProcessor:
    """Returns the image processor with the limits of --image-tokens.

    image_tokens: None for the files' limits, and at most MOST_IMAGE_TOKENS. Raises InputError if images have no free
    size, or --image-tokens is no such limit.
    """
    if image_tokens is None:
        found = images.token_range
        if found is None or found[1] <= MOST_IMAGE_TOKENS:
            return images
        return images.with_token_range(min(found[0], MOST_IMAGE_TOKENS), MOST_IMAGE_TOKENS)
    limits = token_range(image_tokens)
    assert limits is not None  # checked with the other settings
    with at_place(f"--image-tokens {image_tokens}:"):
        if limits[1] > MAX_FEATURES:
            raise InputError(f"an image has at most {MAX_FEATURES:,} tokens; lower it")
        return images.with_token_range(*limits)
