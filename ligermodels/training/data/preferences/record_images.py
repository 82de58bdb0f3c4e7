"""The images of a record of groups, part by part: those in messages, and those beside them as TRL has them.

Image parts without an image take the next of the images beside them: first those of the prompt, then those of each
completion. Without such parts, and without marks <image>, images beside messages stand before the text of the prompt's
first message of the user. A text has the model's own image token for each image. Must not know tokens or files.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ligermodels.errors import InputError
from ligermodels.images.parts import image_places, is_image_part, parse_source, take_images, template_part
from ligermodels.images.reading import ImageSource
from ligermodels.training.data.formats.record_formats import has_image_parts, with_images_first, with_marked_images

Part: TypeAlias = str | list[dict[str, Any]]  # a text, or messages


def take_group_images(
    parts: Mapping[str, Part], beside: Sequence[Any]
) -> tuple[list[Part], tuple[list[ImageSource], ...]]:
    """The prompt and its completions as chat templates get them, and the images of each; no images at all: ().

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
    """How many image parts of messages have no image of their own."""
    places = image_places([dict(message) for message in messages], field)
    return sum(is_image_part(part) and template_part(part, place)[1] is None for place, part, _, _ in places)
