"""The metadata of a tokenizer: the inverse of `tokenizer.py`, which it uses to check that nothing is lost.

The tokenizer's way to split text is found by what it does with PROBE_TEXTS, because llama.cpp knows names alone.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from ligermodels.errors import InputError, shorten
from ligermodels.weights.gguf.header import GgufHeader, as_read
from ligermodels.weights.gguf.tokenizer import (
    CONTROL,
    PHI3_NAMES,
    PHI3_NOT_STRIPPING,
    PHI3_STRIPPING,
    PRE_TOKENIZERS,
    PREFIX,
    SPECIAL_TOKEN_KEYS,
    TEMPLATE,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    split_json,
    tokenizer_json,
)

NORMAL, UNKNOWN, BYTE = 1, 2, 6  # llama.cpp's types of tokens
NO_SCORE = -1e6  # of tokens that no merge makes
# Its words show how a tokenizer splits: contractions, capitals, digits, spaces, line ends, marks, scripts, signs.
PROBE_TEXTS = (
    "Hello world, it's I'LL we'Ve don't 1 12 123 1234567 a1b2  two   three\tTab\n\nlines\r\n \n  end   "
    "CamelCase HTMLParser naïve cafe\u0301 नमस्ते 你好世界ひらカタ 한국어 Привет ½ Ⅷ ²³ _under_ --- === /path//to/x\n"
    "x=1;y+=2 # $3.50 50% <tag> (a) [b] {c} \"q\" 'q' !!!\n...\n 😀👩‍👧 ﷽ \u00a0 \u3000 tail "
)


@dataclass(frozen=True)
class TokenizerParts:
    """A tokenizer to write. file: names it in errors. named: special tokens by names such as bos_token. templates: the
    sources of chat templates by name, the default one under "default"."""

    file: Path
    tokenizer: tokenizers.Tokenizer
    named: Mapping[str, str]
    templates: Mapping[str, str]


def tokenizer_metadata(parts: TokenizerParts, name: str, vocab_size: int, end_ids: list[int]) -> dict[str, Any]:
    """The metadata of a tokenizer by its keys. name: of the model. vocab_size: rows of the embedding. end_ids: end a
    text or a turn. Raises InputError if GGUF cannot have it."""
    content = json.loads(parts.tokenizer.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise InputError(f"{parts.file}: is of the type {model['type']}; GGUF has BPE: export a folder instead")
    sentencepiece = bool(model["byte_fallback"])
    ids = parts.tokenizer.get_vocab()
    tokens = {index: token for token, index in ids.items() if index < vocab_size}
    kinds = {index: kind_of(parts.tokenizer, index, token, model) for index, token in tokens.items()}
    found: dict[str, Any] = {
        "model": "llama" if sentencepiece else "gpt2",
        "pre": "default" if sentencepiece else pre_tokenizer_name(parts, content),
        "tokens": [tokens.get(index, f"[PAD{index}]") for index in range(vocab_size)],
        "token_type": [kinds.get(index, UNUSED) for index in range(vocab_size)],
    }
    if sentencepiece:
        scores = scores_of(model)
        found["scores"] = [scores.get(tokens.get(index, ""), NO_SCORE) for index in range(vocab_size)]
        found["add_space_prefix"] = begins_with_space(content)
        if model["unk_token"] is not None:
            found["unknown_token_id"] = ids[model["unk_token"]]
    else:
        found["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    metadata: dict[str, Any] = {"general.name": model_name(name, parts.tokenizer)}
    metadata |= {f"{PREFIX}{key}": value for key, value in (found | special_tokens(parts, end_ids)).items()}
    metadata |= template_metadata(parts.templates)
    refuse_other_ids(parts, metadata)
    return metadata


def model_name(name: str, tokenizer: tokenizers.Tokenizer) -> str:
    """A name for general.name, by which llama.cpp knows Phi-3's tokenizer: it then looks up tokens that others lack."""
    strips = any(token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    known = {PHI3_STRIPPING, *PHI3_NOT_STRIPPING} <= tokenizer.get_vocab().keys()
    named = any(part in name.lower() for part in PHI3_NAMES)
    if strips and known:
        return name if named else f"{name} (phi-3)"
    return re.sub("phi-?3", "phi_3", name, flags=re.IGNORECASE)


def kind_of(tokenizer: tokenizers.Tokenizer, index: int, token: str, model: Mapping[str, Any]) -> int:
    added = tokenizer.get_added_tokens_decoder().get(index)
    if token == model["unk_token"]:
        return UNKNOWN
    if added is not None:
        return CONTROL if added.special else USER_DEFINED
    is_byte = model["byte_fallback"] and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return BYTE if is_byte else NORMAL


def scores_of(model: Mapping[str, Any]) -> dict[str, float]:
    """Scores by which the same pairs are merged first: less for a later merge."""
    scores: dict[str, float] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        scores.setdefault(left + right, -float(rank))
    return scores


def begins_with_space(content: Mapping[str, Any]) -> bool:
    """Whether a tokenizer puts a space before a text."""
    steps = [content["normalizer"] or {}, content["pre_tokenizer"] or {}]
    steps += [step for outer in steps for step in outer.get("normalizers", outer.get("pretokenizers", ()))]
    return any(
        step.get("type") == "Prepend" or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in steps
    )


def pre_tokenizer_name(parts: TokenizerParts, content: Mapping[str, Any]) -> str:
    """llama.cpp's name for how a byte-level tokenizer splits text. Raises InputError if it has none."""
    wanted = words_in(parts.tokenizer)
    found = [name for name, pre in PRE_TOKENIZERS.items() if words_in(splitting(split_json(pre))) == wanted]
    if not found:
        raise InputError(
            f"{parts.file}: splits text as none of llama.cpp's tokenizers does, so that no GGUF can have it: export a "
            "folder instead"
        )
    nfc = (content["normalizer"] or {}).get("type") == "NFC"
    whole = bool(content["model"].get("ignore_merges"))

    def differences(name: str) -> int:
        pre = PRE_TOKENIZERS[name]
        return 2 * (pre.ignore_merges != whole) + (pre.nfc != nfc)

    return min(found, key=differences)


def splitting(pre_tokenizer: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """A tokenizer without a vocabulary that splits text in this way."""
    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    return tokenizers.Tokenizer.from_str(json.dumps(empty | {"pre_tokenizer": pre_tokenizer}))


def words_in(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """The words into which a tokenizer splits PROBE_TEXTS, in the spelling of bytes."""
    if tokenizer.pre_tokenizer is None:
        return [PROBE_TEXTS]
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(PROBE_TEXTS)]


def special_tokens(parts: TokenizerParts, end_ids: list[int]) -> dict[str, Any]:
    """The ids of special tokens, and whether a text begins with bos and ends with eos."""
    ids = {name: parts.tokenizer.token_to_id(token) for name, token in parts.named.items()}
    found = {key: ids[name] for name, key in SPECIAL_TOKEN_KEYS.items() if ids.get(name) is not None}
    if end_ids:
        found.setdefault("eos_token_id", end_ids[0])
        others = [index for index in end_ids if index != found["eos_token_id"]]
        found |= {"eot_token_id": others[0]} if others else {}
    around = parts.tokenizer.encode("", add_special_tokens=True).ids
    begins = bool(around) and around[0] == found.get("bos_token_id")
    ends = len(around) > begins and around[-1] == found.get("eos_token_id")
    return found | {"add_bos_token": begins, "add_eos_token": ends}


def template_metadata(templates: Mapping[str, str]) -> dict[str, Any]:
    named = {name: source for name, source in templates.items() if name != "default"}
    found: dict[str, Any] = {f"{TEMPLATE}.{name}": source for name, source in named.items()}
    found |= {f"{TEMPLATE}s": list(named)} if named else {}
    return found | ({TEMPLATE: templates["default"]} if "default" in templates else {})


def refuse_other_ids(parts: TokenizerParts, metadata: Mapping[str, Any]) -> None:
    """Raises InputError if a reader of the metadata would encode PROBE_TEXTS otherwise than the tokenizer."""
    vocabulary = Vocabulary(GgufHeader(parts.file, as_read(metadata), {}))
    read = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(vocabulary)))
    for text in PROBE_TEXTS, PROBE_TEXTS.replace(" ", "\n"), *PROBE_TEXTS.split():
        if read.encode(text).ids != parts.tokenizer.encode(text).ids:
            raise InputError(
                f"{parts.file}: as GGUF it would give {shorten(text, 40)!r} other token ids, because the format lacks "
                "something that it has: export a folder instead"
            )
