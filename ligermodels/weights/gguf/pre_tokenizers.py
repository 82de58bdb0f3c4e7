"""How byte-level BPE tokenizers split text into words, by the name in `tokenizer.ggml.pre`.

The expressions are those of the tokenizer.json files that the names stand for; each splits what the ones before it have
left. Where a name stands for several tokenizers, they split alike.
Source: llama.cpp, src/llama-vocab.cpp, whose expressions give the same words.
"""

from dataclasses import dataclass

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
