"""Groups, which are a prompt with its completions as token ids, their options, and their store on disk.

A group is a run of documents in a token store: the prompt, then the completions. Files beside the token store have what
else belongs to a group. The store is written in a stream, and memory-mapped by all ranks.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ligermodels.errors import InputError
from ligermodels.training.data.preferences.formats import GroupKind
from ligermodels.training.data.rows.store import Document, DocumentImage, TokenStore, map_file, open_store, write_store

# Arrays of U groups, each in a file of that name: the first document of each, its value (NaN for none), where its
# columns begin among the bytes of `columns`, and where its rows begin in `teacher_ids` and `teacher_logprobs`.
GROUP_ARRAYS = {"firsts": np.int64, "values": np.float32, "column_offsets": np.int64, "teacher_offsets": np.int64}
TEACHER_ARRAYS = {"teacher_ids": np.int32, "teacher_logprobs": np.float32}
COLUMNS, DESCRIPTION = "columns", "groups.json"


class Teacher(NamedTuple):
    """What a teacher said about the M supervised tokens of a completion: ids int64 [M, k], logprobs fp32 [M, k]."""

    ids: np.ndarray
    logprobs: np.ndarray


class GroupImage(NamedTuple):
    """An image of a store, by its number there. Its tokens are ids[start:stop] of a prompt or of a completion."""

    store: TokenStore
    number: int
    start: int
    stop: int


class Group(NamedTuple):
    """A prompt with its G completions, as token ids.

    prompt: integers [P], at least one; the last of them predicts each completion's first token. completions: integers
    [n] each, the end token among them. supervised: bool [n] for each completion, whether the loss reads the token; None
    for all. teacher: for each completion, or none. images: of the prompt, then of each completion, in the order of
    their tokens; empty where the group has none.
    """

    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    supervised: tuple[np.ndarray | None, ...]
    teacher: tuple[Teacher, ...] | None = None
    images: tuple[tuple[GroupImage, ...], ...] = ()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each completion."""
        return [len(completion) for completion in self.completions]

    def select(self, first: int, last: int) -> "Group":
        """Returns the prompt with the completions from `first` up to `last`."""
        part = slice(first, last)
        teacher = None if self.teacher is None else self.teacher[part]
        images = self.images and (self.images[0], *self.images[1 + first : 1 + last])
        return Group(self.prompt, self.completions[part], self.supervised[part], teacher, images)

    def images_of(self, part: int) -> tuple[GroupImage, ...]:
        """Returns the images of the prompt, which is part 0, or of completion number part - 1."""
        return self.images[part] if self.images else ()


class GroupPrompt(NamedTuple):
    """A prompt to sample completions for.

    ids: int64 [P], with the generation prompt of chats. text: as it was read, a string or a list of messages. columns:
    all other fields of the record, for reward functions. Both are empty for groups of another kind than "prompts".
    unit: its number in the step. number: in the data.
    """

    ids: np.ndarray
    text: str | list[dict[str, Any]]
    columns: dict[str, Any]
    unit: int
    number: int
    place: str


class TokenGroup(NamedTuple):
    """A tokenised group. `Group`, `GroupRecord` (value, columns) and `GroupPrompt` (text) say what the fields are.

    images: those of the prompt, then of each completion, with places in these; empty where there are none.
    """

    prompt: list[int]
    completions: list[list[int]]
    supervised: list[list[bool]]
    place: str
    value: float | None = None
    text: Any = None
    columns: dict[str, Any] | None = None
    teacher_ids: list[list[int]] | None = None
    teacher_logprobs: list[list[float]] | None = None
    images: tuple[Sequence[DocumentImage], ...] = ()


