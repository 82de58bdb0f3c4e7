"""Tokenisation of records: token ids, and a mask of the supervised tokens.

A text is supervised as a whole, a prompt with its completion on the completion only (completion-only loss), and a
conversation on what the assistant says (assistant mask).

A text begins as the tokenizer begins one, and ends with the end-of-text token. A conversation is rendered by the
tokenizer's chat template. If the template marks the assistant's text by {% generation %}, exactly that is supervised.
Most templates do not, so a conversation is rendered turn by turn: an answer is the text of all messages up to it, minus
the text of all messages before it with the generation prompt. Both must be prefixes of the text of the whole
conversation; all answers for which they are share one document. Some templates change an earlier turn when more
messages follow, for example to drop earlier reasoning. Such an answer gets a document of its own, which ends with it,
so that its context in training is the context in which the model will write it. Where the generation prompt opens a
thought that the template does not write in front of an answer, as DeepSeek-R1's does, the answer begins where the two
texts part, as in TRL.

An answer includes the special token that ends it, but not the whitespace after that token. If the template writes no
such token, the answer ends with the special token that begins the next turn, or, for the last answer, with the
end-of-text token.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from tokenizers import Encoding

from ligermodels.errors import InputError, at_place
from ligermodels.images.inputs import Processor, refuse_image_tokens
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.chat_template import Rendered, choose_template
from ligermodels.tokenizer.tokenizer import CharacterSpan, overlap_mask
from ligermodels.training.data.formats.records import (
    BadLines,
    Completion,
    Conversation,
    Record,
    Text,
    record_batches,
    refuse_undecoded,
    with_written_arguments,
)
from ligermodels.training.data.rows.image_documents import ImageChats, as_prefix, plan_images, prefix_document
from ligermodels.training.data.rows.store import Document, DocumentImage
from ligermodels.training.data.run_tokenizer import template_advice

MAX_RENDERED_ANSWERS = 1000  # of a conversation that is rendered up to each answer, which takes quadratic time
EXCERPT_CHARACTERS = 30
UNFINISHED_TAG = re.compile(r"[<\[{(◁][^>\]})▷\s]{0,30}\Z")  # without a limit, hostile texts take quadratic time
NO_TOKENS: Mapping[int, str] = {}  # never changed

ReadProcessor: TypeAlias = Callable[[], Processor]  # raises InputError if the model reads no images


class RewrittenTurnError(InputError):
    """A chat template changes an earlier turn when more messages follow."""


def no_images() -> Processor:
    raise InputError("has images, which this objective does not train on")


def tokenize_records(
    records: Iterable[Record], tokenizer: Tokenizer, end: int, bad_lines: BadLines,
    processor: ReadProcessor = no_images, image_tokens: Mapping[int, str] = NO_TOKENS,
) -> Iterator[Document]:  # fmt: skip
    """Yields the documents of the records, in their order; each has at least one supervised token.

    Each piece of a long text gives a document, which begins with the last token of the piece before it. end: the
    end-of-text token. bad_lines: counts conversations that cannot be used. processor: reads the image processor
    of a model that has one. image_tokens: those that stand for its images, by id, which no text may have. Raises
    InputError naming the place.
    """
    for document in record_documents(records, tokenizer, end, bad_lines, processor):
        if not image_tokens or bad_lines.attempt(check_image_tokens, document, image_tokens):
            yield document


def check_image_tokens(document: Document, tokens: Mapping[int, str]) -> bool:
    """Raises InputError for a document without images that has a token of them."""
    if not document.images:
        refuse_image_tokens(document.ids, tokens, f"{document.place}:")
    return True


def record_documents(
    records: Iterable[Record], tokenizer: Tokenizer, end: int, bad_lines: BadLines, processor: ReadProcessor
) -> Iterator[Document]:
    for kind, group in itertools.groupby(records, type):
        if kind is Text:
            yield from text_documents(cast(Iterator[Text], group), tokenizer, end)
        elif kind is Completion:
            completions = cast(Iterator[Completion], group)
            yield from completion_documents(completions, tokenizer, end, bad_lines, processor)
        else:
            chats = cast(Iterator[Conversation], group)
            yield from conversation_documents(chats, tokenizer, end, bad_lines, processor)


def text_documents(texts: Iterable[Text], tokenizer: Tokenizer, end: int) -> Iterator[Document]:
    context: list[int] = []  # the last token of the piece before, if the document continues
    for batch in record_batches(texts):
        for text, new in zip(batch, encode_texts(batch, tokenizer), strict=True):
            if new[-1:] == [end]:  # some tokenizers add it themselves
                new = new[:-1]
            ids = [*context, *new, *([end] if text.last else [])]
            context = [] if text.last else ids[-1:]
            if len(ids) > 1:
                yield Document(ids, None, text.place)


def encode_texts(texts: Sequence[Text], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yields the ids of each text.

    A later piece of a text is encoded together with the text before it, whose ids are then removed, so that its first
    token is the same as in the whole text.
    """
    before = iter(tokenizer.encode_batch([text.before for text in texts if text.before]))
    for text, ids in zip(texts, tokenizer.encode_batch([t.before + t.text for t in texts]), strict=True):
        prefix = next(before) if text.before else []
        if not prefix and tokenizer.repeats_bos(text.text, ids):
            ids = ids[1:]
        if ids[: len(prefix)] == prefix:
            yield ids[len(prefix) :] if prefix else ids
        else:
            yield tokenizer.encode(text.text, add_special_tokens=False)


def completion_documents(
    completions: Iterable[Completion], tokenizer: Tokenizer, end: int, bad_lines: BadLines, processor: ReadProcessor
) -> Iterator[Document]:
    """Tokenises completions. The tokens that contain a character of one are supervised, and the end-of-text token."""
    for batch in record_batches(completions):
        encodings = iter(tokenizer.encode_with_offsets([r.prompt + r.completion for r in batch if not r.images]))
        for record in batch:
            if record.images:
                document = bad_lines.attempt(completion_with_images, record, end, processor)
            else:
                document = completion_document(record, next(encodings), end)
            if document is not None:
                yield document


def completion_with_images(record: Completion, end: int, processor: ReadProcessor) -> Document:
    return prefix_document(record, end, processor_for(record, processor))


def processor_for(record: Conversation | Completion, processor: ReadProcessor) -> Processor:
    """Returns the processor for a record with images. Raises InputError naming the place if the model reads none."""
    with at_place(f"{record.place}:"):
        return processor()


def completion_document(record: Completion, encoding: Encoding, end: int) -> Document:
    ids = encoding.ids[:-1] if encoding.ids[-1:] == [end] else encoding.ids
    supervised = [stop > len(record.prompt) for _, stop in encoding.offsets[: len(ids)]]
    return Document([*ids, end], [*supervised, True], record.place)


def conversation_documents(
    conversations: Iterable[Conversation], tokenizer: Tokenizer, end: int, bad_lines: BadLines, processor: ReadProcessor
) -> Iterator[Document]:
    added = tokenizer.tokenizer.get_added_tokens_decoder().values()
    special = tuple(token.content for token in added if token.special)
    for batch in record_batches(conversations):
        without = next((chat for chat in batch if not (tokenizer.templates or is_prefix(chat, processor))), None)
        if without is not None:
            raise InputError(
                f"{without.place}: {tokenizer.file.parent} has no chat template for messages; "
                f"{template_advice(tokenizer)}"
            )
        calls = ((conversation, tokenizer, special, end, processor) for conversation in batch)
        chats = list(itertools.chain.from_iterable(bad_lines.usable(render_with_images, calls)))
        texts = [chat.text for chat in chats if isinstance(chat, RenderedChat)]
        encodings = iter(tokenizer.encode_with_offsets(texts, add_special_tokens=False))
        for chat in chats:
            if isinstance(chat, RenderedChat):
                document = bad_lines.attempt(chat_document, chat, next(encodings), end)
                if document is not None:
                    yield document
            else:
                yield chat


def is_prefix(conversation: Conversation, processor: ReadProcessor) -> bool:
    """Returns whether a conversation has images, and the model takes such a one as a prompt of its own form."""
    try:
        return bool(conversation.images) and processor().placeholder.prefix
    except InputError:  # which rendering says, with the place
        return False


class RenderedChat(NamedTuple):
    """A conversation as text.

    answers: the supervised parts of the text. complete: whether no end-of-text token must be added to the text.
    images: the tokenizer that rendered the images; None if the conversation has none.
    """

    text: str
    answers: Sequence[CharacterSpan]
    complete: bool
    place: str
    images: ImageChats | None = None


def render_with_images(
    conversation: Conversation, tokenizer: Tokenizer, special: tuple[str, ...], end: int, processor: ReadProcessor
) -> Sequence[RenderedChat | Document]:
    """Renders a conversation with the texts of its images in place of placeholders, or makes a prefix's document."""
    if not conversation.images:
        return render_conversation(conversation, tokenizer, special)
    reader = processor_for(conversation, processor)
    prefix = as_prefix(conversation, reader)
    if prefix is not None:
        return [prefix_document(prefix, end, reader)]
    with at_place(f"{conversation.place}:"):
        images = ImageChats(reader, plan_images(conversation.images, reader))
    return [chat._replace(images=images) for chat in render_conversation(conversation, images, special)]


def render_conversation(
    conversation: Conversation, tokenizer: Tokenizer, special: tuple[str, ...]
) -> list[RenderedChat]:
    """Renders a conversation as one or more texts, each with the answers that are supervised in it.

    special: the texts of the special tokens. Raises InputError naming the place.
    """
    messages, place = conversation.messages, conversation.place
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    supervised = [index for index in answers if messages[index].get("weight", 1)]
    with at_place(f"{place}:"):
        if not supervised:
            raise InputError("field messages: no assistant message with a weight other than 0: nothing is supervised")
        whole = render(conversation, messages, tokenizer)
        if not whole.spans:
            return render_turn_by_turn(conversation, supervised, whole.text, tokenizer, special)
        spans = whole.spans
        if supervised != answers:
            if len(spans) != len(answers):
                raise InputError(
                    "field messages: a weight of 0 needs a chat template with one {% generation %} block per answer"
                )
            spans = tuple(span for index, span in zip(answers, spans, strict=True) if index in supervised)
    return [RenderedChat(whole.text, spans, True, place)]


def render(
    conversation: Conversation, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, **options: Any
) -> Rendered:
    """Renders some of a conversation's messages, with its tools and variables.

    Most templates take the arguments of a tool call as an object. Those that concatenate them with text fail on that,
    and get the text as it was written.
    """
    options |= {"tools": conversation.tools, **(conversation.template_kwargs or {})}
    try:
        rendered = tokenizer.render(messages, **options)
    except InputError:
        written = with_written_arguments(messages)
        if written == list(messages):
            raise
        rendered = tokenizer.render(written, **options)
    else:
        refuse_undecoded(messages)
    refuse_dropped("tools", conversation.tools, rendered.text)
    for index, message in enumerate(messages):
        refuse_dropped(f"messages[{index}].tool_calls", message.get("tool_calls"), rendered.text)
    return rendered


def refuse_dropped(field: str, functions: Iterable[Any] | None, text: str) -> None:
    """Raises InputError if the text of a chat lacks the name of one of the functions, which have the form of OpenAI's
    API. Many templates pass over what they do not know."""
    for function in functions or ():
        match function:
            case {"function": {"name": str(name)}} | {"name": str(name)} if name not in text:
                raise InputError(
                    f"field {field}: the chat template does not write {name!r}; use one with tools, or remove the field"
                )


def render_turn_by_turn(
    conversation: Conversation, indices: Sequence[int], whole: str, tokenizer: Tokenizer, special: tuple[str, ...]
) -> list[RenderedChat]:
    """Returns the answers at `indices`: those that the whole text has unchanged in one chat, each other in its own."""
    if len(indices) > MAX_RENDERED_ANSWERS:
        raise InputError(
            f"field messages: has {len(indices):,} answers, more than {MAX_RENDERED_ANSWERS:,}; split it, "
            "or mark what the assistant says in the chat template by {% generation %} … {% endgeneration %}"
        )
    unchanged: dict[int, CharacterSpan] = {}
    chats = []
    for index in indices:
        try:
            unchanged[index] = answer_span(conversation, index, whole, tokenizer, special)
        except RewrittenTurnError:
            shorter = conversation._replace(messages=conversation.messages[: index + 1])
            text = render(shorter, shorter.messages, tokenizer).text
            spans = {index: answer_span(shorter, index, text, tokenizer, special)}
            chats.append(rendered_chat(shorter, text, spans, special))
    return [*chats, rendered_chat(conversation, whole, unchanged, special)] if unchanged else chats


