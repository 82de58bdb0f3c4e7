"""Images in messages: the parts of a message's content that are images, and where each image comes from.

    {"type": "image"}                                   the next of the images that are given beside the messages
    {"type": "image", "image": …}                       or path, url or bytes in place of image
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}                                   OpenAI
    {"type": "text", "text": "…"}

An image is a path, a data URL, the bytes of a file, a PIL image, or {"bytes": …, "path": …} as in Hugging Face
datasets. Fields that are null count as missing.

Prompts of PaliGemma (https://arxiv.org/abs/2407.07726, section 3.2) are a prefix of images and text, which a chat
template does not write, then its completion:

    <image> … <image> <bos> prompt <line break> | completion <eos>

The completion is tokenised by itself, as in transformers 5. A conversation is such a prompt if it has one question with
images and at most its answer.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ligermodels.errors import InputError
from ligermodels.images.reading import ImageSource

SOURCE_FIELDS = ("image", "path", "url", "bytes")
PART_EXAMPLE = '{"type": "text", "text": "…"} or {"type": "image", "image": "file.png"}'
IMAGE_PART = {"type": "image"}  # as chat templates get it
PREFIX_END = "\n"


def is_image_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def template_part(part: Any, field: str) -> tuple[dict[str, Any], Any]:
    """A part as chat templates get it, and its image; None for text, and for an image that is given elsewhere."""
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}, None
        case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "image_url", "image_url": str(url)}:
            return dict(IMAGE_PART), url
        case {"type": "image"}:
            given = [part[name] for name in SOURCE_FIELDS if part.get(name) is not None]
            if len(given) > 1:
                raise InputError(f"field {field} has more than one of {', '.join(SOURCE_FIELDS)}; leave one")
            return dict(IMAGE_PART), given[0] if given else None
    found = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InputError(f"field {field} is {found!r}; must be {PART_EXAMPLE}")


def parse_source(value: Any, field: str) -> ImageSource:
    """An image as `read_image` takes it; a path stays as it is. Raises InputError."""
    match value:
        case {"bytes": bytes(content)}:
            return content
        case {"path": str(path)} | {"url": str(path)}:
            return parse_source(path, field)
        case str():
            return parse_url(value, field)
        case bytes() | Path():
            return value
    if hasattr(value, "tobytes") and hasattr(value, "convert"):  # a PIL image, without an import of Pillow
        return value
    raise InputError(f"field {field} is {type(value).__name__}; must be a path, a data URL, bytes, or a PIL image")


def is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def images_by_text(images: Any, texts: int) -> list[list[Any]]:
    """The images of each of `texts` texts. One text also takes an image alone, and a flat list. Raises InputError."""
    if images is None or (is_list(images) and not images):
        return [[] for _ in range(texts)]
    remedy = "give a list of images for each text"
    if not is_list(images):
        if texts != 1:
            raise InputError(f"images: is one image for {texts} texts; {remedy}")
        return [[images]]
    lists = sum(entry is None or is_list(entry) for entry in images)
    if not lists:
        if texts != 1:
            raise InputError(f"images: is a flat list for {texts} texts; {remedy}")
        return [list(images)]
    if lists < len(images):
        raise InputError(f"images: has both images and lists of images; {remedy}")
    if len(images) != texts:
        raise InputError(f"images: has {len(images)} lists for {texts} texts; give one for each")
    return [list(entry or ()) for entry in images]


def parse_url(text: str, field: str) -> ImageSource:
    """The bytes in a data URL; any other text is a path. Nothing is downloaded."""
    if text.startswith(("http://", "https://")):
        raise InputError(f"field {field} is the address {text}; download the image, and give its path")
    if not text.startswith("data:"):
        return text.removeprefix("file://")
    head, comma, content = text.partition(",")
    if not comma or not head.endswith(";base64"):
        raise InputError(f"field {field} is a data URL without base64; must be data:image/png;base64,…")
    try:
        return base64.b64decode(content, validate=True)
    except ValueError as error:
        raise InputError(f"field {field} is a data URL that is not base64: {error}") from None


def take_images(
    messages: Sequence[Mapping[str, Any]], beside: Sequence[Any] = (), field: str = "messages"
) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Messages as chat templates get them, and their images in order.

    beside: the images that parts without one take, in order. field: names the messages in errors.
    Raises InputError naming the field, also if an image is left over or missing.
    """
    rest = iter(enumerate(beside))
    sources: list[ImageSource] = []
    taken = [dict(message) for message in messages]
    for place, part, message, index in image_places(taken, field):
        message["content"][index], value = template_part(part, place)
        if not is_image_part(part):
            continue
        if value is None:
            number, value = next(rest, (None, None))
            if number is None:
                raise InputError(f"field {place} is an image, but field images has only {len(beside)}; give the others")
            place = f"images[{number}]"
        sources.append(parse_source(value, place))
    left = len(list(rest))
    if left:
        raise InputError(f"field images has {len(beside)} images, {left} more than {field} has image parts")
    return taken, sources


def image_places(messages: list[dict[str, Any]], field: str) -> Iterator[tuple[str, Any, dict[str, Any], int]]:
    """The parts of all messages whose content is a list, which is copied: (place, part, message, index)."""
    for number, message in enumerate(messages):
        if is_list(message.get("content")):
            message["content"] = list(message["content"])
            for index, part in enumerate(message["content"]):
                yield f"{field}[{number}].content[{index}]", part, message, index


class Prefix(NamedTuple):
    """prompt: with a mark for each image. completion: None for a prompt to complete."""

    prompt: str
    completion: str | None = None


def prefix_text(prompt: str, images: int, mark: str, bos: str) -> str:
    """The text of a prompt with images. mark: stands for an image; images of a prompt without marks come first."""
    if mark not in prompt:
        prompt = mark * images + prompt
    before, _, behind = prompt.rpartition(mark)
    return f"{before}{mark}{bos}{behind}{PREFIX_END}"


def prefix_of_messages(messages: Sequence[Mapping[str, Any]], mark: str) -> Prefix:
    """The prompt and the completion of a question with images, and of its answer. Raises InputError for other chats."""
    roles = [message["role"] for message in messages]
    if roles not in (["user"], ["user", "assistant"]):
        raise InputError(
            f"messages: have the roles {', '.join(roles) or 'of none'}; the model takes a question with images and "
            "its answer: give one message of user, and at most one of assistant behind it"
        )
    return Prefix(*(marked_text(message["content"], mark) for message in messages))


def marked_text(content: str | Sequence[Mapping[str, Any]], mark: str) -> str:
    """The text of a message, with a mark for each of its images."""
    if isinstance(content, str):
        return content
    return "".join(mark if is_image_part(part) else part["text"] for part in content)
