"""Reads and validates the tokenizer files of a checkpoint folder.

    tokenizer.json              the complete tokenizer; without it, vocab.json and merges.txt of two known classes
    tokenizer_config.json       which tokens are bos, eos, pad and unk; further added tokens; the padding side
    special_tokens_map.json     the special tokens in an older format; added_tokens.json has the added tokens. Both are
                                read only if tokenizer_config.json has no added_tokens_decoder

As in transformers 5, tokenizer.json decides which tokens are put before and after a text; add_bos_token and
add_eos_token are used only without it. Truncation and padding settings of tokenizer.json are ignored.

A hostile tokenizer.json can make gigabytes of a short text: by replacing a letter by a megabyte, or by a million tokens
around each text. How much longer a tokenizer's components make a text is therefore computed from their settings before
any text is encoded. Ordinary components make it no longer, apart from Unicode's own normalisation.
"""

import base64
import functools
import json
import math
import re
import types
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from ligermodels.errors import CheckpointError, InputError, first_line
from ligermodels.tokenizer.chat_template import ChatTemplate, read_templates
from ligermodels.weights.reading import DOWNLOAD_AGAIN, read_bytes, read_json, refuse_text, safe_file, without_escapes

TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
VOCABULARY_FILE, MERGES_FILE = "vocab.json", "merges.txt"
SPECIAL_TOKENS_MAP_FILE, ADDED_TOKENS_FILE = "special_tokens_map.json", "added_tokens.json"
MAX_FILE_BYTES = 100_000_000  # three times the largest known file, Gemma 3's
MAX_VALUES = 3_000_000  # likewise one and a half times; `tokenizers` needs 300 bytes for each entry of a vocabulary
TOKEN_ID = re.compile("[0-9]{1,10}")  # the library's ids have 32 bits
NO_LIMIT = 10**9  # a model_max_length of this or more means that there is no limit
HOW_TO_CONVERT = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers writes tokenizer.json"
# Tokens that tokenizer.json lacks get ids in this order.
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
NOT_A_TOKENIZER = "not a tokenizer that `tokenizers` can read"
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MAX_COMPONENT_BYTES = 2**22  # of the JSON of a component; the largest, a SentencePiece character map, has 0.4 MB
MAX_TOKEN_CHARACTERS = 2**12  # the library copies the text of a token for each of its occurrences
MAX_ADDED_TOKEN_BYTES = 2**22  # the library makes an automaton of added tokens that has 70 times their bytes
# Added tokens as tokenizer.json has them, and letters that are written as escapes: no program writes names so.
ADDED_TOKEN = re.compile(rb'"content"\s*:\s*"[^"]*"')
ESCAPED_LETTER = re.compile(rb"\\u00(?:[46][1-9a-f]|[57][0-9a])", re.IGNORECASE)
MAX_FACTOR = 8  # two replacements that may each insert a character between any two, and one that doubles the text
MAX_ADDED = 1000
COMPONENTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
PARTS_OF_SEQUENCE = ("normalizers", "pretokenizers", "processors", "decoders")

