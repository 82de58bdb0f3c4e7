"""Prompts of PaliGemma: a prefix of images and text, which a chat template does not write, then its completion.

    <image> … <image> <bos> prompt <line break> | completion <eos>

The completion is tokenised by itself, as in transformers 5. A conversation is such a prompt if it has one question with
images and at most its answer. Must not know pixels, files or tokens.
Source: PaliGemma, https://arxiv.org/abs/2407.07726, section 3.2.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ligermodels.errors import InputError
from ligermodels.images.parts import is_image_part

PREFIX_END = "\n"


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
