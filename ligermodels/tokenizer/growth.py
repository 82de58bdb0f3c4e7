"""How much longer a tokenizer's components make a text, computed from their settings before any text is encoded.

A hostile tokenizer.json can make gigabytes of a short text: by replacing a letter by a megabyte, or by a million tokens
around each text. Ordinary components make a text no longer, apart from Unicode's own normalisation.
"""

import base64
import functools
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers

from ligermodels.errors import InputError
from ligermodels.weights.reading import without_escapes

MAX_COMPONENT_BYTES = 2**22  # of the JSON of a component; the largest, a SentencePiece character map, has 0.4 MB
MAX_TOKEN_CHARACTERS = 2**12  # the library copies the text of a token for each of its occurrences
MAX_ADDED_TOKEN_BYTES = 2**22  # the library makes an automaton of added tokens that has 70 times their bytes
# Added tokens as tokenizer.json has them, and letters that are written as escapes: no program writes names so.
ADDED_TOKEN, ESCAPED_LETTER = (
    re.compile(rb'"content"\s*:\s*"[^"]*"'),
    re.compile(rb"\\u00(?:[46][1-9a-f]|[57][0-9a])", re.IGNORECASE),
)
MAX_FACTOR = 8  # two replacements that may each insert a character between any two, and one that doubles the text
MAX_ADDED = 1000
COMPONENTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
PARTS_OF_SEQUENCE = ("normalizers", "pretokenizers", "processors", "decoders")


class Growth(NamedTuple):
    """n characters or tokens become at most factor * n + added."""

    factor: float = 1.0
    added: float = 0.0

    def then(self, following: "Growth") -> "Growth":
        return Growth(self.factor * following.factor, self.added * following.factor + following.added)


def refuse_growth(tokenizer: tokenizers.Tokenizer) -> None:
    """Raises InputError, which names the component, if a short text or a few tokens could become a very long one."""
    for name in COMPONENTS:
        component = getattr(tokenizer, name)
        settings = b"null" if component is None else component.__getstate__()
        if len(settings) > MAX_COMPONENT_BYTES:
            raise InputError(f"field {name} has {len(settings)} bytes, more than {MAX_COMPONENT_BYTES}")
        factor, added = growth_of(json.loads(settings) or {})
        if factor > MAX_FACTOR or added > MAX_ADDED:
            raise InputError(
                f"field {name} may make a text {factor:g} times as long and {added:g} longer; at most {MAX_FACTOR} "
                f"times and {MAX_ADDED} are supported"
            )


def refuse_long_added_tokens(data: bytes) -> None:
    """Raises InputError, before the library reads this tokenizer.json, if its added tokens are too long in all."""
    if len(data) <= MAX_ADDED_TOKEN_BYTES:
        return
    plain = without_escapes(data)
    if ESCAPED_LETTER.search(plain):
        raise InputError("writes letters as escapes such as \\u0061; write them as letters")
    refuse_long_in_all(sum(map(len, ADDED_TOKEN.findall(plain))))


def refuse_long_in_all(size: int) -> None:
    """Raises InputError for added tokens that have so many bytes in all, if the library would need gigabytes."""
    if size > MAX_ADDED_TOKEN_BYTES:
        raise InputError(f"its added tokens have {size:,} bytes in all, more than {MAX_ADDED_TOKEN_BYTES:,}")


def refuse_long_tokens(tokenizer: tokenizers.Tokenizer) -> None:
    """Raises InputError if a token has more than MAX_TOKEN_CHARACTERS."""
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        raise InputError(f"a token has {longest} characters, more than {MAX_TOKEN_CHARACTERS}")


def growth_of(component: Mapping[str, Any]) -> Growth:
    """The growth by a component, from its settings as tokenizer.json has them."""
    match component:
        case {"type": "Sequence"}:
            parts = next(component[field] for field in PARTS_OF_SEQUENCE if field in component)
            return functools.reduce(Growth.then, map(growth_of, parts), Growth())
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if pattern:
            return Growth(max(1.0, len(content) / len(pattern)))
        case {"type": "Replace", "content": str(content)}:  # a regular expression may match between any two characters
            return Growth(1.0 + len(content))
        case {"type": "Prepend", "prepend": str(text)}:
            return Growth(added=len(text))
        case {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:
            return Growth(longest_replacement(base64.b64decode(encoded)))
        case {"type": "TemplateProcessing", "single": list(pieces), "special_tokens": dict(special)}:
            tokens = [special[piece["SpecialToken"]["id"]] for piece in pieces if "SpecialToken" in piece]
            return Growth(len(pieces) - len(tokens), sum(len(token["ids"]) for token in tokens))
    return Growth()


def longest_replacement(charsmap: bytes) -> int:
    """The characters of the longest text that a SentencePiece character map puts in place of one. The map is the length
    of a trie as 4 little-endian bytes, the trie, and the texts, each followed by a zero."""
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(map(len, texts.split(b"\0")))
