"""The tokenizer files of a folder, made from the metadata of a GGUF file: tokenizer.json, tokenizer_config.json and the
chat templates.

tokenizer.ggml.model is "gpt2" for byte-level BPE, whose merges are in the file, or "llama" for SentencePiece: BPE of
characters whose merges follow from the tokens' scores, as in transformers. How byte-level BPE splits text into words is
known by the name in `tokenizer.ggml.pre`. The expressions are those of the tokenizer.json files that the names stand
for; each splits what the ones before it have left. Where a name stands for several tokenizers, they split alike.
Source: llama.cpp, src/llama-vocab.cpp, whose expressions give the same words.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from ligermodels.errors import CheckpointError, suggest
from ligermodels.weights.gguf.header import GgufHeader

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
QWEN2_LIKE = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{OTHERS}|{SPACES}"
LLAMA3_WORDS = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{OTHERS}|{SPACES}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
OTHERS_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
GPT4O = rf"{CASED[0]}{CONTRACTIONS}?|{CASED[1]}{CONTRACTIONS}?|\p{{N}}{{1,3}}|{OTHERS_OR_SLASH}|{SPACES}"
TEKKEN = rf"{CASED[0]}|{CASED[1]}|\p{{N}}|{OTHERS_OR_SLASH}|{SPACES}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
SEED_CODER = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
DIGIT = r"\p{N}"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{SPACES}",
)


@dataclass(frozen=True)
class PreTokenizer:
    """patterns: each isolates what it matches. nfc: text is normalised to NFC first. ignore_merges: a word that is a
    token is one, whatever the merges say. begins: bos is put before a text unless the file says otherwise."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    begins: bool = False


PLAIN_GPT2, DIGITS_GPT2 = PreTokenizer((GPT2,)), PreTokenizer((DIGIT, GPT2))
AS_LLAMA3 = PreTokenizer((LLAMA3_WORDS,), ignore_merges=True, begins=True)
AS_QWEN2 = PreTokenizer((QWEN2_LIKE,), nfc=True)
PRE_TOKENIZERS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), AS_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer((LLAMA3_WORDS,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), AS_QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan", "grok-2"), PreTokenizer((QWEN2_LIKE,))),
    "qwen35": PreTokenizer((QWEN35,), nfc=True),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), DIGITS_GPT2),
    "command-r": PreTokenizer((DIGIT, GPT2), nfc=True),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4", "granite-docling"), PLAIN_GPT2),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((GPT4O,))),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, begins=True),
    "seed-coder": PreTokenizer((SEED_CODER,)),
    # What llama.cpp does where a file names none.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(DEEPSEEK3)),
}


PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # llama.cpp's types of tokens
TEMPLATE_NAME = re.compile(r"\w[\w-]{0,99}")
SPACE = "▁"  # SentencePiece's spelling
SPECIAL_TOKEN_KEYS = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip
PHI3_NAMES = ("phi-3", "phi3")  # in lower case
PHI3_STRIPPING, PHI3_NOT_STRIPPING = "</s>", ("<unk>", "<s>", "<|endoftext|>")
# Tokens that end a turn where the file does not name one: those that llama.cpp looks for.
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


