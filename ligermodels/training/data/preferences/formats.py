"""The formats of preference data: which fields a record may have, and the group that they make. They are TRL's.

    pairs      {"prompt": …, "chosen": …, "rejected": …}     without "prompt": what chosen and rejected begin with
    judged     {"prompt": …, "completion": …, "label": true}     or a pair: chosen is good, rejected is bad
    prompts    {"prompt": …, …}     all other fields are kept for reward functions
    distillation     any record of supervised training, with "teacher_ids" and "teacher_logprobs" or without

prompt, chosen, rejected and completion are strings, or all are lists of messages. "margin", "tools",
"chat_template_kwargs" and "images" may be beside them. Errors name the field and the remedy.

An image part of a message without an image takes the next of the images beside the messages: first those of the prompt,
then those of each completion. Without such parts, and without marks <image>, images beside messages stand before the
text of the prompt's first message of the user. A text has the model's own image token for each image.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from ligermodels.errors import InputError
from ligermodels.images.parts import image_places, is_image_part, parse_source, take_images, template_part
from ligermodels.images.reading import ImageSource
from ligermodels.training.data.formats.record_formats import (
    KNOWN_FIELDS,
    LIKE_PROMPTS,
    OPTIONS_OF_CHATS,
    RecordFields,
    has_image_parts,
    record_images,
    with_images_first,
    with_marked_images,
)
from ligermodels.training.data.formats.records import (
    GroupRecord,
    Record,
    TeacherRecord,
    json_type,
    message_texts,
    parse_messages,
    parse_template_kwargs,
    parse_tools,
)

Part: TypeAlias = str | list[dict[str, Any]]  # a text, or messages
GroupKind: TypeAlias = Literal["pairs", "judged", "prompts", "distillation"]
PAIR = ("chosen", "rejected")
JUDGED = ("prompt", "completion", "label")
TEACHER = ("teacher_ids", "teacher_logprobs")
BEFORE_PROMPTS = ("system", "context")  # names of what stands before a prompt
OTHER_PROMPTS = (*(name for name in LIKE_PROMPTS if name != "prompt"), *BEFORE_PROMPTS)
# Names in other tools' formats, and those here.
RENAMED = {
    "chosen_response": "chosen", "rejected_response": "rejected", "chosen_responses": "chosen",
    "response_chosen": "chosen", "response_rejected": "rejected", "answer_chosen": "chosen",
    "answer_rejected": "rejected",
}  # fmt: skip
MOST_MARGIN = 2.0**127  # margins are float32
# Arguments of reward functions, which no column may be named as.
REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


def take_group_images(
    parts: Mapping[str, Part], beside: Sequence[Any]
) -> tuple[list[Part], tuple[list[ImageSource], ...]]:
    """Returns the prompt and its completions as chat templates get them, and the images of each; no images at all: ().

    parts: by the names of their fields; all are strings, or all are messages. Raises InputError naming the field.
    """
    texts = list(parts.values())
    if any(isinstance(part, str) for part in texts):
        of_prompt = [parse_source(image, f"images[{number}]") for number, image in enumerate(beside)]
        return texts, (of_prompt, *([] for _ in texts[1:])) if of_prompt else ()
    prompt, *completions = (with_marked_images(part) if beside else part for part in texts if isinstance(part, list))
    if beside and not any(has_image_parts(part) for part in (prompt, *completions)):
        prompt = with_images_first(prompt, len(beside))
    messages = dict(zip(parts, (prompt, *completions), strict=True))
    wanted = [count_bare_parts(part, field) for field, part in messages.items()]
    if sum(wanted) != len(beside):
        raise InputError(
            f"field images has {len(beside)} images, but the messages have {sum(wanted)} image parts without an image; "
            "give one for each"
        )
    taken: list[Part] = []
    sources: list[list[ImageSource]] = []
    first = 0
    for (field, part), count in zip(messages.items(), wanted, strict=True):
        of_template, images = take_images(part, beside[first : first + count], field)
        taken.append(of_template)
        sources.append(images)
        first += count
    return taken, tuple(sources) if any(sources) else ()


def count_bare_parts(messages: Sequence[Mapping[str, Any]], field: str) -> int:
    """Returns how many image parts of messages have no image of their own."""
    places = image_places([dict(message) for message in messages], field)
    return sum(is_image_part(part) and template_part(part, place)[1] is None for place, part, _, _ in places)


class GroupFormats(NamedTuple):
    """The formats of one kind; `RecordFormats` says what the methods do."""

    kind: GroupKind

    def has_record(self, names: Collection[str]) -> bool:
        if self.kind == "distillation":
            return KNOWN_FIELDS.has_record(names)
        return any(set(names).issuperset(needed) for needed in NEEDED[self.kind])

    def refuse_missing(self, names: Collection[str], kind: str) -> None:
        if self.kind == "distillation":
            KNOWN_FIELDS.refuse_missing(names, kind)
        elif not self.has_record(names):
            listed = f"its {kind}s are {', '.join(names) or 'none'}"
            needed = " or ".join(" with ".join(fields) for fields in NEEDED[self.kind])
            raise InputError(f"has no {kind} {needed}; {listed}{remedy(names, self.kind)}")

    def columns(self, names: Collection[str]) -> list[str]:
        if self.kind == "prompts":
            return list(names)
        if self.kind == "distillation":
            return [*KNOWN_FIELDS.columns(names), *(name for name in TEACHER if name in names)]
        return [name for name in (*JUDGED, *PAIR, "margin", *OTHER_PROMPTS, *OPTIONS_OF_CHATS) if name in names]

    def parse(self, value: RecordFields, place: str) -> Record:
        if self.kind == "distillation":
            return parse_distillation(value, place)
        present = {name: content for name, content in value.items() if content is not None}
        self.refuse_missing(present, "field")
        if self.kind == "prompts" and record_images(present):
            raise InputError("has images, but this objective trains on text alone; leave the field out")
        return GROUP_PARSERS[self.kind](present, place)


def remedy(names: Collection[str], kind: GroupKind) -> str:
    """Returns the end of a message about missing fields: what to rename, or which kind of data this is."""
    there = set(names)
    if kind in ("pairs", "judged") and (old := [name for name in RENAMED if name in there]):
        return f"; rename {', '.join(f'{name} to {RENAMED[name]}' for name in old)}" + prompt_remedy(there)
    if kind == "pairs" and there.issuperset(JUDGED):
        return "; these are judged completions, which --objective kto takes"
    if kind == "prompts":
        return prompt_remedy(there)
    return ""


def prompt_remedy(names: Collection[str]) -> str:
    """Returns what to rename to prompt; empty if there is a prompt, or nothing like one."""
    if "prompt" in names:
        return ""
    old = next((name for name in (*LIKE_PROMPTS, "messages", "conversations") if name in names), None)
    if old in ("messages", "conversations"):
        return f"; rename {old} to prompt, without the answer at its end"
    return f"; rename {old} to prompt" if old else ""


def parse_pair(value: RecordFields, place: str) -> GroupRecord:
    """Raises InputError for sides of different types, equal or empty ones, and a prompt that they repeat."""
    if "conversations" in value and "prompt" not in value:
        raise InputError("field conversations is beside chosen and rejected; rename it to prompt")
    chosen, rejected = (parse_part(value, field) for field in PAIR)
    if chosen == rejected:
        raise InputError(
            "fields chosen and rejected are equal, which teaches nothing; remove the record, or skip such records with "
            "--allow-bad-lines"
        )
    fields = {"chosen": chosen, "rejected": rejected}
    if "prompt" in value:
        prompt = parse_part(value, "prompt")
        refuse_mixed({"prompt": prompt} | fields)
        refuse_repeated_prompt(prompt, fields)
    else:
        refuse_mixed(fields)
        refuse_other_prompt(value, chosen, rejected)
        prompt, chosen, rejected = split_at_common_start(chosen, rejected)
    return group(value, prompt, {"chosen": chosen, "rejected": rejected}, place, value=parse_margin(value))


def parse_judged(value: RecordFields, place: str) -> GroupRecord:
    if "label" not in value:
        return parse_pair(value, place)
    prompt, completion = (parse_part(value, field) for field in JUDGED[:2])
    refuse_mixed({"prompt": prompt, "completion": completion})
    return group(value, prompt, {"completion": completion}, place, value=parse_label(value["label"]))


def parse_prompt(value: RecordFields, place: str) -> GroupRecord:
    for name in REWARD_ARGUMENTS:
        if name in value:
            raise InputError(f"field {name} has the name of an argument of reward functions; rename it")
    prompt = parse_part(value, "prompt", images=False)
    columns = {name: content for name, content in value.items() if name != "prompt"}
    return group(value, prompt, {}, place, columns=columns)


def parse_distillation(value: RecordFields, place: str) -> TeacherRecord:
    record = KNOWN_FIELDS.parse(value, place)
    ids, logprobs = (value.get(field) for field in TEACHER)
    if (ids is None) != (logprobs is None):
        raise InputError(f"has only one of the fields {' and '.join(TEACHER)}; give both")
    if ids is not None:
        check_teacher(ids, logprobs)
    return TeacherRecord(record, ids, logprobs)  # type: ignore[arg-type]


def check_teacher(ids: Any, logprobs: Any) -> None:
    """Raises InputError unless both are lists of equally long lists, of integers and of numbers."""
    for field, rows, kinds in ((TEACHER[0], ids, int), (TEACHER[1], logprobs, (int, float))):
        shaped = isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows)
        if not shaped or not all(isinstance(x, kinds) for row in rows for x in row):
            raise InputError(f"field {field} must be a list with a list of k numbers for each supervised token")
    if not all(is_logprob(x) for row in logprobs for x in row):
        raise InputError(f"field {TEACHER[1]} has NaN, or a number far from 0 or above it; must be log-probabilities")
    widths = {len(row) for row in (*ids, *logprobs)}
    if len(ids) != len(logprobs) or len(widths) != 1:
        raise InputError(f"fields {' and '.join(TEACHER)} must have the same number of tokens, and of k for each token")
    for index, (row, numbers) in enumerate(zip(ids, logprobs, strict=True)):
        possible = [token for token, number in zip(row, numbers, strict=True) if number > -math.inf]
        if len(set(possible)) < len(possible):
            raise InputError(f"field {TEACHER[0]}[{index}] has a token twice; give each one probability")


def is_logprob(number: float) -> bool:
    """Whether a number is one in fp32, by rounding a little above 0; -inf is that of a probability of 0."""
    return -(2.0**127) < number < 1 or number == -math.inf


def group(
    record: RecordFields, prompt: Part, completions: Mapping[str, Part], place: str, **others: Any
) -> GroupRecord:
    """Makes the group of a record. completions: maps the names of their fields to them.

    Raises InputError for an empty completion, and for a prompt that ends with the assistant.
    """
    if not prompt:
        raise InputError("field prompt is empty; a completion needs something that it completes")
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise InputError(
            "field prompt ends with a message of the assistant; move it to the beginning of the completions"
        )
    tools, variables = parse_tools(record.get("tools")), parse_template_kwargs(record.get("chat_template_kwargs"))
    if isinstance(prompt, str) and completions:
        for field, option in (("tools", tools), ("chat_template_kwargs", variables)):
            if option:
                raise InputError(f"field {field} has no effect on strings; make prompt and answers lists of messages")
    for field, completion in completions.items():
        if is_empty(completion):
            raise InputError(f"field {field} is empty; remove the record, or skip it with --allow-bad-lines")
        if isinstance(completion, list) and completion[-1]["role"] != "assistant":
            raise InputError(f"field {field} must end with a message of the assistant")
        if isinstance(completion, list) and completion[0]["role"] != "assistant":
            role = completion[0]["role"]
            raise InputError(
                f"field {field}: behind the prompt comes a message of the {role}; give all completions of a record the "
                "same prompt, which ends before a message of the assistant"
            )
    (prompt, *answers), images = take_group_images({"prompt": prompt, **completions}, record_images(record))
    return GroupRecord(prompt, tuple(answers), place, tools, variables, images=images, **others)


def is_empty(completion: Part) -> bool:
    if isinstance(completion, str):
        return not completion
    return not any(message["content"] or message.get("tool_calls") for message in completion)


def parse_part(value: RecordFields, field: str, *, images: bool = True) -> Part:
    """Parses the text or the messages of a field. images: allows image parts in messages."""
    content = value[field]
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        raise InputError(f"field {field} is a single message; make it a list of messages: [{{…}}]")
    if not isinstance(content, list):
        raise InputError(f"field {field} is {json_type(content)}; must be a string or a list of messages")
    return parse_messages(content, field, images=images)


def refuse_mixed(parts: Mapping[str, Part]) -> None:
    texts = [field for field, part in parts.items() if isinstance(part, str)]
    chats = [field for field in parts if field not in texts]
    if texts and chats:
        hint = ""
        if texts == ["prompt"]:
            hint = (
                ', such as [{"role": "user", "content": …}]; leave out prompt if the lists have the whole conversation'
            )
        raise InputError(
            f"field {texts[0]} is a string, but {chats[0]} is a list of messages; make {texts[0]} a list of messages"
            f"{hint}"
        )


def refuse_repeated_prompt(prompt: Part, sides: Mapping[str, Part]) -> None:
    """Raises InputError for sides that repeat the messages of the prompt. A text may well begin as its prompt does."""
    if isinstance(prompt, list) and all(side[: len(prompt)] == prompt for side in sides.values()):
        raise InputError(
            "fields chosen and rejected repeat the messages of prompt; leave out prompt, which is then found in them"
        )


def refuse_other_prompt(value: RecordFields, chosen: Part, rejected: Part) -> None:
    """Raises InputError for a prompt of another name that is not in what both sides begin with."""
    for field in OTHER_PROMPTS:
        text = value.get(field)
        if text and not (isinstance(text, str) and all(begins_with(side, text.strip()) for side in (chosen, rejected))):
            remedy = "put it into the prompt" if field in BEFORE_PROMPTS else "rename it to prompt"
            raise InputError(f"field {field} is beside chosen and rejected; {remedy}")


def begins_with(side: Part, text: str) -> bool:
    if isinstance(side, str):
        return side.lstrip().startswith(text)
    return any(text in content for content in message_texts(side[:-1]))


def split_at_common_start(chosen: Part, rejected: Part) -> tuple[Part, Part, Part]:
    """Returns (prompt, chosen, rejected). The messages, or the characters, that both sides begin with are the prompt.

    A blank at the end of a text's prompt belongs to the answers, as in TRL: tokenizers write it with the next word. If
    one side is all that the other begins with, its last message or character is its answer.
    """
    pairs, shorter = zip(chosen, rejected, strict=False), min(len(chosen), len(rejected))
    size = next((i for i, (a, b) in enumerate(pairs) if a != b), max(shorter - 1, 0))
    if isinstance(chosen, str):
        size -= chosen[:size].endswith(" ")
    if not size:
        raise InputError("has no field prompt, and chosen and rejected begin differently; add the field prompt")
    return chosen[:size], chosen[size:], rejected[size:]


def parse_margin(value: RecordFields) -> float | None:
    margin = value.get("margin")
    if margin is None:
        return None
    try:
        number = float(margin)  # in CSV it is text
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"field margin is {json_type(margin)}; must be a number") from None
    if not abs(number) <= MOST_MARGIN:
        raise InputError(f"field margin is {number}; must be a finite number of 32 bits")
    return number


def parse_label(label: Any) -> float:
    """1.0 for a good completion, 0.0 for a bad one; in CSV it is text."""
    text = str(label).lower()
    if text not in ("true", "false") or not isinstance(label, bool | str):
        raise InputError(f"field label is {label!r}; must be true for a good completion or false for a bad one")
    return float(text == "true")


NEEDED: dict[GroupKind, tuple[tuple[str, ...], ...]] = {
    "pairs": (PAIR,),
    "judged": (JUDGED, PAIR),
    "prompts": (("prompt",),),
}
GROUP_PARSERS: dict[GroupKind, Callable[[RecordFields, str], GroupRecord]] = {
    "pairs": parse_pair, "judged": parse_judged, "prompts": parse_prompt,
}  # fmt: skip
