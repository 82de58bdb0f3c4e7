"""Writes small tokenizers to folders, in the formats of the model families."""

import functools
import json

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = (
    "You are a helpful assistant. What is the weather in Paris today?",
    "The user asks: can you call the function get_weather with the city of Paris?",
    "It's 21 degrees, isn't it? I'll answer in a list of words:\n\n- one\n- two\n",
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}',
)
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS, QWEN_WORDS = rf"{LETTERS}|\p{{N}}{{1,3}}|{OTHERS}", rf"{LETTERS}|\p{{N}}|{OTHERS}"


@functools.cache
def trained(kind):
    """The vocab and merges of a BPE over bytes, or over characters with ▁ for spaces."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    alphabet = []
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=len(alphabet) + 150, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def byte_level(words, special, bos=None, added=(), normalizer=None):
    """The format of Llama 3 and Qwen: the special tokens follow the vocabulary."""
    vocab, merges = trained("bytes")
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges))
    tokenizer.normalizer = normalizer
    split = pre_tokenizers.Split(tokenizers.Regex(words), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens(list(added))
    if bos:
        template = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def sentencepiece(special, form, added=()):
    """The format converted from SentencePiece: special tokens first, then 256 byte tokens, then the pieces."""
    pieces, merges = trained("characters")
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(pieces, key=pieces.__getitem__)]
    vocab = {token: index for index, token in enumerate(names)}
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    replace = decoders.Replace("▁", " ")
    strip = [decoders.Strip(" ", 1, 0)]
    if form == "metaspace":  # Llama 2, Mistral
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif form == "prepend":  # the same, as converted by older versions of transformers
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:  # Gemma
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
        strip = []
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), *strip])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens(list(added))
    bos = special[1]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def chatml(added=()):
    return byte_level(QWEN_WORDS, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, added, normalizers.NFC())


# name -> (tokenizer, tokenizer_config.json)
FORMS = {
    "llama3": lambda: (
        byte_level(
            LLAMA3_WORDS,
            ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
            "<|begin_of_text|>",
        ),
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "clean_up_tokenization_spaces": True,
            "model_max_length": 131072,
        },
    ),
    "qwen": lambda: (
        chatml([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)]),
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_bos_token": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "padding_side": "left",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        },
    ),
    "llama2": lambda: (
        sentencepiece(["<unk>", "<s>", "</s>"], "metaspace"),
        {
            "tokenizer_class": "LlamaTokenizerFast",
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False},
            "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False},
            "unk_token": "<unk>",
            "legacy": False,
            "padding_side": "right",
            "model_max_length": 1000000000000000019884624838656,
        },
    ),
    "prepend": lambda: (
        sentencepiece(["<unk>", "<s>", "</s>"], "prepend", [AddedToken("<|user|>", rstrip=True, normalized=False)]),
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "<|end|>",  # not in tokenizer.json
            "pad_token": "</s>",
            "added_tokens_decoder": {"2": {"content": "</s>", "rstrip": True, "normalized": False, "special": True}},
        },
    ),
    "gemma": lambda: (
        sentencepiece(
            ["<pad>", "<bos>", "<eos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"],
            "gemma",
            [AddedToken("\n\n", normalized=False), AddedToken("<b>", lstrip=True, normalized=False)],
        ),
        {
            "tokenizer_class": "GemmaTokenizer",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "mask_token": "<mask>",
            "image_token": "<start_of_turn>",
            "spaces_between_special_tokens": False,
            "padding_side": "left",
        },
    ),
}


def write_folder(folder, form, chat_template=None, **config):
    """Writes tokenizer.json and tokenizer_config.json of one of FORMS."""
    tokenizer, described = FORMS[form]()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = described | ({"chat_template": chat_template} if chat_template else {}) | config
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder
