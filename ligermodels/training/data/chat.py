"""From records to documents of token ids, and which are supervised: all of a text, behind a prompt its completion, of a
chat what the assistant says.

A text begins as the tokenizer begins one, and ends with the end-of-text token. A conversation is what the tokenizer's
chat template makes of it. Where the template marks what the assistant says by {% generation %}, that is supervised and
nothing else. Most do not, so the conversation is rendered turn by turn: an answer is what follows the text of all
messages before it, with the generation prompt, in the text of all messages up to it. Where both stand unchanged at the
beginning of the whole text, all answers share that one document. Where a template writes an earlier turn differently
once more follow, as those do that drop earlier reasoning, an answer so changed gets a document of its own, of the
messages up to it: it is learned behind what the assistant will have before it when it answers. An answer goes to the
special token that ends it, without the white space after that. Where the template puts none, what ends it is the
special token that begins the next turn, and after the last answer the end-of-text token. Knows neither files nor rows.
"""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar, cast

from tokenizers import Encoding

from ligermodels.errors import InputError
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.chat_template import choose_template
from ligermodels.training.data.records import BadLines, Completion, Conversation, Record, Text

BATCH_RECORDS = 1024
BATCH_CHARACTERS = 2**22  # a token takes `tokenizers` about a hundred bytes
SHOWN_CHARACTERS = 30

Span = tuple[int, int]  # [start, stop) in characters
OneKind = TypeVar("OneKind", Text, Completion, Conversation)


class Rewritten(InputError):
    """A chat template writes an earlier turn otherwise once more follow."""


class Document(NamedTuple):
    """supervised: whether each of `ids` is to be predicted, None if all are; the first never is, as it is context."""

    ids: list[int]
    supervised: list[bool] | None
    place: str


def documents(records: Iterable[Record], tokenizer: Tokenizer, end: int, bad: BadLines) -> Iterator[Document]:
    """In the order of the records; each has a token to predict.

    A text that comes in pieces gives a document for each, which begins with the last token of the one before. end: the
    end-of-text token. bad: counts conversations that cannot be used. Raises InputError naming the place.
    """
    for kind, group in itertools.groupby(records, type):
        if kind is Text:
            yield from text_documents(cast(Iterator[Text], group), tokenizer, end)
        elif kind is Completion:
            yield from completion_documents(cast(Iterator[Completion], group), tokenizer, end)
        else:
            yield from conversation_documents(cast(Iterator[Conversation], group), tokenizer, end, bad)


def batches(records: Iterable[OneKind]) -> Iterator[list[OneKind]]:
    """As many as are tokenised at once, on all cores."""
    batch: list[OneKind] = []
    characters = 0
    for record in records:
        batch.append(record)
        characters += sum(map(len, record.texts))
        if len(batch) == BATCH_RECORDS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def text_documents(texts: Iterable[Text], tokenizer: Tokenizer, end: int) -> Iterator[Document]:
    context: list[int] = []  # the last token of a text that goes on
    for batch in batches(texts):
        for text, new in zip(batch, encode_pieces(batch, tokenizer), strict=True):
            if new[-1:] == [end]:  # which some tokenizers put there themselves
                new = new[:-1]
            ids = [*context, *new, *([end] if text.last else [])]
            context = [] if text.last else ids[-1:]
            if len(ids) > 1:
                yield Document(ids, None, text.place)