def unshared(groups: Sequence[Group]) -> int:
    """Returns the number of tokens of the groups where every completion has its own copy of the prompt."""
    return sum(len(group.prompt) + size for group in groups for size in group.lengths)


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """How groups are read and packed.

    kind: "pairs" (chosen, rejected), "judged" (one completion each, good or bad), "prompts" (no completion), or
    "distillation" (records of supervised training, with a teacher's log-probabilities or without).
    max_length: the most tokens of a prompt with one completion; of kind "prompts", of the prompt. max_prompt_length:
    a longer prompt loses its beginning, but neither its system message nor the token that begins a text; None for no
    limit. too_long: what becomes of a longer group: "drop", or "cut" its completions, which then have no end token.
    row_length: tokens of a packed row at most, unless one unit alone has more; None for twice max_length.
    share_prompts: the completions of a group share one copy of its prompt. needs_prompts: refuse texts without a
    prompt, of which nothing can be sampled.
    Raises InputError for a value that an option cannot have.
    """

    kind: GroupKind = "pairs"
    max_length: int = 1024
    max_prompt_length: int | None = None
    too_long: Literal["drop", "cut"] = "drop"
    row_length: int | None = None
    share_prompts: bool = True
    needs_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("max_length", "max_prompt_length", "row_length"):
            value = getattr(self, name)
            if value is not None and value < 2:
                raise InputError(f"--{name.replace('_', '-')} {value}: must be a whole number above 1")
        if self.max_prompt_length is not None and self.max_prompt_length >= self.max_length:
            raise InputError(
                f"--max-prompt-length {self.max_prompt_length}: leaves no room for a completion; must be below "
                f"--max-length {self.max_length}"
            )
        if self.too_long not in ("drop", "cut"):
            raise InputError(f"--too-long {self.too_long}: must be drop or cut")

    @property
    def tokens_per_row(self) -> int:
        return self.row_length or 2 * self.max_length


@dataclass(frozen=True)
class GroupStore:
    """U groups. firsts, column_offsets, teacher_offsets [U + 1], values [U]: as above. teacher_ids, teacher_logprobs:
    [M, k], or None where there is no teacher. digest: of everything that is not in `tokens`."""

    tokens: TokenStore
    firsts: np.ndarray
    values: np.ndarray
    column_offsets: np.ndarray
    columns: np.ndarray
    teacher_offsets: np.ndarray
    teacher_ids: np.ndarray | None
    teacher_logprobs: np.ndarray | None
    digest: str

    def __len__(self) -> int:
        return len(self.values)

    @property
    def prompt_hashes(self) -> np.ndarray:
        """uint64 [U], of the tokens of each prompt; with a teacher, of prompt and completion: the prompt of a text is
        the token that begins it."""
        prompts = self.tokens.hashes[self.firsts[:-1]]
        return prompts if self.teacher_ids is None else prompts ^ self.tokens.hashes[self.firsts[1:] - 1]

    def group(self, number: int) -> Group:
        documents = range(self.firsts[number], self.firsts[number + 1])
        prompt, *completions = (self.document(document) for document in documents)
        masks = tuple(self.mask(document) for document in documents[1:])
        images = tuple(self.images(document) for document in documents)
        return Group(prompt, tuple(completions), masks, self.teacher(number), images if any(images) else ())

    def document(self, document: int) -> np.ndarray:
        return self.tokens.tokens[self.tokens.offsets[document] : self.tokens.offsets[document + 1]]

    def images(self, document: int) -> tuple[GroupImage, ...]:
        """Returns the images of a document, with their places in it."""
        images, (begin, end) = self.tokens.images, self.tokens.offsets[document : document + 2].tolist()
        if images is None:
            return ()
        starts, stops = images.starts, images.stops
        return tuple(
            GroupImage(self.tokens, number, int(starts[number]) - begin, int(stops[number]) - begin)
            for number in images.between(begin, end)
        )

    def mask(self, document: int) -> np.ndarray | None:
        if self.tokens.supervised is None:
            return None
        return self.tokens.supervised[self.tokens.offsets[document] : self.tokens.offsets[document + 1]]

    def teacher(self, number: int) -> tuple[Teacher, ...] | None:
        if self.teacher_ids is None or self.teacher_logprobs is None:
            return None
        rows = slice(self.teacher_offsets[number], self.teacher_offsets[number + 1])
        return (Teacher(self.teacher_ids[rows].astype(np.int64), self.teacher_logprobs[rows]),)

    def content(self, number: int) -> dict[str, Any]:
        """Returns the text and the columns of a prompt, as {prompt, columns}."""
        written = bytes(self.columns[self.column_offsets[number] : self.column_offsets[number + 1]])
        return json.loads(written) if written else {"prompt": "", "columns": {}}

    def prompt(self, number: int, unit: int) -> GroupPrompt:
        """Returns the prompt of a group. unit: the number that the prompt gets in its step."""
        content = self.content(number)
        ids = np.array(self.document(int(self.firsts[number])), np.int64)
        return GroupPrompt(ids, content["prompt"], content["columns"], unit, number, self.place(number))

    def place(self, number: int) -> str:
        """Returns where the group was read."""
        return self.tokens.place(int(self.tokens.offsets[self.firsts[number]]))