T = TypeVar("T")


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of the tokenizer files.

    file: has the vocabulary. named: special tokens by their names in tokenizer_config.json, such as bos_token.
    appended: those of them that `file` lacks.
    """

    file: Path
    tokenizer: tokenizers.Tokenizer
    named: dict[str, str]
    padding_side: str
    model_max_length: int | None
    templates: dict[str, ChatTemplate]
    appended: frozenset[str] = frozenset()


@dataclass(frozen=True)
class JsonFields:
    """The fields of a JSON file, without null fields; empty if the file does not exist."""

    file: Path
    values: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, name: str) -> "JsonFields":
        if not (folder / name).exists():
            return cls(folder / name, {})
        values = read_json(safe_file(folder, name), may_be_huge=("model_max_length",))
        return cls(folder / name, {field: value for field, value in values.items() if value is not None})

    def get(self, field: str, kind: type | types.UnionType, default: Any) -> Any:
        value = self.values.get(field, default)
        if value is not default and not isinstance(value, kind):
            raise self.error(field, value, f"must be {getattr(kind, '__name__', kind)}")
        return value

    def error(self, field: str, value: Any, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: field {field} is {value!r:.80}; {rule}")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has the files that `read_tokenizer` needs, valid or not."""
    return any((folder / file).exists() for file in (TOKENIZER_FILE, VOCABULARY_FILE))


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Reads the tokenizer files of a folder. Raises CheckpointError naming the file and the field."""
    config = JsonFields.read(folder, TOKENIZER_CONFIG_FILE)
    has_json = (folder / TOKENIZER_FILE).exists()
    tokenizer = from_json(folder) if has_json else from_vocabulary(folder, config)
    padding = tokenizer.padding or {}
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = config.get("split_special_tokens", bool, False)
    if config.get("clean_up_tokenization_spaces", bool, False) and not isinstance(tokenizer.model, BPE):  # of BPE none
        raise config.error("clean_up_tokenization_spaces", True, "must be false, because it alters the decoded text")
    named, appended = add_tokens(folder, tokenizer, config, padding.get("pad_token"))
    if not has_json:
        add_bos_and_eos(tokenizer, config, named)
    side = config.get("padding_side", str, padding.get("direction", "right"))
    if side not in ("left", "right"):
        raise config.error("padding_side", side, "must be 'left' or 'right'")
    longest = config.get("model_max_length", int | float, NO_LIMIT)
    return TokenizerFiles(
        folder / (TOKENIZER_FILE if has_json else VOCABULARY_FILE), tokenizer, named, side,
        int(longest) if longest < NO_LIMIT else None,
        read_templates(folder, config.file, config.values.get("chat_template")), appended,
    )  # fmt: skip


def read_vocabulary(folder: Path, name: str, separators: bytes) -> bytes:
    """The content of a file with a vocabulary. separators: bytes that come at least as often as its entries."""
    file = safe_file(folder, name)
    data = read_bytes(file, MAX_FILE_BYTES)
    refuse_text(file, data[:64])
    values = sum(data.count(separator) for separator in separators)
    if values > MAX_VALUES:
        raise CheckpointError(f"{file}: has {values} values, more than {MAX_VALUES}; it is not a tokenizer file")
    return data


def from_json(folder: Path) -> tokenizers.Tokenizer:
    file, data = folder / TOKENIZER_FILE, read_vocabulary(folder, TOKENIZER_FILE, b",[{")
    with faults_of(file):
        refuse_long_added_tokens(data)
    tokenizer = checked_call(file, NOT_A_TOKENIZER, tokenizers.Tokenizer.from_buffer, data)
    with faults_of(file):
        refuse_growth(tokenizer)
        if longest_gap(data) > MAX_TOKEN_CHARACTERS:  # listing the vocabulary takes half as long as reading it
            refuse_long_tokens(tokenizer)
    return tokenizer


@contextmanager
def faults_of(file: Path) -> Iterator[None]:
    """Makes a CheckpointError, which names the file, of an InputError."""
    try:
        yield
    except InputError as error:
        raise CheckpointError(f"{file}: {error}") from None


def longest_gap(data: bytes) -> int:
    """The bytes between two quotes of a JSON text, at most: no string in it is longer."""
    quotes = np.flatnonzero(np.frombuffer(without_escapes(data), np.uint8) == ord('"'))
    return int(np.diff(quotes).max(initial=0))


def from_vocabulary(folder: Path, config: JsonFields) -> tokenizers.Tokenizer:
    """Byte-level BPE from vocab.json and merges.txt, with the pre-tokenizer of GPT-2 or Qwen 2."""
    if not ((folder / VOCABULARY_FILE).exists() and (folder / MERGES_FILE).exists()):
        known = "tokenizer.model", "tekken.json", VOCABULARY_FILE, MERGES_FILE
        other = next((name for name in known if (folder / name).exists()), None)
        found = f", and {other} alone is not read: {HOW_TO_CONVERT}" if other else "; copy the tokenizer's files there"
        raise CheckpointError(f"{folder / TOKENIZER_FILE}: is missing{found}")
    kind = config.get("tokenizer_class", str, "")
    if kind.removesuffix("Fast") not in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        rule = f"without {TOKENIZER_FILE} only GPT2Tokenizer and Qwen2Tokenizer are read from {VOCABULARY_FILE}"
        raise config.error("tokenizer_class", kind, f"{rule}: {HOW_TO_CONVERT}")
    vocabulary, _ = read_vocabulary(folder, VOCABULARY_FILE, b",[{"), read_vocabulary(folder, MERGES_FILE, b"\n")
    if longest_gap(vocabulary) > MAX_TOKEN_CHARACTERS:
        raise CheckpointError(f"{folder / VOCABULARY_FILE}: a token has more than {MAX_TOKEN_CHARACTERS} characters")
    files = (str(folder / VOCABULARY_FILE), str(folder / MERGES_FILE))
    tokenizer = tokenizers.Tokenizer(checked_call(folder / VOCABULARY_FILE, NOT_A_TOKENIZER, BPE.from_file, *files))
    prefix = config.get("add_prefix_space", bool, False)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    if kind.startswith("Qwen2"):
        split_as_qwen2(tokenizer, prefix)
    return tokenizer


def split_as_qwen2(tokenizer: tokenizers.Tokenizer, add_prefix_space: bool = False) -> None:
    """Sets Qwen 2's normalizer (NFC) and its byte-level pre-tokenizer, in which each digit is a word."""
    words = pre_tokenizers.Split(tokenizers.Regex(QWEN2_WORDS), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    tokenizer.decoder = decoders.ByteLevel()


def checked_call(file: Path, fault: str, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Calls the `tokenizers` library. Raises CheckpointError, which names the file and `fault`, if the library fails.

    The library raises plain Exception; a panic prints its place, and raises PanicException, which is none. TypeError
    and OverflowError are raised unchanged: the caller's arguments are wrong, not the file.
    """
    try:
        return call(*arguments, **options)
    except (TypeError, OverflowError):
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        remedy = f"; {DOWNLOAD_AGAIN}, or upgrade tokenizers" if fault == NOT_A_TOKENIZER else ""
        raise CheckpointError(f"{file}: {fault}: {first_line(error)}{remedy}") from error


def add_tokens(
    folder: Path, tokenizer: tokenizers.Tokenizer, config: JsonFields, padding_token: str | None
) -> tuple[dict[str, str], frozenset[str]]:
    """Adds the tokens that the other files list and tokenizer.json lacks; returns the named special tokens, and which
    of them it lacked."""
    if "added_tokens_decoder" in config.values:
        source = config
        named, others = named_tokens(config)
        listed = dict(listed_tokens(config))
    else:
        source = JsonFields.read(folder, ADDED_TOKENS_FILE)
        named, others = named_tokens(config, JsonFields.read(folder, SPECIAL_TOKENS_MAP_FILE))
        listed = dict(added_tokens(source, tokenizer, {token.content for token in (*named.values(), *others)}))
    appended = frozenset(t.content for t in named.values() if tokenizer.token_to_id(t.content) is None)
    with faults_of(source.file):
        refuse_long_in_all(sum(len(token.content.encode()) for token in (*listed.values(), *named.values(), *others)))
    tokenizer.add_tokens([listed[index] for index in sorted(listed)])
    for index, token in listed.items():
        given = tokenizer.token_to_id(token.content)
        if given != index:
            raise source.error(
                token.content, index, f"{TOKENIZER_FILE} makes it {given}; use files of the same revision"
            )
    if padding_token:
        named.setdefault("pad_token", AddedToken(padding_token, special=True))
    in_order = sorted(
        named,
        key=lambda name: SPECIAL_TOKEN_NAMES.index(name) if name in SPECIAL_TOKEN_NAMES else len(SPECIAL_TOKEN_NAMES),
    )
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    new = [token for token in (*(named[name] for name in in_order), *others) if token.content not in known]
    tokenizer.add_tokens(new)
    return {name: token.content for name, token in named.items()}, appended


def named_tokens(*files: JsonFields) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Special tokens by name, and those without a name. A later file overrides named ones, and no unnamed ones."""
    named: dict[str, AddedToken] = {}
    others: list[AddedToken] = []
    for file in files:
        for field, value in file.values.items():
            if field in SPECIAL_TOKEN_NAMES or (field.endswith("_token") and isinstance(value, str | dict)):
                named[field] = parse_token(file, field, value, special=True)
        field = "extra_special_tokens" if file.values.get("extra_special_tokens") else "additional_special_tokens"
        extra = file.get(field, list | dict, [])
        if isinstance(extra, dict):
            named |= {name: parse_token(file, f"{field}.{name}", token, special=True) for name, token in extra.items()}
        elif not others:
            others = [parse_token(file, f"{field}[{i}]", token, special=True) for i, token in enumerate(extra)]
    return named, others


def listed_tokens(config: JsonFields) -> Iterator[tuple[int, AddedToken]]:
    """The tokens of added_tokens_decoder, with their ids."""
    for index, token in config.get("added_tokens_decoder", dict, {}).items():
        field = f"added_tokens_decoder.{index}"
        if not TOKEN_ID.fullmatch(index):
            raise config.error(field, token, "the name of the field must be the token's id")
        yield int(index), parse_token(config, field, token)


def added_tokens(
    file: JsonFields, tokenizer: tokenizers.Tokenizer, special: Container[str]
) -> Iterator[tuple[int, AddedToken]]:
    """The tokens of added_tokens.json that tokenizer.json does not add, with their ids."""
    known = tokenizer.get_added_tokens_decoder()
    for content in file.values:
        index = file.get(content, int, None)
        if index not in known:
            is_special = content in special
            yield index, parse_token(file, content, content, normalized=not is_special, special=is_special)


def parse_token(file: JsonFields, field: str, value: Any, **defaults: bool) -> AddedToken:
    """A token from its text, or from an object with its content and flags. Raises CheckpointError."""
    token = {"content": value} if isinstance(value, str) else value
    if isinstance(token, dict) and isinstance(content := token.get("content"), str):
        flags = {flag: token[flag] for flag in TOKEN_FLAGS if flag in token}
        if 0 < len(content) <= MAX_TOKEN_CHARACTERS and all(isinstance(flag, bool) for flag in flags.values()):
            return AddedToken(content, **(flags | defaults))
    of_text = f"must be a token's text of at most {MAX_TOKEN_CHARACTERS} characters"
    raise file.error(field, value, f"{of_text}, or an object with its content and flags")


def add_bos_and_eos(tokenizer: tokenizers.Tokenizer, config: JsonFields, named: dict[str, str]) -> None:
    """Applies add_bos_token and add_eos_token, if the tokens exist."""
    begin = [named["bos_token"]] if config.get("add_bos_token", bool, False) and "bos_token" in named else []
    end = [named["eos_token"]] if config.get("add_eos_token", bool, False) and "eos_token" in named else []
    ids = [(token, tokenizer.token_to_id(token)) for token in {*begin, *end}]
    tokenizer.post_processor = processors.TemplateProcessing(single=[*begin, "$A", *end], special_tokens=ids)


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
            if factor == math.inf:
                raise InputError(f"field {name} replaces an empty pattern; its pattern must be a text to find")
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
        case {"type": "Replace", "pattern": {"String": ""} | {"Regex": ""}}:  # the library panics
            return Growth(math.inf)
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
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