def encode_pieces(texts: Sequence[Text], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The ids of each; a piece is encoded behind the end of the one before, whose ids are then taken off."""
    before = iter(tokenizer.encode_batch([text.before for text in texts if text.before]))
    for text, ids in zip(texts, tokenizer.encode_batch([t.before + t.text for t in texts]), strict=True):
        known = next(before) if text.before else []
        if ids[: len(known)] == known:
            yield ids[len(known) :] if known else ids
        else:
            yield tokenizer.encode(text.text, add_special_tokens=False)


def completion_documents(completions: Iterable[Completion], tokenizer: Tokenizer, end: int) -> Iterator[Document]:
    """A token that holds a character of the completion is supervised, and the end-of-text token."""
    for batch in batches(completions):
        encodings = tokenizer.tokenizer.encode_batch([prompt + completion for prompt, completion, _ in batch])
        for (prompt, _, place), encoding in zip(batch, encodings, strict=True):
            ids = encoding.ids[:-1] if encoding.ids[-1:] == [end] else encoding.ids
            supervised = [stop > len(prompt) for _, stop in encoding.offsets[: len(ids)]]
            yield Document([*ids, end], [*supervised, True], place)


def conversation_documents(
    conversations: Iterable[Conversation], tokenizer: Tokenizer, end: int, bad: BadLines
) -> Iterator[Document]:
    added = tokenizer.tokenizer.get_added_tokens_decoder().values()
    special = tuple(token.content for token in added if token.special)
    for batch in batches(conversations):
        if not tokenizer.templates:
            remedy = "put its chat_template.jinja there, or give texts, or prompts with completions"
            raise InputError(f"{batch[0].place}: {tokenizer.file.parent} has no chat template for messages; {remedy}")
        rendered = (bad.attempt(render, conversation, tokenizer, special) or [] for conversation in batch)
        chats = list(itertools.chain.from_iterable(rendered))
        encodings = tokenizer.tokenizer.encode_batch([chat.text for chat in chats], add_special_tokens=False)
        for chat, encoding in zip(chats, encodings, strict=True):
            document = bad.attempt(supervise, chat, encoding, end)
            if document is not None:
                yield document


class Chat(NamedTuple):
    """answers: what is supervised of the text. ended: whether nothing is to follow the last of them."""

    text: str
    answers: Sequence[Span]
    ended: bool
    place: str


def render(conversation: Conversation, tokenizer: Tokenizer, special: tuple[str, ...]) -> list[Chat]:
    """special: the texts of special tokens. Raises InputError naming the place."""
    messages, tools, place = conversation
    said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    indices = [index for index in said if messages[index].get("weight", 1)]
    try:
        if not indices:
            raise InputError("field messages: none is the assistant's, or weight is 0, so no token is supervised")
        whole = tokenizer.render(messages, tools=tools)
        if not whole.spans:
            return turn_by_turn(conversation, indices, whole.text, tokenizer, special)
        if indices != said:
            raise InputError(
                "field messages: a weight of 0 and a chat template with {% generation %} exclude each other"
            )
    except InputError as error:
        raise InputError(f"{place}: {error}") from None
    return [Chat(whole.text, whole.spans, True, place)]


def turn_by_turn(
    conversation: Conversation, indices: Sequence[int], whole: str, tokenizer: Tokenizer, special: tuple[str, ...]
) -> list[Chat]:
    """The answers at `indices`: those that the whole text leaves as they were together, the others each by itself."""
    together: dict[int, Span] = {}
    chats = []
    for index in indices:
        try:
            together[index] = answer(conversation, index, whole, tokenizer, special)
        except Rewritten:
            shorter = conversation._replace(messages=conversation.messages[: index + 1])
            text = tokenizer.render(shorter.messages, tools=shorter.tools).text
            spans = {index: answer(shorter, index, text, tokenizer, special)}
            chats.append(chat_of(shorter, text, spans, special))
    return [*chats, chat_of(conversation, whole, together, special)] if together else chats


def chat_of(conversation: Conversation, text: str, answers: dict[int, Span], special: tuple[str, ...]) -> Chat:
    """answers: by the indices of their messages, ascending."""
    last, spans = list(answers)[-1], list(answers.values())
    goes_on = last < len(conversation.messages) - 1
    return Chat(text, spans, goes_on or text[: spans[-1][1]].endswith(special), conversation.place)


def answer(conversation: Conversation, index: int, whole: str, tokenizer: Tokenizer, special: tuple[str, ...]) -> Span:
    """Where in the whole text the assistant's message at `index` is, with the token that ends it."""
    messages, tools, _ = conversation
    if index == 0:
        raise InputError("field messages[0].role is 'assistant'; there must be a message that it answers")
    before = tokenizer.render(messages[:index], tools=tools, add_generation_prompt=True).text
    upto = whole
    if index + 1 < len(messages):
        upto = tokenizer.render(messages[: index + 1], tools=tools).text
        if not whole.startswith(upto):  # Phi 3 has an end of text behind the last message, whichever that is
            upto = upto.removesuffix(tokenizer.eos_token or "")
    for text in (before, upto):
        if not whole.startswith(text):
            raise changed(conversation, index, whole, text, tokenizer)
    said = upto[len(before) :]
    if not said:
        raise InputError(f"field messages[{index}]: the chat template writes nothing of it")
    if said.rstrip().endswith(special):
        return len(before), len(before) + len(said.rstrip())
    into_next = 1 if whole.startswith(special, len(upto)) else 0  # a token with one supervised character is supervised
    return len(before), len(upto) + into_next


def changed(conversation: Conversation, index: int, whole: str, part: str, tokenizer: Tokenizer) -> Rewritten:
    template = choose_template(tokenizer.templates, None, conversation.tools is not None, tokenizer.file.parent)
    same = next((i for i, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b), min(len(whole), len(part)))
    now, once = (text[same : same + SHOWN_CHARACTERS] for text in (whole, part))
    return Rewritten(
        f"{template.origin}: writes what goes up to messages[{index}] otherwise in the whole conversation: {now!r}, "
        f"not {once!r}; mark what the assistant says in the template by {{% generation %}} … {{% endgeneration %}}"
    )


def supervise(chat: Chat, encoding: Encoding, end: int) -> Document:
    ids, supervised = encoding.ids, overlapping(encoding.offsets, chat.answers)
    if not chat.ended:
        ids, supervised = [*ids, end], [*supervised, True]
    if not any(supervised[1:]):
        raise InputError(f"{chat.place}: no token of it is supervised; the assistant says nothing")
    return Document(ids, supervised, chat.place)


def overlapping(offsets: Sequence[Span], spans: Iterable[Span]) -> list[bool]:
    """Whether each token, at ascending offsets, holds a character of a span."""
    starts, stops = [start for start, _ in offsets], [stop for _, stop in offsets]
    flags = [False] * len(offsets)
    for start, stop in spans:
        for token in range(bisect.bisect_right(stops, start), bisect.bisect_left(starts, stop)):
            flags[token] = True
    return flags
