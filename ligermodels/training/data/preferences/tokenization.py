"""Tokenisation of groups: the border between prompt and completions, end tokens, and limits of length.

Strings are joined and tokenised together; a completion begins at the first token that has one of its characters, so
that a token over the border is supervised. Conversations are rendered with each completion; what the assistant says in
the completion is supervised, as in chat.py. All completions of a group begin at the same token: the first that differs
between them, or the first that is supervised in one of them.
The end-of-text token is added to strings unless it is there; a chat ends as its template ends it.
Images of a prompt are on its side of the border, and those of completions behind it, each as a whole. Their tokens are
never supervised. A group with images is dropped where it would have to be cut.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from tokenizers import Encoding

from ligermodels.errors import InputError, at_place
from ligermodels.images.inputs import refuse_image_tokens
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.tokenizer import overlap_mask
from ligermodels.training.data.chat import (
    NO_TOKENS,
    ReadProcessor,
    RenderedChat,
    no_images,
    render,
    render_conversation,
    tokenize_records,
)
from ligermodels.training.data.formats.records import BadLines, Conversation, GroupRecord, TeacherRecord, record_batches
from ligermodels.training.data.preferences.store import GroupOptions, TokenGroup
from ligermodels.training.data.rows.image_documents import ImageChats, plan_images
from ligermodels.training.data.rows.store import DocumentImage
from ligermodels.training.data.run_tokenizer import template_advice


class Side(NamedTuple):
    """A prompt with one completion, or alone: its ids, whether each is supervised, its images."""

    ids: list[int]
    supervised: list[bool]
    images: Sequence[DocumentImage] = ()


@dataclass
class Lengths:
    """How many groups were longer than allowed: dropped, or with a prompt or completions that were cut."""

    dropped: int = 0
    cut_prompts: int = 0
    cut_completions: int = 0


class GroupTokenizer:
    """Tokenises records as groups.

    end: the end-of-text token. bad_lines: counts records that cannot be used. lengths: counts those too long.
    processor, image_tokens: as for `tokenize_records`.
    """

    def __init__(
        self, tokenizer: Tokenizer, end: int, options: GroupOptions, bad_lines: BadLines,
        processor: ReadProcessor = no_images, image_tokens: Mapping[int, str] = NO_TOKENS,
    ) -> None:  # fmt: skip
        self.tokenizer, self.end, self.options, self.bad_lines = tokenizer, end, options, bad_lines
        self.processor, self.image_tokens = processor, image_tokens
        self.lengths = Lengths()
        added = tokenizer.tokenizer.get_added_tokens_decoder().items()
        self.special = {token: entry.content for token, entry in added if entry.special}

    def groups(self, records: Iterable[GroupRecord | TeacherRecord]) -> Iterator[TokenGroup]:
        """Yields the groups of the records, in their order, without those that are too long.

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
        """Returns the encodings of all texts.

        Strings are encoded with the tokens that begin a text, which a chat template writes itself.
        """
        texts = [(chat.text, isinstance(record.prompt, str)) for record, chats in records for chat in chats]
        encoded = {}
        for kind in (True, False):
            some = [text for text, is_string in texts if is_string == kind]
            encoded[kind] = iter(self.tokenizer.encode_with_offsets(some, add_special_tokens=kind) if some else [])
        return [next(encoded[is_string]) for _, is_string in texts]

    def rendered(self, record: GroupRecord) -> list[RenderedChat]:
        """Returns the text of the prompt with each completion, or of the prompt alone.

        Raises InputError naming the place.
        """
        sides = self.image_chats(record)
        if isinstance(record.prompt, str):
            return self.rendered_strings(record, sides[0])
        if not self.tokenizer.templates:
            raise InputError(
                f"{record.place}: {self.tokenizer.file.parent} has no chat template for messages; "
                f"{template_advice(self.tokenizer)}"
            )
        if not record.completions:
            chat = Conversation(record.prompt, record.tools, record.place, record.template_kwargs)
            with at_place(f"{record.place}:"):
                text = render(chat, record.prompt, self.tokenizer, add_generation_prompt=True).text
            return [RenderedChat(text, [], True, record.place)]
        return [
            self.rendered_completion(record, cast(list, completion), images)
            for completion, images in zip(record.completions, sides, strict=True)
        ]

    def image_chats(self, record: GroupRecord) -> list[ImageChats | None]:
        """Returns for each side what renders the images of the prompt and of its completion; None without images."""
        if not record.images:
            return [None] * max(1, len(record.completions))
        with at_place(f"{record.place}:"):
            processor = self.processor()
            if processor.placeholder.prefix:
                raise InputError("has images, and this model trains on preferences about text alone; leave them out")
            prompt, *completions = (plan_images(images, processor) for images in record.images)
            return [ImageChats(processor, [*prompt, *images]) for images in completions]

    def rendered_strings(self, record: GroupRecord, images: ImageChats | None) -> list[RenderedChat]:
        """Joins a prompt and completions that are strings. images: those of the prompt; such a completion has none."""
        prompt, place = cast(str, record.prompt), record.place
        completions = cast(tuple[str, ...], record.completions)
        if images is not None:
            with at_place(f"{place}:"):
                prompt = images.expand(prompt)
                for completion in completions:
                    images.processor.placeholder.refuse(completion)
        texts = [prompt + completion for completion in completions]
        whole = [RenderedChat(text, [(len(prompt), len(text))], False, place, images) for text in texts]
        return whole or [RenderedChat(prompt, [], False, place)]

    def rendered_completion(
        self, record: GroupRecord, completion: list[dict[str, Any]], images: ImageChats | None
    ) -> RenderedChat:
        prompt = cast(list[dict[str, Any]], record.prompt)
        context = [message | {"weight": 0} if message["role"] == "assistant" else message for message in prompt]
        chat = Conversation([*context, *completion], record.tools, record.place, record.template_kwargs)
        texts = render_conversation(chat, images or self.tokenizer, tuple(self.special.values()))
        if len(texts) > 1:
            raise InputError(
                f"{record.place}: a completion has several answers, and the chat template changes the first when more "
                "messages follow; keep the last answer, and move those before it to the prompt"
            )
        return texts[0]._replace(images=images)

    def group(
        self, record: GroupRecord, chats: Sequence[RenderedChat], encodings: Sequence[Encoding]
    ) -> TokenGroup | None:
        """Makes the group of a record; None if it is too long. Raises InputError naming the place."""
        sides = [self.side(chat, encoding) for chat, encoding in zip(chats, encodings, strict=True)]
        if not record.completions:
            made = TokenGroup(sides[0].ids, [], [], record.place, text=record.prompt, columns=record.columns)
        else:
            of_prompt = len(record.images[0]) if record.images else 0
            border = whole_images_border(common_border(sides), sides, of_prompt)
            if border == 0:
                raise InputError(
                    f"{record.place}: no token comes before the completions, because the tokenizer writes none at the "
                    "beginning of a text; make the prompt longer"
                )
            completions, masks = [side.ids[border:] for side in sides], [filled(side, border) for side in sides]
            images = images_around(border, sides) if record.images else ()
            if has_equal_sides(completions, images):
                raise InputError(f"{record.place}: fields chosen and rejected have equal tokens, which teaches nothing")
            made = TokenGroup(
                sides[0].ids[:border], completions, masks, record.place, record.value, images=images
            )  # fmt: skip
        return self.fitting(made, lambda: self.head(record, chats[0], encodings[0]))

    def side(self, chat: RenderedChat, encoding: Encoding) -> Side:
        """Makes a side of a group, with the end token, which some tokenizers write themselves.

        Raises InputError for image tokens that do not fit the images.
        """
        ids = encoding.ids
        if not chat.complete and ids[-1:] == [self.end]:
            ids = ids[:-1]
        mask, images = overlap_mask(encoding.offsets[: len(ids)], chat.answers), []
        if chat.images is not None:
            mask = chat.images.unsupervised(ids, mask)
            with at_place(f"{chat.place}:"):
                images = chat.images.locate(ids)
        elif self.image_tokens:
            refuse_image_tokens(ids, self.image_tokens, f"{chat.place}:")
        if chat.complete or not chat.answers:
            return Side(ids, mask, images)
        return Side([*ids, self.end], [*mask, True], images)

    def head(self, record: GroupRecord, chat: RenderedChat, encoding: Encoding) -> int:
        """Returns how many tokens at the beginning stay where a prompt is cut.

        They are the system message, or what begins a text.
        """
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
        """Yields the groups of a record of supervised training.

        The prompt is what comes before the first supervised token.
        """
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
            if self.bad_lines.attempt(self.check_distillation, made, len(documents)):
                begins = int(document.ids[:1] == [self.tokenizer.bos_token_id])
                group = self.fitting(made, functools.partial(int, begins))
                if group is not None:
                    yield group

    def check_distillation(self, group: TokenGroup, documents: int) -> bool:
        refuse_image_tokens([*group.prompt, *group.completions[0]], self.image_tokens, f"{group.place}:")
        return check_teacher_length(group, documents)

    def fitting(self, group: TokenGroup, head: Callable[[], int]) -> TokenGroup | None:
        """Returns the group within the limits of length; None if it is dropped.

        head: how many tokens of a prompt stay.
        """
        whole = any(group.images)
        prompt = group.prompt if whole else self.fitting_prompt(group.prompt, head)
        room = self.options.max_length - len(prompt)
        too_long = max(map(len, group.completions), default=0) > room
        too_long_prompt = len(prompt) > (self.options.max_prompt_length or len(prompt))
        never_cut = whole or self.options.too_long == "drop" or room == 0
        if room < 0 or too_long_prompt or (too_long and never_cut):
            self.lengths.dropped += 1
            return None
        completions, masks = [ids[:room] for ids in group.completions], [mask[:room] for mask in group.supervised]
        # What tells the sides apart, or what is supervised, was cut off.
        if has_equal_sides(completions, group.images) or not all(map(any, masks)):
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
        """Returns the prompt without its middle where it is longer than max_prompt_length: its head and its end."""
        limit = self.options.max_prompt_length
        if limit is None or len(prompt) <= limit:
            return prompt
        kept = head()
        if kept >= limit:
            raise InputError(f"--max-prompt-length {limit}: a system message has {kept} tokens; raise the limit")
        return [*prompt[:kept], *prompt[len(prompt) - limit + kept :]]


