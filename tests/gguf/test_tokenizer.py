"""Tokenizers in GGUF, byte-level and of SentencePiece: to metadata and back, and what transformers makes of them."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

import ligermodels
from ligermodels.errors import CheckpointError, InputError
from ligermodels.tokenizer.chat_template import BUILT_IN_TEMPLATES
from ligermodels.weights.gguf.header import GgufHeader, as_read
from ligermodels.weights.gguf.tokenizer import PRE_TOKENIZERS, Vocabulary, split_json, tokenizer_files
from ligermodels.weights.gguf.tokenizer_metadata import PROBE_TEXTS, TokenizerParts, splitting, tokenizer_metadata
from tests.gguf.files import family_model, write_model
from tests.interop.folders import new_tokenizer

NAMED = new_tokenizer().named
TEXTS = [PROBE_TEXTS, "", " ", "  two  spaces", "a\n\n\nb", "<s>x</s>", "12 345", "naïve 你好 😀", *PROBE_TEXTS.split()]


def sentencepiece(prefix: bool) -> tokenizers.Tokenizer:
    """As converted from SentencePiece: merges by rank, bytes for characters that it lacks."""
    words = ["▁the", "▁th", "▁t", "he", "th", "in", "▁a", "an", "▁▁", "▁▁▁▁", "12"]
    letters = sorted(set("".join(words)) | set("abcdefghijklmnopqrstuvwxyz") | {"▁"})
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    ids = {token: index for index, token in enumerate(tokens)}
    merges = [(w[:i], w[i:]) for w in reversed(words) for i in range(1, len(w)) if w[:i] in ids and w[i:] in ids]
    merges.sort(key=lambda pair: ids["".join(pair)])
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    steps = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if prefix else steps)
    after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*after, decoders.Strip(" ", 1, 0)] if prefix else after)
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def read_back(metadata) -> tuple[tokenizers.Tokenizer, dict]:
    header = GgufHeader(None, as_read(metadata) | {"general.architecture": "llama"}, {})
    files = tokenizer_files(header, Vocabulary(header))
    return tokenizers.Tokenizer.from_str(files["tokenizer.json"]), files


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_comes_back_with_equal_ids(tmp_path, prefix):
    tokenizer = sentencepiece(prefix)
    parts = TokenizerParts(tmp_path, tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, {})
    size = tokenizer.get_vocab_size() + 3
    metadata = tokenizer_metadata(parts, "m", size, [2])
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.add_space_prefix"] is prefix and metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.ggml.tokens"][-3:] == [f"[PAD{size - n}]" for n in (3, 2, 1)]
    assert metadata["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]  # unknown, control, control, byte
    read, files = read_back(metadata)
    assert read.get_vocab() == tokenizer.get_vocab()
    for text in TEXTS:
        assert read.encode(text).ids == tokenizer.encode(text).ids, text
        assert read.decode(read.encode(text).ids) == tokenizer.decode(tokenizer.encode(text).ids)
    settings = json.loads(files["tokenizer_config.json"])
    assert (settings["bos_token"], settings["eos_token"], settings["unk_token"]) == ("<s>", "</s>", "<unk>")


def test_tokens_that_users_defined_are_found_where_their_spaces_are(tmp_path):
    """llama.cpp's files spell them with spaces, and a text is split at them first."""
    tokenizer = sentencepiece(False)
    size = tokenizer.get_vocab_size()
    metadata = tokenizer_metadata(TokenizerParts(tmp_path, tokenizer, {"bos_token": "<s>"}, {}), "m", size, [])
    place = metadata["tokenizer.ggml.tokens"].index("▁▁")
    metadata["tokenizer.ggml.tokens"][place] = "  "
    metadata["tokenizer.ggml.token_type"][place] = 4
    read, _ = read_back(metadata)
    assert tokenizer.encode("a  the").tokens == ["<s>", "a", "▁", "▁the"]
    assert read.encode("a  the").tokens == ["<s>", "a", "▁▁", "t", "he"]
    assert read.decode(read.encode("a  the").ids) == "a  the"


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_each_way_to_split_text_is_found_by_what_it_does(tmp_path, name):
    """Of names that split alike the first is written, or one that agrees about whole words and NFC."""
    pre = PRE_TOKENIZERS[name]
    tokenizer = tokenizers.Tokenizer.from_str(new_tokenizer().tokenizer.to_str())
    tokenizer.pre_tokenizer = splitting(split_json(pre)).pre_tokenizer
    tokenizer.normalizer = normalizers.NFC() if pre.nfc else None
    tokenizer.model.ignore_merges = pre.ignore_merges
    metadata = tokenizer_metadata(TokenizerParts(tmp_path, tokenizer, NAMED, {}), "m", 1024, [])
    found = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]
    assert found.patterns == pre.patterns
    read, _ = read_back(metadata)
    assert all(read.encode(text).ids == tokenizer.encode(text).ids for text in TEXTS)


