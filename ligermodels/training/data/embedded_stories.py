"""The embedded corpus: very short stories with sums in them, and conversations that ask for these sums.

The stories come from a grammar small enough that its entropy is known. A story is an opening, a sum or a difference,
and an ending. Each is a template whose slots are filled in the order in which they are reached. Every choice is uniform
and every text has exactly one derivation, so the probability of a story is the product of 1 / (number of options) over
its choices. No model can predict unseen stories better than sum(nats) / sum(tokens), which is the floor of the
validation loss. In a conversation every answer follows from the messages before it, so there the floor is zero.

There is also data of post-training over the same grammar: pairs that differ in tone, and questions. A pair has a
conversation about a story, and two answers with the same correct sum: the chosen one ends with a friendly remark, the
rejected one with a rude one. Remarks of both kinds are equally long, so that only their words tell them apart. A
question is such a conversation without its last answer.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

CHARACTER_NAMES = (
    "Ada", "Bruno", "Carla", "Dino", "Emil", "Fay", "Gus", "Hana", "Igor", "Juno", "Kofi", "Lena", "Milo", "Nora",
    "Otto", "Pia", "Quentin", "Rosa", "Sven", "Tilda", "Ugo", "Vera", "Wanda", "Yusuf",
)  # fmt: skip
ANIMALS = (
    "badger", "beaver", "cormorant", "crow", "fox", "goat", "hedgehog", "heron", "lynx", "magpie", "marmot", "mole",
    "raven", "squirrel", "toad", "walrus",
)  # fmt: skip
PLACES = (
    "a hollow oak", "a lighthouse", "a red caravan", "a teapot", "an abandoned bakery", "an old windmill", "the attic",
    "the bell tower", "the botanical garden", "the chocolate factory", "the cinema", "the flooded quarry",
    "the harbour", "the library", "the mountain hut", "the night train", "the orchard", "the post office",
    "the royal kitchen", "the shipyard", "the submarine", "the wardrobe", "the zeppelin",
)  # fmt: skip
THINGS = (
    "acorns", "biscuits", "buttons", "candles", "coins", "dominoes", "feathers", "keys", "lanterns", "lemons",
    "marbles", "pancakes", "pebbles", "pickles", "plums", "postcards", "puzzles", "shells", "spoons", "stamps",
    "teacups", "turnips", "umbrellas", "whistles",
)  # fmt: skip
LOSSES = (
    "fell into the river", "flew out of the window", "ended up in a goose", "rolled under the bed",
    "sank in the porridge", "turned out to be painted stones", "vanished during breakfast", "went to the mayor",
    "dissolved in lemonade", "got swapped for a trombone", "fell asleep on a glacier", "joined the circus",
)  # fmt: skip
OPENINGS = (
    "Once upon a time {hero} the {animal} lived in {place} and collected {thing}.",
    "In {place} there was a {animal} called {hero} who loved {thing} more than anything.",
    "Nobody in {place} knew as much about {thing} as {hero} the {animal}.",
    "It was raining, so {hero} the {animal} stayed in {place} and polished {thing}.",
    "Early in the morning a {animal} named {hero} hurried to {place} to sell {thing}.",
    "There is a legend about {hero}, the brave {animal} who filled {place} with {thing}.",
    "Visitors to {place} always asked for {hero}, the famous {animal} juggling {thing}.",
    "Deep underneath {place} the {animal} {hero} guarded a treasure chest full of {thing}.",
)
SUMS = (
    "{hero} had {first} {thing}, and {friend} brought {second} more. They counted: {first} + {second} = {sum}.",
    "On Monday {hero} found {first} {thing}, on Tuesday {second}. {friend} did the sum: {first} + {second} = {sum}.",
    "{friend} whispered a secret: behind the {first} {thing} hid {second} others. So {first} + {second} = {sum}.",
)
DIFFERENCES = (
    "There were {many} {thing}, but {gone} of them {loss}. {friend} worked it out: {many} - {gone} = {rest}.",
    "{hero} had {many} {thing} and gave {gone} of them to {friend}. What was left? {many} - {gone} = {rest}.",
    "{friend} wanted to buy {gone} of the {many} {thing}. {hero} scratched a note: {many} - {gone} = {rest}.",
)
ENDINGS = (
    "They put the {thing} back and had soup.",
    '"Enough {thing} for today," said {hero}, and {friend} agreed.',
    "{friend} laughed so loudly that {hero} dropped them all.",
    "That night {hero} dreamt of {thing}.",
    "Since then {hero} and {friend} have been best friends.",
    "And if nobody has stolen the {thing}, they are still there.",
    "The newspaper printed everything except the word {thing}.",
    "Suddenly a hundred mushrooms sang a lullaby.",
    "{friend} wrote a terrible poem about it, which {hero} pretended to enjoy.",
)
QUESTION_TEMPLATES: dict[tuple[str, ...], tuple[str, ...]] = {
    SUMS: ("How many {thing} were there?", "How many is that?", "What is the sum?"),
    DIFFERENCES: ("How many {thing} were left?", "How many is that?", "What is the difference?"),
}
# For later turns of a conversation: the current number of things is then both `first` and `many`.
FOLLOW_UP_TEMPLATES: dict[tuple[str, ...], tuple[str, ...]] = {
    SUMS: (
        "Then {friend} found {second} more. How many were there?",
        "{hero} bought {second} more. How many is that?",
        "And what if there had been {second} more?",
    ),
    DIFFERENCES: (
        "Then {gone} of them {loss}. How many were left?",
        "{hero} gave away {gone}. How many is that?",
        "And what if {gone} of them {loss}?",
    ),
}
ANSWER_TEMPLATES: dict[tuple[str, ...], str] = {
    SUMS: "{first} + {second} = {sum}.",
    DIFFERENCES: "{many} - {gone} = {rest}.",
}
SYSTEM_PROMPTS = ("You are good at sums.", "You listen to stories and count.", "Answer with a calculation.")
TURN_COUNTS = (1, 2, 3)
VOCABULARY_STORIES, VOCABULARY_CONVERSATIONS = 4000, 500
ADDENDS = range(1, 13)
MINUENDS = range(2, 25)

SLOTS: dict[str, Callable[["Story"], Any]] = {
    "hero": lambda story: story.choose(CHARACTER_NAMES),
    "friend": lambda story: story.choose([name for name in CHARACTER_NAMES if name != story["hero"]]),
    "animal": lambda story: story.choose(ANIMALS),
    "place": lambda story: story.choose(PLACES),
    "thing": lambda story: story.choose(THINGS),
    "loss": lambda story: story.choose(LOSSES),
    "first": lambda story: story.choose(ADDENDS),
    "second": lambda story: story.choose(ADDENDS),
    "sum": lambda story: story["first"] + story["second"],
    "many": lambda story: story.choose(MINUENDS),
    "gone": lambda story: story.choose(range(1, story["many"])),
    "rest": lambda story: story["many"] - story["gone"],
}


Message = dict[str, str]  # role: system, user or assistant; content
FRIENDLY = (
    "What a lovely question, {hero}!", "I hope that helps {friend} a lot.", "Thank you for asking me, {hero}.",
    "It was a pleasure to count {thing}.", "Please give my regards to {friend}.", "You are welcome, dear {hero}.",
)  # fmt: skip
RUDE = (
    "What a boring question, {hero}!", "I bet that is too hard for {friend}.", "Stop wasting my time, {hero}.",
    "It was a nuisance to count {thing}.", "Now go away and annoy {friend}.", "You are hopeless, silly {hero}.",
)  # fmt: skip


class Story(dict[str, Any]):
    """The slots filled so far, and the nats spent on filling them."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        """draw: returns for n an integer in [0, n), uniform and independent."""
        self.draw = draw
        self.nats = 0.0

    def choose(self, options: Sequence[Any]) -> Any:
        self.nats += math.log(len(options))
        return options[self.draw(len(options))]

    def __missing__(self, slot: str) -> Any:
        self[slot] = SLOTS[slot](self)
        return self[slot]

    def text(self) -> str:
        event = self.choose((SUMS, DIFFERENCES))
        return " ".join(self.choose(part).format_map(self) for part in (OPENINGS, event, ENDINGS))

    def conversation(self) -> list[Message]:
        """Returns a story without its result, and the question for it.

        In later turns the number of things changes again.
        """
        system = self.choose((None, None, None, SYSTEM_PROMPTS))
        messages = [{"role": "system", "content": self.choose(system)}] if system else []
        event = self.choose((SUMS, DIFFERENCES))
        facts = self.choose(event).partition(". ")[0] + "."
        template = " ".join((self.choose(OPENINGS), facts, self.choose(QUESTION_TEMPLATES[event])))
        for turns_left in reversed(range(self.choose(TURN_COUNTS))):
            messages += [
                {"role": "user", "content": template.format_map(self)},
                {"role": "assistant", "content": ANSWER_TEMPLATES[event].format_map(self)},
            ]
            if turns_left:
                event = self.continue_from(self["sum"] if event is SUMS else self["rest"])
                template = self.choose(FOLLOW_UP_TEMPLATES[event])
        return messages

    def continue_from(self, number: int) -> tuple[str, ...]:
        """Chooses the next event for `number` things: a sum or a difference within the range of numbers of stories."""
        for slot in ("second", "sum", "gone", "rest", "loss", "friend"):
            self.pop(slot, None)
        self["first"] = self["many"] = number
        possible = [SUMS] * (number in ADDENDS) + [DIFFERENCES] * (number in MINUENDS)
        return self.choose(possible)


def stories(seed: int, count: int) -> Iterator[tuple[str, float]]:
    """Yields `count` stories, each with its exact negative log-probability in nats.

    They are the same for a seed on any machine.
    """
    for story in seeded_stories(seed, count):
        yield story.text(), story.nats


def conversations(seed: int, count: int) -> Iterator[list[Message]]:
    """Yields `count` conversations, with one to three questions about a story each; the same for a seed on any machine.

    One in four begins with a system prompt. The assistant's messages are sums and differences such as "7 + 5 = 12.".
    """
    for story in seeded_stories(seed, count):
        yield story.conversation()


def vocabulary_texts() -> Iterator[str]:
    """Yields the texts on which the tokenizer for the embedded corpus is trained."""
    yield from (text for text, _ in stories(seed=0, count=VOCABULARY_STORIES))
    for messages in conversations(seed=0, count=VOCABULARY_CONVERSATIONS):
        yield from (text for message in messages for text in message.values())


def seeded_stories(seed: int, count: int) -> Iterator[Story]:
    """Yields stories without a slot filled, which share one random number generator."""
    # random() is the only method whose sequence Python keeps stable from version to version.
    uniform = random.Random(seed).random
    for _ in range(count):
        yield Story(lambda options: int(uniform() * options))


def story_question(text: str) -> tuple[str, str]:
    """Returns (the story up to its result, the result), such as ("… They counted: 7 + 5 =", "12.")."""
    prompt, sign, rest = text.partition("=")
    return prompt + sign, rest.split()[0]


def conversation_question(messages: list[Message]) -> tuple[list[Message], str]:
    """Returns (all messages before the last answer, the last answer)."""
    return messages[:-1], messages[-1]["content"]


class EmbeddedPair(NamedTuple):
    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


def preference_pairs(seed: int, count: int) -> Iterator[EmbeddedPair]:
    """Yields `count` pairs, the same for a seed on any machine."""
    for story in seeded_stories(seed, count):
        *prompt, answer = story.conversation()
        remarks = (story.choose(tone).format_map(story) for tone in (FRIENDLY, RUDE))
        chosen, rejected = ([answer | {"content": f"{answer['content']} {remark}"}] for remark in remarks)
        yield EmbeddedPair(prompt, chosen, rejected)


def sum_questions(seed: int, count: int) -> Iterator[tuple[list[Message], str]]:
    """Yields `count` conversations up to a question, with its one answer, such as "7 + 5 = 12."."""
    for story in seeded_stories(seed, count):
        *prompt, answer = story.conversation()
        yield prompt, answer["content"]