class Vocabulary:
    """The tokens of a file. Raises CheckpointError if they are not a vocabulary.

    tokens: their texts in tokenizer.json by id. kinds: their types. ids: the other way round, without those that only
    fill the embedding up.
    """

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.model = header.require(f"{PREFIX}model", str)
        if self.model not in ("gpt2", "llama"):
            raise CheckpointError(
                f"{header.file}: {PREFIX}model {self.model!r} is not supported; 'gpt2' (byte-level BPE) and 'llama' "
                "(SentencePiece) are: use the tokenizer of the original checkpoint"
            )
        texts = header.require(f"{PREFIX}tokens", list)
        self.kinds = self.numbers("token_type", len(texts))
        self.tokens = [self.spelled(text, kind) for text, kind in zip(texts, self.kinds.tolist(), strict=True)]
        # Converters fill a vocabulary up to the size of the embedding by tokens of this form.
        unused = np.flatnonzero(self.kinds == UNUSED).tolist()
        fillers = {index for index in unused if re.fullmatch(r"\[PAD.*\]", self.tokens[index], re.DOTALL)}
        self.ids = {token: index for index, token in enumerate(self.tokens) if index not in fillers}
        if len(self.ids) + len(fillers) < len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.ids.get(token, index) != index)
            raise CheckpointError(f"{header.file}: {PREFIX}tokens has the token {twice!r} twice; convert it again")

    def spelled(self, text: str, kind: int) -> str:
        """User-defined tokens of SentencePiece have their spaces as such."""
        return text.replace(" ", SPACE) if self.model == "llama" and kind == USER_DEFINED else text

    def numbers(self, name: str, count: int) -> np.ndarray:
        """One number for each token. Raises CheckpointError."""
        values = self.header.get(f"{PREFIX}{name}", np.ndarray, np.ones(count, np.int32))
        if len(values) != count:
            raise CheckpointError(f"{self.header.file}: {PREFIX}{name} has {len(values)} numbers for {count} tokens")
        return values

    def special_id(self, name: str) -> int | None:
        """The id of a special token; None if the file has none. Raises CheckpointError."""
        index = self.header.get(f"{PREFIX}{name}", int, -1)
        if index >= len(self.tokens):
            raise CheckpointError(f"{self.header.file}: {PREFIX}{name} is {index} of {len(self.tokens)} tokens")
        return index if index >= 0 else None

    def end_ids(self) -> list[int]:
        """The ids that end a text or, in a file with a chat template, a turn."""
        found = [self.special_id(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
        if TEMPLATE in self.header.metadata:
            ends = (self.ids[token] for token in TURN_ENDS if token in self.ids)
            found += [index for index in ends if self.kinds[index] == CONTROL]
        return list(dict.fromkeys(index for index in found if index is not None))


def tokenizer_files(header: GgufHeader, vocabulary: Vocabulary) -> dict[str, str]:
    """tokenizer.json, tokenizer_config.json and the chat templates, by their paths in a folder. Raises
    CheckpointError."""
    content = tokenizer_json(vocabulary)
    named = {name: vocabulary.special_id(key) for name, key in SPECIAL_TOKEN_KEYS.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": header.get(f"{header.require('general.architecture', str)}.context_length", int, 10**9),
        **{name: vocabulary.tokens[index] for name, index in named.items() if index is not None},
    }
    return {
        "tokenizer.json": json.dumps(content, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
        **templates(header),
    }


def templates(header: GgufHeader) -> dict[str, str]:
    """The default chat template, and those with a name, by their paths. Raises CheckpointError."""
    found: dict[str, str] = {}
    for key in header.metadata:
        name = key.removeprefix(f"{TEMPLATE}.")
        if key == TEMPLATE:
            found["chat_template.jinja"] = header.require(key, str)
        elif key != name and TEMPLATE_NAME.fullmatch(name):
            found[f"additional_chat_templates/{name}.jinja"] = header.require(key, str)
    return found


def tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of tokenizer.json. Raises CheckpointError."""
    return byte_level(vocabulary) if vocabulary.model == "gpt2" else sentencepiece(vocabulary)


def byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer.json of byte-level BPE."""
    header = vocabulary.header
    name = header.get(f"{PREFIX}pre", str, "default")
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{header.file}: {PREFIX}pre: {name!r} is no known way to split text{suggest(name, PRE_TOKENIZERS)}"
        )
    pre = PRE_TOKENIZERS[name]
    merges = [merge.split(" ", 1) for merge in header.require(f"{PREFIX}merges", list)]
    wrong = next((merge for merge in merges if len(merge) != 2), None)
    if wrong is not None:
        raise CheckpointError(f"{header.file}: {PREFIX}merges: {wrong[0]!r} is not two tokens; convert it again")
    return {
        "version": "1.0", "added_tokens": tokens_of_their_own(vocabulary),
        "normalizer": {"type": "NFC"} if pre.nfc else None, "pre_tokenizer": split_json(pre),
        "post_processor": ends_of_text(vocabulary, pre.begins),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": pre.ignore_merges, "vocab": vocabulary.ids, "merges": merges},
    }  # fmt: skip


def split_json(pre: PreTokenizer) -> dict[str, Any]:
    """tokenizer.json's pre_tokenizer, which splits text into words and spells their bytes."""
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, letters]}


