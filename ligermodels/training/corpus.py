"""The embedded corpus: very short stories with sums in them, from a grammar small enough that its entropy is known.

A story is an opening, a sum or a difference, and an ending, each a template whose slots are filled as they are reached.
Every choice is uniform and no text has two derivations, so a story's probability is the product of 1 / (number of
options) over its choices, and nobody can predict unseen stories better than Σ nats / Σ tokens: the floor of the
validation loss.
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


def stories(seed: int, count: int) -> Iterator[tuple[str, float]]:
    """`count` stories, each with its exact negative log-probability in nats; the same for a seed everywhere."""
    # random() is the one method whose sequence Python promises to keep from version to version.
    uniform = random.Random(seed).random
    for _ in range(count):
        story = Story(lambda options: int(uniform() * options))
        yield story.tell(), story.nats
