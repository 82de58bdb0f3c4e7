"""Groups: a prompt with its completions, as token ids; and how long they may be. Must not know records or rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from ligermodels.errors import InputError
from ligermodels.training.data.preferences.formats import GroupKind
from ligermodels.training.data.rows.store import TokenStore


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
        """The prompt with the completions from `first` up to `last`."""
        part = slice(first, last)
        return Group(
            self.prompt,
            self.completions[part],
            self.supervised[part],
            None if self.teacher is None else self.teacher[part],
            self.images and (self.images[0], *self.images[1 + first : 1 + last]),
        )

    def images_of(self, part: int) -> tuple[GroupImage, ...]:
        """Those of the prompt, part 0, or of completion number part - 1."""
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


def unshared(groups: Sequence[Group]) -> int:
    """The number of tokens of the groups where every completion has its own copy of the prompt."""
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
