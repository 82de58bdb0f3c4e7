"""Embedded data of post-training, over the grammar of the stories: pairs that differ in tone, and questions.

A pair has a conversation about a story, and two answers with the same correct sum: the chosen one ends with a friendly
remark, the rejected one with a rude one. Remarks of both kinds are equally long, so that only their words tell them
apart. A question is such a conversation without its last answer. This module knows nothing about tokens or models.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ligermodels.training.data.embedded.embedded_stories import Message, seeded_stories

FRIENDLY = (
    "What a lovely question, {hero}!", "I hope that helps {friend} a lot.", "Thank you for asking me, {hero}.",
    "It was a pleasure to count {thing}.", "Please give my regards to {friend}.", "You are welcome, dear {hero}.",
)  # fmt: skip
RUDE = (
    "What a boring question, {hero}!", "I bet that is too hard for {friend}.", "Stop wasting my time, {hero}.",
    "It was a nuisance to count {thing}.", "Now go away and annoy {friend}.", "You are hopeless, silly {hero}.",
)  # fmt: skip


class EmbeddedPair(NamedTuple):
    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def preference_pairs(seed: int, count: int) -> Iterator[EmbeddedPair]:
    """`count` pairs, the same for a seed on any machine."""
    for story in seeded_stories(seed, count):
        *prompt, answer = story.conversation()
        remarks = (story.choose(tone).format_map(story) for tone in (FRIENDLY, RUDE))
        chosen, rejected = ([answer | {"content": f"{answer['content']} {remark}"}] for remark in remarks)
        yield EmbeddedPair(prompt, chosen, rejected)


def sum_questions(seed: int, count: int) -> Iterator[tuple[list[Message], str]]:
    """`count` conversations up to a question, with its one answer, such as "7 + 5 = 12."."""
    for story in seeded_stories(seed, count):
        *prompt, answer = story.conversation()
        yield prompt, answer["content"]
