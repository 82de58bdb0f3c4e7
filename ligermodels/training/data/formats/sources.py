"""Sources: what --data names (files, folders, glob patterns, data sets), read as records.

A text file is one document; every kind of line ending is read as \\n. No file is
read into memory as a whole: a long text file is split into pieces, JSON is read by lines or array elements, CSV by
rows, and tables are read in batches. A path of an image in a record is relative to the file of the record, and stays
within its folder.
"""

import functools
import glob
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from ligermodels.errors import InputError, first_line
from ligermodels.images.reading import ImageSource
from ligermodels.tokenizer.tokenizer import is_long, refuse_long
from ligermodels.training.data.formats.record_formats import KNOWN_FIELDS, Reading, RecordFormats
from ligermodels.training.data.formats.records import (
    BadLines,
    Completion,
    Conversation,
    GroupRecord,
    Record,
    TeacherRecord,
    Text,
)
from ligermodels.training.data.formats.specs import BUILT_IN_SOURCES
from ligermodels.training.data.formats.streams import DECOMPRESSORS, ReadingProgress
from ligermodels.training.data.formats.tables import HUB_PREFIX, SAVE_AGAIN, read_arrow, read_hub_dataset, read_parquet
from ligermodels.training.data.formats.text_files import read_csv, read_json_file, read_text_file, text_pieces
from ligermodels.weights.reading import read_json, safe_file

TOKEN_SUFFIXES = (".bin", ".npy")
SPLITS_FILE, STATE_FILE, INFO_FILE = "dataset_dict.json", "state.json", "dataset_info.json"
TRAIN, VALIDATION = "train", "validation"
# The words by which files and folders are named after splits, as in the layouts that `datasets` reads.
SPLIT_WORDS = {
    TRAIN: ("train", "training"), VALIDATION: ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation", "holdout", "heldout"),
}  # fmt: skip
SPLIT_OF_WORD = {word: split for split, words in SPLIT_WORDS.items() for word in words}
ANY_SPLIT_WORD = "|".join(SPLIT_OF_WORD)
SPLIT_NAME = re.compile(rf"({ANY_SPLIT_WORD})(?:[-_.0-9].*)?|.*[-_.=]({ANY_SPLIT_WORD})", re.DOTALL)


def find_files(name: str) -> list[Path]:
    """Returns the files that a name stands for, in sorted order.

    name: a file; a folder, whose files with a known suffix are found recursively; a folder of save_to_disk; or a glob
    pattern. After a folder may be :SPLIT, by default train. A .json file that describes a token file beside it is
    skipped. Raises InputError if no file is found, and for a named or matched file with an unknown suffix.
    """
    saved = saved_dataset_files(name)
    if saved is not None:
        return saved
    path, split = split_of_folder(name)
    if path.is_dir():
        files = folder_splits(path).get(split, [])
    else:
        files = [path] if path.is_file() else data_files(Path(match) for match in glob.glob(name, recursive=True))
    if not files:
        problem = "this folder has no data file" if path.is_dir() else "no file, folder or glob pattern matches"
        others = f"{', '.join(BUILT_IN_SOURCES)} or {HUB_PREFIX}NAME"
        raise InputError(f"--data {name}: {problem}; data files are {FILE_KINDS}; or give {others}")
    for file in files:
        if not suffix_of(file):
            raise InputError(f"{file}: not a data file; must be {FILE_KINDS}")
    return files


def split_of_folder(name: str) -> tuple[Path, str]:
    """Returns the path and the split of FOLDER or FOLDER:SPLIT; of any other name the path alone."""
    folder, _, split = name.rpartition(":")
    if split in SPLIT_WORDS and Path(folder).is_dir() and not Path(name).exists():
        return Path(folder), split
    return Path(name), TRAIN


def folder_splits(folder: Path) -> dict[str, list[Path]]:
    """Returns the data files of a folder by the split that their names tell, in sorted order.

    Where files are named for validation or a test, those named for training are the train split, else those without
    such a name. Otherwise all files are the train split.
    """
    found = (file for file in folder.rglob("*") if suffix_of(file))
    files = data_files(f for f in found if not any(part.startswith(".") for part in f.relative_to(folder).parts))
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(named_split(file.relative_to(folder)), []).append(file)
    training = splits.get(TRAIN) or splits.pop("", None)
    if not training or not splits.keys() - {TRAIN, ""}:
        return {TRAIN: files}
    return splits | {TRAIN: training}