def rendered_chat(
    conversation: Conversation, text: str, answers: dict[int, CharacterSpan], special: tuple[str, ...]
) -> RenderedChat:
    """Returns a rendered text with its answers, which are ordered by the indices of their messages."""
    last, spans = list(answers)[-1], list(answers.values())
    has_next_turn = last < len(conversation.messages) - 1
    complete = has_next_turn or text[: spans[-1][1]].endswith(special)
    return RenderedChat(text, spans, complete, conversation.place)


def answer_span(
    conversation: Conversation, index: int, whole: str, tokenizer: Tokenizer, special: tuple[str, ...]
) -> CharacterSpan:
    """Returns the span of the assistant's message at `index` in the whole text, with the special token that ends it."""
    messages = conversation.messages
    if index == 0:
        raise InputError(
            "field messages[0].role is 'assistant'; a message must come before an answer: add the user's, or give the "
            'answer "weight": 0'
        )
    before = text_before(conversation, index, whole, tokenizer)
    through = whole
    if index + 1 < len(messages):
        through = render(conversation, messages[: index + 1], tokenizer).text
        if not whole.startswith(through):  # Phi 3 writes an end of text after the last message of any role
            through = through.removesuffix(tokenizer.eos_token or "")
    for text in (before, through):
        if not whole.startswith(text):
            raise rewritten_turn(conversation, index, whole, text, tokenizer)
    answer = through[len(before) :]
    if not answer:
        raise InputError(f"field messages[{index}]: the chat template writes nothing for it")
    if answer.rstrip().endswith(special):
        return len(before), len(before) + len(answer.rstrip())
    into_next = 1 if whole.startswith(special, len(through)) else 0  # one supervised character supervises its token
    return len(before), len(through) + into_next


def text_before(conversation: Conversation, index: int, whole: str, tokenizer: Tokenizer) -> str:
    """Returns the text in front of the answer at `index`, with as much of the generation prompt as `whole` has too.

    It does not end within a tag: of `<think>` and `</think>` it has no common `<`.
    """
    earlier = conversation.messages[:index]
    prompt = render(conversation, earlier, tokenizer, add_generation_prompt=True).text
    if whole.startswith(prompt):
        return prompt
    common = UNFINISHED_TAG.sub("", prompt[: common_length(prompt, whole)])
    bare = render(conversation, earlier, tokenizer).text
    return common if common.startswith(bare) else prompt


def rewritten_turn(
    conversation: Conversation, index: int, whole: str, part: str, tokenizer: Tokenizer
) -> RewrittenTurnError:
    template = choose_template(tokenizer.templates, None, conversation.tools is not None, tokenizer.file.parent)
    same = common_length(whole, part)
    in_whole, alone = (text[same : same + EXCERPT_CHARACTERS] for text in (whole, part))
    return RewrittenTurnError(
        f"{template.origin}: the text up to messages[{index}] changes when more messages follow: from {alone!r} to "
        f"{in_whole!r}; mark what the assistant says in the template by {{% generation %}} … {{% endgeneration %}}"
    )


def common_length(text: str, other: str) -> int:
    """Returns how many characters two texts begin with in common."""
    differing = (place for place, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
    return next(differing, min(len(text), len(other)))


def chat_document(chat: RenderedChat, encoding: Encoding, end: int) -> Document:
    """Makes the document of a chat. A token of images is never supervised, not even within an answer."""
    ids, supervised = encoding.ids, overlap_mask(encoding.offsets, chat.answers)
    images: Sequence[DocumentImage] = ()
    if chat.images is not None:
        supervised = chat.images.unsupervised(ids, supervised)
        with at_place(f"{chat.place}:"):
            images = chat.images.locate(ids)
    if not chat.complete:
        ids, supervised = [*ids, end], [*supervised, True]
    if not any(supervised[1:]):
        raise InputError(f"{chat.place}: no token is supervised, because the assistant says nothing")
    return Document(ids, supervised, chat.place, images)