def common_border(sides: Sequence[Side]) -> int:
    """Returns where the completions begin.

    This is the first token that differs between the sides or is supervised in one of them.
    """
    firsts = [side.supervised.index(True) for side in sides if True in side.supervised]
    shortest = min(len(side.ids) for side in sides)
    table = np.array([side.ids[:shortest] for side in sides])
    differs = np.flatnonzero((table != table[0]).any(0))
    return min([*firsts, int(differs[0]) if len(differs) else shortest])


def whole_images_border(border: int, sides: Sequence[Side], of_prompt: int) -> int:
    """Returns the last place up to `border` that is neither within an image nor behind an image of a completion.

    of_prompt: how many images of each side are the prompt's; equal tokens behind them may be of other images.
    """
    for side in sides:
        for number, image in enumerate(side.images):
            if image.start < border and (number >= of_prompt or image.stop > border):
                border = image.start
    return border


def images_around(border: int, sides: Sequence[Side]) -> tuple[list[DocumentImage], ...]:
    """Returns the images before the border, which are the same on all sides, then the images behind it of each side.

    The places of the latter are counted from the border.
    """
    prompt = [image for image in sides[0].images if image.stop <= border]
    behind = (
        [i._replace(start=i.start - border, stop=i.stop - border) for i in side.images if i.start >= border]
        for side in sides
    )
    return prompt, *behind


def has_equal_sides(completions: Sequence[list[int]], images: Sequence[Sequence[DocumentImage]]) -> bool:
    """Returns whether two completions are equal. images: those of the prompt, then of each completion; or none."""
    return len(completions) == 2 and completions[0] == completions[1] and images[1:2] == images[2:]


def filled(side: Side, border: int) -> list[bool]:
    """Returns a side's mask from the border on; text before its own first supervised token is supervised as well."""
    mask = side.supervised
    first = mask.index(True, border) if True in mask[border:] else len(mask)
    filled = [True] * (first - border) + mask[first:]
    for image in side.images:
        if border <= image.start < first:
            filled[image.start - border : image.stop - border] = mask[image.start : image.stop]
    return filled


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
