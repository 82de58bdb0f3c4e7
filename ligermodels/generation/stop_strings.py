"""Stop strings in text that arrives in pieces. Must not know tokens."""

from collections.abc import Sequence


class StopStrings:
    """The text of one row up to its first stop string.

    A piece of text becomes visible as soon as it cannot be part of a stop string. The first stop string is the one that
    ends first, as if the text came character by character; of those that end together, the longest. The result does
    not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.held = ""  # may be the beginning of a stop string
        self.matched: str | None = None  # the stop string that was found

    def step(self, piece: str) -> str:
        """The text that becomes visible with this piece; "" after a stop string."""
        if self.matched is not None:
            return ""
        text = self.held + piece
        found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self.stops if stop in text]
        if found:
            end, _, self.matched = min(found)
            self.held = ""
            return text[: end - len(self.matched)]
        visible = len(text) - max((beginning_at_end(text, stop) for stop in self.stops), default=0)
        self.held = text[visible:]
        return text[:visible]

    def end(self) -> str:
        """The text that was held back, when no more comes."""
        held, self.held = self.held, ""
        return held


def beginning_at_end(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`; less than all of it."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
