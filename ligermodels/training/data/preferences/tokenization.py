"""Tokenisation of groups: the border between prompt and completions, end tokens, and limits of length.

Strings are joined and tokenised together; a completion begins at the first token that has one of its characters, so
that a token over the border is supervised. Conversations are rendered with each completion; what the assistant says in
the completion is supervised, as in chat.py. All completions of a group begin at the same token: the first that differs
between them, or the first that is supervised in one of them.
The end-of-text token is added to strings unless it is there; a chat ends as its template ends it.
Must not know files or rows.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from tokenizers import Encoding

from ligermodels.errors import InputError
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data.chat import (
    RenderedChat,
    overlap_mask,
    record_batches,
    render,
    render_conversation,
    tokenize_records,
)
from ligermodels.training.data.preferences.groups import GroupOptions
from ligermodels.training.data.records import BadLines, Conversation, GroupRecord, TeacherRecord
from ligermodels.training.data.run_tokenizer import template_advice


class TokenGroup(NamedTuple):
    """A tokenised group. Fields as in `Group`; value and columns as in `GroupRecord`, text as in `GroupPrompt`."""

    prompt: list[int]
    completions: list[list[int]]
    supervised: list[list[bool]]
    place: str
    value: float | None = None
    text: Any = None
    columns: dict[str, Any] | None = None
    teacher_ids: list[list[int]] | None = None
    teacher_logprobs: list[list[float]] | None = None


@dataclass
class Lengths:
    """How many groups were longer than allowed: dropped, or with a prompt or completions that were cut."""

    dropped: int = 0
    cut_prompts: int = 0
    cut_completions: int = 0


class GroupTokenizer:
    """end: the end-of-text token. bad_lines: counts records that cannot be used. lengths: counts those too long."""

    def __init__(self, tokenizer: Tokenizer, end: int, options: GroupOptions, bad_lines: BadLines) -> None:
        self.tokenizer, self.end, self.options, self.bad_lines = tokenizer, end, options, bad_lines
        self.lengths = Lengths()
        added = tokenizer.tokenizer.get_added_tokens_decoder().items()
        self.special = {token: entry.content for token, entry in added if entry.special}

    def groups(self, records: Iterable[GroupRecord | TeacherRecord]) -> Iterator[TokenGroup]:
        """The groups of the records, in their order, without those that are too long.

        Raises InputError naming the place for a record that cannot be used, beyond those that may be skipped.
        """
        for kind, run in itertools.groupby(records, type):
            if kind is TeacherRecord:
                for record in cast(Iterator[TeacherRecord], run):
                    yield from self.distillation_groups(record)
            else:
                for batch in record_batches(cast(Iterator[GroupRecord], run)):
                    yield from self.batch_groups(batch)

    def batch_groups(self, records: Sequence[GroupRecord]) -> Iterator[TokenGroup]:
        rendered = [self.bad_lines.attempt(self.rendered, record) for record in records]
        kept = [(record, chats) for record, chats in zip(records, rendered, strict=True) if chats]
        encodings = iter(self.encode(kept))
        for record, chats in kept:
            sides = list(itertools.islice(encodings, len(chats)))
            group = self.bad_lines.attempt(self.group, record, chats, sides)
            if group is not None:
                yield group

    def encode(self, records: Sequence[tuple[GroupRecord, list[RenderedChat]]]) -> list[Encoding]:
        """The encodings of all texts: of strings with the tokens that begin a text, which a chat template writes."""
        texts = [(chat.text, isinstance(record.prompt, str)) for record, chats in records for chat in chats]
        encoded = {}
        for kind in (True, False):
            some = [text for text, is_string in texts if is_string == kind]
            encoded[kind] = iter(self.tokenizer.encode_with_offsets(some, add_special_tokens=kind) if some else [])
        return [next(encoded[is_string]) for _, is_string in texts]

    def rendered(self, record: GroupRecord) -> list[RenderedChat]:
        """The text of the prompt with each completion, or of the prompt alone. Raises InputError naming the place."""
        if isinstance(record.prompt, str):
            start, place = len(record.prompt), record.place
            texts = [record.prompt + cast(str, completion) for completion in record.completions]
            whole = [RenderedChat(text, [(start, len(text))], False, place) for text in texts]
            return whole or [RenderedChat(record.prompt, [], False, place)]
        if not self.tokenizer.templates:
            raise InputError(
                f"{record.place}: {self.tokenizer.file.parent} has no chat template for messages; "
                f"{template_advice(self.tokenizer)}"
            )
        if not record.completions:
            chat = Conversation(record.prompt, record.tools, record.place, record.template_kwargs)
            try:
                text = render(chat, record.prompt, self.tokenizer, add_generation_prompt=True).text
            except InputError as error:
                raise InputError(f"{record.place}: {error}") from None
            return [RenderedChat(text, [], True, record.place)]
        return [self.rendered_completion(record, cast(list, completion)) for completion in record.completions]

    def rendered_completion(self, record: GroupRecord, completion: list[dict[str, Any]]) -> RenderedChat:
        prompt = cast(list[dict[str, Any]], record.prompt)
        context = [message | {"weight": 0} if message["role"] == "assistant" else message for message in prompt]
        chat = Conversation([*context, *completion], record.tools, record.place, record.template_kwargs)
        texts = render_conversation(chat, self.tokenizer, tuple(self.special.values()))
        if len(texts) > 1:
            raise InputError(
                f"{record.place}: a completion has several answers, and the chat template changes the first when more "
                "messages follow; keep the last answer, and move those before it to the prompt"
            )
        return texts[0]

    def group(
        self, record: GroupRecord, chats: Sequence[RenderedChat], encodings: Sequence[Encoding]
    ) -> TokenGroup | None:
        """None if the group is too long. Raises InputError naming the place."""
        sides = [self.side(chat, encoding) for chat, encoding in zip(chats, encodings, strict=True)]
        if not record.completions:
            made = TokenGroup(sides[0][0], [], [], record.place, text=record.prompt, columns=record.columns)
        else:
            border = common_border(sides)
            if border == 0:
                raise InputError(
                    f"{record.place}: no token comes before the completions, because the tokenizer writes none at the "
                    "beginning of a text; make the prompt longer"
                )
            completions, masks = [ids[border:] for ids, _ in sides], [filled(mask, border) for _, mask in sides]
            if len(sides) == 2 and completions[0] == completions[1]:
                raise InputError(f"{record.place}: fields chosen and rejected have equal tokens, which teaches nothing")
            made = TokenGroup(sides[0][0][:border], completions, masks, record.place, record.value)
        return self.fitting(made, lambda: self.head(record, chats[0], encodings[0]))

    def side(self, chat: RenderedChat, encoding: Encoding) -> tuple[list[int], list[bool]]:
        """The ids of one text, and whether each is supervised. Some tokenizers write the end themselves."""
        ids = encoding.ids
        if not chat.complete and ids[-1:] == [self.end]:
            ids = ids[:-1]
        mask = overlap_mask(encoding.offsets[: len(ids)], chat.answers)
        if chat.complete or not chat.answers:
            return ids, mask
        return [*ids, self.end], [*mask, True]

    def head(self, record: GroupRecord, chat: RenderedChat, encoding: Encoding) -> int:
        """How many tokens at the beginning stay where a prompt is cut: the system message, or what begins a text."""
        system = record.prompt[0] if isinstance(record.prompt, list) else {"role": "none"}
        if system["role"] not in ("system", "developer"):
            return int(encoding.ids[:1] == [self.tokenizer.bos_token_id])
        content = (system["content"] or "").strip()
        start = chat.text.find(content)
        if start < 0:
            raise InputError(
                f"{record.place}: the chat template changes the system message, which --max-prompt-length keeps whole; "
                "raise --max-prompt-length"
            )
        tokens = sum(begin < start + len(content) for begin, _ in encoding.offsets)
        return tokens + sum(token in self.special for token in encoding.ids[tokens : tokens + 1])

    def distillation_groups(self, record: TeacherRecord) -> Iterator[TokenGroup]:
        """The groups of a record of supervised training: what comes before the first supervised token is the prompt."""
        documents = list(tokenize_records([record.record], self.tokenizer, self.end, self.bad_lines))
        for document in documents:
            if document.supervised is None and self.options.needs_prompts:
                raise InputError(
                    f"{document.place}: is a text without a prompt, and --on-policy samples completions of prompts; "
                    "give chats, or records with prompt and completion, or leave --on-policy out"
                )
            mask = [True] * len(document.ids) if document.supervised is None else document.supervised
            border = mask.index(True, 1)
            made = TokenGroup(
                document.ids[:border], [document.ids[border:]], [mask[border:]], document.place,
                teacher_ids=record.teacher_ids, teacher_logprobs=record.teacher_logprobs,
            )  # fmt: skip
            if self.bad_lines.attempt(check_teacher_length, made, len(documents)):
                begins = int(document.ids[:1] == [self.tokenizer.bos_token_id])
                group = self.fitting(made, functools.partial(int, begins))
                if group is not None:
                    yield group

    def fitting(self, group: TokenGroup, head: Callable[[], int]) -> TokenGroup | None:
        """The group within the limits of length; None if it is dropped. head: how many tokens of a prompt stay."""
        prompt = self.fitting_prompt(group.prompt, head)
        room = self.options.max_length - len(prompt)
        too_long = max(map(len, group.completions), default=0) > room
        if room < 0 or (too_long and (self.options.too_long == "drop" or room == 0)):
            self.lengths.dropped += 1
            return None
        completions, masks = [ids[:room] for ids in group.completions], [mask[:room] for mask in group.supervised]
        same = len(completions) == 2 and completions[0] == completions[1]
        if same or not all(map(any, masks)):  # what tells the sides apart, or what is supervised, was cut off
            self.lengths.dropped += 1
            return None
        self.lengths.cut_prompts += len(prompt) < len(group.prompt)
        self.lengths.cut_completions += too_long
        group = group._replace(prompt=prompt, completions=completions, supervised=masks)
        if group.teacher_ids is None or group.teacher_logprobs is None:
            return group
        rows = sum(masks[0])
        return group._replace(teacher_ids=group.teacher_ids[:rows], teacher_logprobs=group.teacher_logprobs[:rows])

    def fitting_prompt(self, prompt: list[int], head: Callable[[], int]) -> list[int]:
        """The prompt without its middle where it is longer than max_prompt_length: its head and its end."""
        limit = self.options.max_prompt_length
        if limit is None or len(prompt) <= limit:
            return prompt
        kept = head()
        if kept >= limit:
            raise InputError(f"--max-prompt-length {limit}: a system message has {kept} tokens; raise the limit")
        return [*prompt[:kept], *prompt[len(prompt) - limit + kept :]]


def common_border(sides: Sequence[tuple[list[int], list[bool]]]) -> int:
    """Where the completions begin: the first token that differs between the sides or is supervised in one of them."""
    firsts = [mask.index(True) for _, mask in sides if True in mask]
    shortest = min(len(ids) for ids, _ in sides)
    table = np.array([ids[:shortest] for ids, _ in sides])
    differs = np.flatnonzero((table != table[0]).any(0))
    return min([*firsts, int(differs[0]) if len(differs) else shortest])


def filled(mask: list[bool], border: int) -> list[bool]:
    """A side's mask from the border on; what comes before its own first supervised token is supervised as well."""
    first = mask.index(True, border) if True in mask[border:] else len(mask)
    return [True] * (first - border) + mask[first:]


def check_teacher_length(group: TokenGroup, documents: int) -> bool:
    """Raises InputError unless the teacher's rows are those of the supervised tokens."""
    supervised = sum(group.supervised[0])
    if group.teacher_ids is not None and (documents > 1 or len(group.teacher_ids) != supervised):
        found = f"{supervised} supervised tokens" if documents == 1 else f"{documents} documents"
        raise InputError(
            f"{group.place}: field teacher_ids has {len(group.teacher_ids)} rows, but the record has {found} with this "
            "tokenizer; give one row for each supervised token, the end token included"
        )
    return True