def write_groups(groups: Iterable[TokenGroup], vocab_size: int, folder: Path) -> None:
    """Writes groups to an empty folder, for `open_groups`.

    Raises InputError for an id outside the vocabulary, and for teachers of different widths, naming the place.
    """
    with ExitStack() as stack:
        names = (*GROUP_ARRAYS, *TEACHER_ARRAYS, COLUMNS)
        files = {name: stack.enter_context((folder / name).open("wb")) for name in names}
        writer = GroupWriter(files, vocab_size)
        write_store(writer.documents(groups), vocab_size, folder)
    digest = "".join(file_hash(folder / name) for name in names)
    (folder / DESCRIPTION).write_text(json.dumps({"teacher_width": writer.width, "digest": digest}))


def file_hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def open_groups(folder: Path) -> GroupStore:
    """Returns the store that `write_groups` wrote to a folder, memory-mapped."""
    description = json.loads((folder / DESCRIPTION).read_text())
    arrays = {name: map_file(folder / name, dtype) for name, dtype in GROUP_ARRAYS.items()}
    width = description["teacher_width"]
    teacher: dict[str, Any] = {
        name: map_file(folder / name, dtype).reshape(-1, width) if width else None
        for name, dtype in TEACHER_ARRAYS.items()
    }
    columns = map_file(folder / COLUMNS, np.uint8)
    return GroupStore(open_store(folder), **arrays, **teacher, columns=columns, digest=description["digest"])


class GroupWriter:
    """Appends what belongs to groups to files, while their documents are read.

    width: k of the teacher; 0 without one, None before the first group.
    """

    def __init__(self, files: dict[str, Any], vocab_size: int) -> None:
        self.files, self.vocab_size = files, vocab_size
        self.width: int | None = None
        self.documents_written = self.bytes_written = self.rows_written = 0
        self.append_offsets()

    def append(self, name: str, values: Any) -> None:
        dtype = (GROUP_ARRAYS | TEACHER_ARRAYS)[name]
        self.files[name].write(np.asarray(values, dtype).tobytes())

    def append_offsets(self) -> None:
        self.append("firsts", self.documents_written)
        self.append("column_offsets", self.bytes_written)
        self.append("teacher_offsets", self.rows_written)

    def documents(self, groups: Iterable[TokenGroup]) -> Iterator[Document]:
        for group in groups:
            self.write(group)
            of_prompt, *of_completions = group.images or ((),) * (1 + len(group.completions))
            yield Document(group.prompt, None, group.place, of_prompt)
            for ids, mask, images in zip(group.completions, group.supervised, of_completions, strict=True):
                yield Document(ids, None if all(mask) else mask, group.place, images)

    def write(self, group: TokenGroup) -> None:
        width = len(group.teacher_ids[0]) if group.teacher_ids else 0
        if self.width not in (None, width):
            raise InputError(
                f"{group.place}: field teacher_ids has {width} ids a token, records before it have {self.width}; give "
                "all the same number"
            )
        self.width = width
        if group.teacher_ids is not None:
            ids = np.array(group.teacher_ids)
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                raise InputError(
                    f"{group.place}: field teacher_ids has an id outside the model's vocabulary of {self.vocab_size}; "
                    "teacher and student must have the same tokenizer"
                )
            self.append("teacher_ids", ids)
            self.append("teacher_logprobs", group.teacher_logprobs)
            self.rows_written += len(ids)
        if group.columns is not None:
            content = encode_columns(group)
            self.files[COLUMNS].write(content)
            self.bytes_written += len(content)
        self.append("values", np.nan if group.value is None else group.value)
        self.documents_written += 1 + len(group.completions)
        self.append_offsets()


def encode_columns(group: TokenGroup) -> bytes:
    try:
        return json.dumps({"prompt": group.text, "columns": group.columns}, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{group.place}: a column is no JSON value ({error}); convert it to text, numbers or lists"
        ) from None