def sentencepiece(vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer.json of SentencePiece's BPE. A text begins with a space unless the file says otherwise."""
    header = vocabulary.header
    prefix = header.get(f"{PREFIX}add_space_prefix", bool, True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizers = [{"type": "Prepend", "prepend": SPACE}, spaces] if prefix else [spaces]
    unknown = vocabulary.special_id("unknown_token_id")
    return {
        "version": "1.0",
        "added_tokens": tokens_of_their_own(vocabulary),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": ends_of_text(vocabulary, begins=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "unk_token": None if unknown is None else vocabulary.tokens[unknown], "fuse_unk": True,
            "byte_fallback": True, "vocab": vocabulary.ids, "merges": merges_of(vocabulary),
        },
    }  # fmt: skip


def merges_of(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that are a token together, those with the highest score first."""
    scores = vocabulary.numbers("scores", len(vocabulary.tokens)).tolist()
    ids = vocabulary.ids
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in ids.items():
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in ids and right in ids:
                found.append((-scores[index], ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def tokens_of_their_own(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """The control tokens, and those that users have defined: a text is split at both first."""
    stripping = tokens_that_strip(vocabulary)
    return [
        {
            "id": index, "content": (text := vocabulary.tokens[index]), "single_word": False, "lstrip": False,
            "rstrip": text in stripping,
            "normalized": SPACE in text,  # it is matched where spaces are spelled as in it
            "special": int(vocabulary.kinds[index]) == CONTROL,
        }
        for index in np.flatnonzero(np.isin(vocabulary.kinds, (CONTROL, USER_DEFINED))).tolist()
    ]  # fmt: skip


def tokens_that_strip(vocabulary: Vocabulary) -> set[str]:
    """The tokens behind which spaces are dropped: Phi-3's, which llama.cpp knows by the model's name."""
    name = vocabulary.header.get("general.name", str, "").lower()
    if not any(part in name for part in PHI3_NAMES):
        return set()
    control = {vocabulary.tokens[index] for index in np.flatnonzero(vocabulary.kinds == CONTROL).tolist()}
    return (control | {PHI3_STRIPPING}) - set(PHI3_NOT_STRIPPING)


def ends_of_text(vocabulary: Vocabulary, begins: bool) -> dict[str, Any] | None:
    """The post-processor, which puts bos before and eos behind a text where the file says so.

    begins: whether bos is put there if the file does not say it.
    """
    header, ends = vocabulary.header, dict[str, int]()
    for name, default in (("bos", begins), ("eos", False)):
        index = vocabulary.special_id(f"{name}_token_id")
        if index is not None and header.get(f"{PREFIX}add_{name}_token", bool, default):
            ends[name] = index
    if not ends:
        return None
    texts = {name: vocabulary.tokens[index] for name, index in ends.items()}
    before, behind = (
        [{"SpecialToken": {"id": texts[name], "type_id": 0}}] if name in texts else [] for name in ("bos", "eos")
    )
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*before, first, *behind],
        "pair": [*before, first, *behind, *before, second, *behind],
        "special_tokens": {text: {"id": text, "ids": [ends[name]], "tokens": [text]} for name, text in texts.items()},
    }
