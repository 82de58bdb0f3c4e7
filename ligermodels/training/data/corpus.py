"""The embedded corpus: very short stories with sums in them, from a grammar small enough that its entropy is known, and
conversations about such stories, in which the sums are asked for.

A story is an opening, a sum or a difference, and an ending, each a template whose slots are filled as they are reached.
Every choice is uniform and no text has two derivations, so a story's probability is the product of 1 / (number of
options) over its choices, and nobody can predict unseen stories better than Σ nats / Σ tokens: the floor of the
validation loss. Every answer in a conversation follows from what was said before it: there the floor is zero.
Must not know tokens or models.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

NAMES = (
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
QUESTIONS: dict[tuple[str, ...], tuple[str, ...]] = {
    SUMS: ("How many {thing} were there?", "How many is that?", "What is the sum?"),
    DIFFERENCES: ("How many {thing} were left?", "How many is that?", "What is the difference?"),
}
# Of a conversation that goes on: the number of things there are by now has become `first` and `many`.
FURTHER_QUESTIONS: dict[tuple[str, ...], tuple[str, ...]] = {
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
ANSWERS: dict[tuple[str, ...], str] = {SUMS: "{first} + {second} = {sum}.", DIFFERENCES: "{many} - {gone} = {rest}."}
SYSTEM_PROMPTS = ("You are good at sums.", "You listen to stories and count.", "Answer with a calculation.")
TURNS = (1, 2, 3)
VOCABULARY_STORIES, VOCABULARY_CONVERSATIONS = 4000, 500
ADDENDS = range(1, 13)
MINUENDS = range(2, 25)

SLOTS: dict[str, Callable[["Story"], Any]] = {
    "hero": lambda story: story.choose(NAMES),
    "friend": lambda story: story.choose([name for name in NAMES if name != story["hero"]]),
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


class Story(dict[str, Any]):
    """The slots filled so far, and the nats spent on filling them."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        """draw: n -> an integer in [0, n), uniform and independent."""
        self.draw = draw
        self.nats = 0.0

    def choose(self, options: Sequence[Any]) -> Any:
        self.nats += math.log(len(options))
        return options[self.draw(len(options))]

    def __missing__(self, slot: str) -> Any:
        self[slot] = SLOTS[slot](self)
        return self[slot]

    def tell(self) -> str:
        event = self.choose((SUMS, DIFFERENCES))
        return " ".join(self.choose(part).format_map(self) for part in (OPENINGS, event, ENDINGS))

    def discuss(self) -> list[Message]:
        """A story without its result, which is asked for; then there are more or fewer things, and so on."""
        system = self.choose((None, None, None, SYSTEM_PROMPTS))
        messages = [{"role": "system", "content": self.choose(system)}] if system else []
        event = self.choose((SUMS, DIFFERENCES))
        facts = self.choose(event).partition(". ")[0] + "."
        said = " ".join((self.choose(OPENINGS), facts, self.choose(QUESTIONS[event])))
        for further in reversed(range(self.choose(TURNS))):
            messages += [
                {"role": "user", "content": said.format_map(self)},
                {"role": "assistant", "content": ANSWERS[event].format_map(self)},
            ]
            if further:
                event = self.go_on_from(self["sum"] if event is SUMS else self["rest"])
                said = self.choose(FURTHER_QUESTIONS[event])
        return messages

    def go_on_from(self, number: int) -> tuple[str, ...]:
        """What happens next to `number` things: of sums and differences what stays within the numbers of stories."""
        for slot in ("second", "sum", "gone", "rest", "loss", "friend"):
            self.pop(slot, None)
        self["first"] = self["many"] = number
        possible = [SUMS] * (number in ADDENDS) + [DIFFERENCES] * (number in MINUENDS)
        return self.choose(possible)


def stories(seed: int, count: int) -> Iterator[tuple[str, float]]:
    """`count` stories, each with its exact negative log-probability in nats; the same for a seed everywhere."""
    for story in blank_stories(seed, count):
        yield story.tell(), story.nats


def conversations(seed: int, count: int) -> Iterator[list[Message]]:
    """`count` conversations, of one to three questions about a story each; the same for a seed everywhere.

    One in four begins with a system prompt. The assistant's messages are sums and differences, as "7 + 5 = 12.".
    """
    for story in blank_stories(seed, count):
        yield story.discuss()


def vocabulary_texts() -> Iterator[str]:
    """What the vocabulary of a tokenizer for all this is made of."""
    yield from (text for text, _ in stories(seed=0, count=VOCABULARY_STORIES))
    for messages in conversations(seed=0, count=VOCABULARY_CONVERSATIONS):
        yield from (text for message in messages for text in message.values())


def blank_stories(seed: int, count: int) -> Iterator[Story]:
    # random() is the one method whose sequence Python promises to keep from version to version.
    uniform = random.Random(seed).random
    for _ in range(count):
        yield Story(lambda options: int(uniform() * options))


def asked_in_story(text: str) -> tuple[str, str]:
    """(the story up to its result, the result), as ("… They counted: 7 + 5 =", "12.")."""
    prompt, sign, rest = text.partition("=")
    return prompt + sign, rest.split()[0]


def asked_in_conversation(messages: list[Message]) -> tuple[list[Message], str]:
    """(all up to the last answer, that answer)."""
    return messages[:-1], messages[-1]["content"]