def test_the_gpt2_regex_of_the_library_is_known(tmp_path):
    tokenizer = tokenizers.Tokenizer.from_str(new_tokenizer().tokenizer.to_str())
    tokenizer.normalizer = None
    for steps, name in (([], "gpt-2"), ([pre_tokenizers.Digits(individual_digits=True)], "smollm")):
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, letters])
        metadata = tokenizer_metadata(TokenizerParts(tmp_path, tokenizer, NAMED, {}), "m", 1024, [])
        assert metadata["tokenizer.ggml.pre"] == name


def test_a_way_to_split_text_that_has_no_name_is_refused(tmp_path):
    tokenizer = tokenizers.Tokenizer.from_str(new_tokenizer().tokenizer.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), tokenizer.pre_tokenizer])
    with pytest.raises(InputError, match=r"splits text as none of llama.cpp's tokenizers does"):
        tokenizer_metadata(TokenizerParts(tmp_path, tokenizer, NAMED, {}), "m", 1024, [])


def test_a_tokenizer_that_the_format_cannot_carry_is_refused(tmp_path):
    tokenizer = tokenizers.Tokenizer.from_str(new_tokenizer().tokenizer.to_str())
    tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(InputError, match=r"as GGUF it would give .+ other token ids"):
        tokenizer_metadata(TokenizerParts(tmp_path, tokenizer, NAMED, {}), "m", 1024, [])


def test_special_ids_templates_and_ends_of_turns_come_back_and_transformers_reads_the_folder(tmp_path):
    file = write_model(family_model("llama"), tmp_path)
    tokenizer, model = ligermodels.load_tokenizer(file), ligermodels.load(file)
    made = new_tokenizer()
    assert tokenizer.named == made.named
    assert tokenizer.chat_template == BUILT_IN_TEMPLATES["chatml"]
    assert tokenizer.special_ids == made.special_ids
    assert model.generation_config == {"bos_token_id": 0, "eos_token_id": [0, 2], "pad_token_id": 0}
    messages = [{"role": "user", "content": "Hi, it's 12!"}]
    ours = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert ours == made.apply_chat_template(messages, add_generation_prompt=True)
    theirs = AutoTokenizer.from_pretrained(model.source)
    assert theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == ours
    for text in TEXTS:
        assert tokenizer.encode(text) == made.encode(text) == theirs(text)["input_ids"]


def test_the_name_by_which_llama_cpp_knows_phi_3_is_used_for_its_tokenizer_alone(tmp_path):
    plain = TokenizerParts(tmp_path, new_tokenizer().tokenizer, NAMED, {})
    assert tokenizer_metadata(plain, "my-Phi3-mini", 1024, [])["general.name"] == "my-phi_3-mini"
    tokenizer = sentencepiece(True)
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>"), AddedToken("<|user|>", rstrip=True)])
    tokenizer.add_tokens([AddedToken("</s>", rstrip=True, normalized=False)])
    phi3 = TokenizerParts(tmp_path, tokenizer, {"bos_token": "<s>"}, {})
    metadata = tokenizer_metadata(phi3, "mine", tokenizer.get_vocab_size(), [])
    assert metadata["general.name"] == "mine (phi-3)"
    read, _ = read_back(metadata)
    text = "<|user|>\n a <|endoftext|> b"
    assert read.encode(text).ids == tokenizer.encode(text).ids
    assert read.encode("<|user|>  a").ids == read.encode("<|user|>a").ids != read.encode("<s>  a").ids


BROKEN = {
    "a token that is there twice": ("tokens", lambda tokens: [*tokens[:-1], tokens[5]], "has the token .+ twice"),
    "an id beyond the tokens": ("eos_token_id", lambda _: 5000, "eos_token_id is 5000 of 1024 tokens"),
    "types of other tokens": ("token_type", lambda kinds: kinds[:-1], "token_type has 1023 numbers for 1024 tokens"),
    "an unknown kind": ("model", lambda _: "t5", "tokenizer.ggml.model 't5' is not supported"),
    "an unknown way to split": ("pre", lambda _: "qwen22", "'qwen22' is no known way .+ did you mean 'qwen2'"),
    "a merge of one token": ("merges", lambda merges: [*merges, "abc"], "'abc' is not two tokens"),
    "tokens that are a number": ("tokens", lambda _: 3, "tokenizer.ggml.tokens is int, must be list"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer_is_refused_by_key(tmp_path, name):
    key, change, words = BROKEN[name]
    made = new_tokenizer()
    metadata = tokenizer_metadata(TokenizerParts(tmp_path, made.tokenizer, made.named, {}), "m", 1024, [0])
    metadata[f"tokenizer.ggml.{key}"] = change(metadata[f"tokenizer.ggml.{key}"])
    with pytest.raises(CheckpointError, match=words):
        read_back({k: np.array(v) if k.endswith("token_type") else v for k, v in metadata.items()})