def data_files(found: Iterable[Path]) -> list[Path]:
    return sorted(file for file in found if file.is_file() and not describes_tokens(file))


def named_split(file: Path) -> str:
    """Returns the split after which a file, or else a folder above it, is named; empty without one."""
    stem = file.name[: len(file.name) - len(suffix_of(file))]
    for part in (stem, *reversed(file.parts[:-1])):
        match = SPLIT_NAME.fullmatch(part.lower())
        if match:
            return SPLIT_OF_WORD[match[1] or match[2]]
    return ""


def named_splits(name: str) -> dict[str, list[Path]]:
    """Returns what `folder_splits` does for the name of a folder of data files, and nothing for any other name."""
    folder = Path(name)
    is_plain = name not in BUILT_IN_SOURCES and folder.is_dir() and not is_saved_dataset(folder)
    return folder_splits(folder) if is_plain else {}


def saved_dataset_files(name: str) -> list[Path] | None:
    """Returns the Arrow files of FOLDER or FOLDER:SPLIT in order; None if there is no such folder of save_to_disk.

    The default split is train. Raises InputError naming the folder or its file.
    """
    folder, split = Path(name), ""
    if not is_saved_dataset(folder):
        before, _, split = name.rpartition(":")
        folder = Path(before)
        if not before or not is_saved_dataset(folder):
            return None
    if not (folder / SPLITS_FILE).is_file():
        if split:
            raise InputError(f"--data {name}: {folder} is a data set without splits; leave out :{split}")
        return arrow_files(folder)
    splits = read_json(folder / SPLITS_FILE).get("splits")
    if not isinstance(splits, list) or (split or TRAIN) not in splits:
        listed = ", ".join(map(str, splits)) if isinstance(splits, list) else "none"
        remedy = f"give one as {folder}:SPLIT"
        raise InputError(f"--data {name}: has no split {split or TRAIN}; its splits are {listed}; {remedy}")
    return arrow_files(folder / (split or TRAIN))


def is_saved_dataset(folder: Path) -> bool:
    return (folder / SPLITS_FILE).is_file() or all((folder / name).is_file() for name in (STATE_FILE, INFO_FILE))


def arrow_files(folder: Path) -> list[Path]:
    """Returns the files that state.json names: `datasets` leaves files of its cache in the same folder."""
    state = read_json(folder / STATE_FILE)
    if state.get("_indices_data_files"):
        raise InputError(f"{folder / STATE_FILE}: an old version of datasets wrote indices of rows; {SAVE_AGAIN}")
    files = state.get("_data_files")
    given = [file.get("filename") for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    names = [name for name in given if isinstance(name, str) and name.endswith(".arrow")]
    if not names or len(names) < len(given):
        raise InputError(f"{folder / STATE_FILE}: field _data_files must name .arrow files; {SAVE_AGAIN}")
    return [safe_file(folder, name) for name in names]


def suffix_of(file: Path) -> str:
    """Returns the known suffix of a file, in lower case; empty if the file is of no known kind."""
    return next((suffix for suffix in SUFFIXES if file.name.lower().endswith(suffix)), "")


def describes_tokens(file: Path) -> bool:
    """Returns whether this is the .json file that belongs to a token file."""
    return file.suffix == ".json" and any(file.with_suffix(suffix).exists() for suffix in TOKEN_SUFFIXES)


def read_records(
    name: str, bad_lines: BadLines, progress: ReadingProgress, fields: RecordFormats = KNOWN_FIELDS
) -> Iterator[Record]:
    """Yields the records of a file, folder[:split], glob pattern, or hub:name[:configuration][:split].

    Empty texts are dropped. fields: those that the user names. bad_lines: counts records that cannot be used. Raises
    InputError naming the place and the field, and if the source has no record at all.
    """
    reading = Reading(fields, bad_lines, progress)
    if name.startswith(HUB_PREFIX):
        records = bad_lines.usable(checked_record, ((record, None) for record in read_hub_dataset(name, reading)))
    else:
        records = read_files(find_files(name), reading)
    empty = True
    for record in records:
        if isinstance(record, (Conversation, GroupRecord)) or any(record.texts):
            empty = False
            yield from split_long_text(record) if isinstance(record, Text) else [record]
    if empty:
        skipped = f"; bad lines skipped: {bad_lines.skipped}" if bad_lines.skipped else ""
        raise InputError(f"--data {name}: contains no text and no conversation{skipped}")


def split_long_text(text: Text) -> Iterator[Text]:
    """Yields the text itself, or its pieces if it is too long to be tokenised at once."""
    if is_long(text.text):
        yield from (piece._replace(place=text.place) for piece in text_pieces(io.StringIO(text.text)))
    else:
        yield text


def read_files(files: Sequence[Path], reading: Reading) -> Iterator[Record]:
    for file in files:
        if suffix_of(file) in TOKEN_SUFFIXES:
            raise InputError(f"{file}: contains token ids, but text is expected; do not mix the two in one source")
        calls = ((record, file.parent) for record in READERS[suffix_of(file)](file, reading))
        yield from reading.bad_lines.usable(checked_record, calls)
        reading.progress.finish(file.stat().st_size)


Reader: TypeAlias = Callable[[Path, Reading], Iterator[Record]]
STREAMED: dict[str, Reader] = {
    ".txt": read_text_file, ".jsonl": read_json_file, ".json": read_json_file, ".csv": read_csv,
    ".tsv": functools.partial(read_csv, delimiters=("\t",)),
}  # fmt: skip
COMPRESSED = {f"{kind}{suffix}": reader for kind, reader in STREAMED.items() for suffix in DECOMPRESSORS}
TABLES: dict[str, Reader] = {".parquet": read_parquet, ".arrow": read_arrow}
READERS = STREAMED | COMPRESSED | TABLES
NO_RECORD_SUFFIXES = (*TOKEN_SUFFIXES, *(suffix for suffix, reader in READERS.items() if reader is read_text_file))
SUFFIXES = (*READERS, *TOKEN_SUFFIXES)
FILE_KINDS = (
    f"{', '.join(STREAMED)} (also with {' or '.join(DECOMPRESSORS)}), "
    f"{', '.join(TABLES)}, {' or '.join(TOKEN_SUFFIXES)}"
)


def checked_record(record: Record, folder: Path | None) -> Record:
    """Returns the record as `with_image_paths` does.

    Raises InputError also for one that is too long to be tokenised at once, unless it is a text, which can be split.
    """
    if not isinstance(record, Text):
        refuse_long("".join(record.texts), (record.record if isinstance(record, TeacherRecord) else record).place)
    return with_image_paths(record, folder)


def with_image_paths(record: Record, folder: Path | None) -> Record:
    """Returns the record with the whole paths of its images. folder: of its file; None if it comes from no file.

    Raises InputError for a path that leaves the folder: a data set must not choose among all files of this machine.
    """
    if not isinstance(record, Conversation | Completion | GroupRecord) or not record.images:
        return record
    if isinstance(record, GroupRecord):
        return record._replace(images=tuple(whole_paths(images, folder, record.place) for images in record.images))
    return record._replace(images=whole_paths(record.images, folder, record.place))


def whole_paths(images: Sequence[ImageSource], folder: Path | None, place: str) -> list[ImageSource]:
    return [whole_path(image, folder, place) for image in images]


def whole_path(image: ImageSource, folder: Path | None, place: str) -> ImageSource:
    if not isinstance(image, str):
        return image
    if folder is None:
        raise InputError(f"{place}: the image {image} is a path; a data set of the Hub must contain its images")
    try:
        path = (folder / image).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a character that no path can have
        fault = first_line(error)
        raise InputError(f"{place}: the image {image!r} cannot be found: {fault}; correct its path") from None
    if not path.is_relative_to(folder.resolve()):
        raise InputError(f"{place}: the image {image} is outside the folder {folder}; put it beside the data")
    return str(path)
