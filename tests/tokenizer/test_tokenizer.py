"""Tokenizers read as by transformers from the same folders, decoding token by token, and broken files."""

import json
import random
import time
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

import ligermodels
from ligermodels.errors import CheckpointError, InputError
from ligermodels.generation.texts import model_stop_tokens
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer import files as tokenizer_files
from ligermodels.tokenizer.tokenizer import overlap_mask
from tests.tokenizer.folders import FORMS, trained, write_folder

TEXTS = (
    "",
    "Hello world",
    " two  spaces and 12345 isn't it ? .",
    "the café, e\u0301 ﬁ ½: 你好 😀👩‍👩‍👧 done\n\n\n",
    "a <b> x <s>y</s> z<|im_end|>q <|user|>  r<tool_call>{}</tool_call> <start_of_turn>user\nhi<|end|>",
    "<|begin_of_text|><|eot_id|> \ufffd",
)
SPECIAL = ("bos", "eos", "pad", "unk")


def both(folder):
    return Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("form", FORMS)
def test_encoding_and_decoding_equal_those_of_transformers(tmp_path, form):
    ours, theirs = both(write_folder(tmp_path, form))
    assert ours.vocab_size == len(theirs) and ours.padding_side == theirs.padding_side
    for name in SPECIAL:
        assert getattr(ours, f"{name}_token") == getattr(theirs, f"{name}_token")
        assert getattr(ours, f"{name}_token_id") == getattr(theirs, f"{name}_token_id")
    for added in (True, False):
        ids = [theirs.encode(text, add_special_tokens=added) for text in TEXTS]
        assert [ours.encode(text, add_special_tokens=added) for text in TEXTS] == ids
        assert ours.encode_batch(TEXTS, add_special_tokens=added) == ids
        for skipped in (True, False):
            assert [ours.decode(row, skip_special_tokens=skipped) for row in ids] == theirs.batch_decode(
                ids, skip_special_tokens=skipped
            )
    special = {index for index, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.special_ids == special and len(special) >= 3


@pytest.mark.parametrize("side", ["left", "right", None])
def test_padding_equals_that_of_transformers(tmp_path, side):
    ours, theirs = both(write_folder(tmp_path, "qwen"))
    batch = [[5, 6, 7], [8], []]
    for options, same in (
        ({}, {}),
        ({"multiple_of": 4}, {"pad_to_multiple_of": 4}),
        ({"length": 5}, {"padding": "max_length", "max_length": 5}),
        ({"length": 5, "multiple_of": 4}, {"padding": "max_length", "max_length": 5, "pad_to_multiple_of": 4}),
    ):
        expected = theirs.pad({"input_ids": batch}, padding_side=side, return_tensors="pt", **same)
        input_ids, attention_mask = ours.pad(batch, side=side, **options)
        assert input_ids.tolist() == expected["input_ids"].tolist() and input_ids.dtype == expected["input_ids"].dtype
        assert attention_mask.tolist() == expected["attention_mask"].tolist()


def test_a_batch_that_cannot_be_padded_is_refused(tmp_path):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "llama3"))
    with pytest.raises(InputError, match=r"tokenizer_config\.json: field pad_token is missing.*tokenizer\.eos_token"):
        tokenizer.pad([[1]])
    with pytest.raises(InputError, match="pad_token: 'no such' is not in the vocabulary of"):
        tokenizer.pad_token = "no such"
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer.pad([[1], [2, 3]])[0].tolist() == [[1, tokenizer.eos_token_id], [2, 3]]
    with pytest.raises(InputError, match="length: is 1, but a row has 2 tokens"):
        tokenizer.pad([[1], [2, 3]], length=1)
    with pytest.raises(InputError, match="side: is 'top'"):
        tokenizer.pad([[1]], side="top")


def assert_streams(tokenizer, ids, skip):
    """The returned texts are a prefix of the full text at every step, and with the flush equal to it."""
    stream, text = tokenizer.decode_stream(skip_special_tokens=skip), ""
    for count, token in enumerate(ids, 1):
        new = stream.step(token)
        assert new != ""
        text += new or ""
        assert tokenizer.decode(ids[:count], skip_special_tokens=skip).startswith(text), (ids, count)
    assert text + stream.flush() == tokenizer.decode(ids, skip_special_tokens=skip), ids
    return text


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_streamed_decoding_equals_decoding_all_ids(tmp_path, form, skip):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, form))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for count in range(len(ids) + 1):
            assert_streams(tokenizer, ids[:count], skip)
    draw = random.Random(0)
    for _ in range(300):  # mostly invalid text: broken characters, special tokens inside them, unknown ids
        assert_streams(tokenizer, [draw.randrange(tokenizer.vocab_size + 3) for _ in range(10)], skip)


def test_text_is_returned_as_soon_as_it_is_final(tmp_path):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "qwen"))
    ids = tokenizer.encode("a你b")
    assert len(ids) == 5
    stream = tokenizer.decode_stream()
    assert [stream.step(token) for token in ids] == ["a", None, None, "你", "b"]
    assert stream.flush() == ""
    assert [stream.step(token) for token in ids[1:3]] == [None, None] and stream.flush() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder("</w>"),
        decoders.Metaspace(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]),
    ],
)
def test_streamed_decoding_works_with_any_decoder(tmp_path, decoder):
    words = ["▁", "▁a", "b", "##c", "d</w>", "!", "n't", "<0xE4>", "<0xBD>", "<0xA0>", "<0xFF>", "<0x41>"]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="▁"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded, draw = Tokenizer.from_folder(tmp_path), random.Random(0)
    for _ in range(300):
        assert_streams(loaded, [draw.randrange(len(words)) for _ in range(8)], skip=True)


def test_truncation_and_padding_settings_are_ignored_except_for_the_pad_token(tmp_path):
    folder = write_folder(tmp_path, "llama3")
    text = "one two three four five six"
    expected = Tokenizer.from_folder(folder).encode_batch([text, "one"])
    stored = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.enable_truncation(3)
    stored.enable_padding(direction="left", pad_id=4, pad_token="<|eot_id|>")
    stored.save(str(folder / "tokenizer.json"))
    ours, theirs = both(folder)
    assert ours.encode_batch([text, "one"]) == expected and len(expected[0]) > 3
    assert (ours.pad_token, ours.padding_side) == (theirs.pad_token, theirs.padding_side) == ("<|eot_id|>", "left")


def test_without_tokenizer_config_there_are_no_named_special_tokens(tmp_path):
    folder = write_folder(tmp_path, "llama3")
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert [getattr(tokenizer, f"{name}_token_id") for name in SPECIAL] == [None] * 4
    assert tokenizer.encode("a")[0] in tokenizer.special_ids and tokenizer.padding_side == "right"


@pytest.mark.parametrize("longest", [131072, None, 1000000000000000019884624838656, 1e30])
def test_a_huge_model_max_length_means_no_limit(tmp_path, longest):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "qwen", model_max_length=longest))
    assert tokenizer.model_max_length == (131072 if longest == 131072 else None)


OLDER = {
    "eos_token": {
        "content": "<|end_of_text|>",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
    },
    "pad_token": "<pad>",
    "additional_special_tokens": ["<|extra|>", "<|more|>"],
}
LISTED = {
    "389": {"content": "<|new|>", "special": False, "normalized": False},
    "390": {"content": "<|lone|>", "special": True, "lstrip": True, "normalized": False},
}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"added_tokens_decoder": LISTED},
        {"extra_special_tokens": {"x_token": "<x>"}},
        {"extra_special_tokens": ["<x>"]},
        {
            "additional_special_tokens": [
                "<x>",
                {"__type": "AddedToken", "content": "<|lone|>", "special": True, "normalized": False},
            ]
        },
    ],
)
def test_tokens_of_the_other_files_are_added_as_transformers_adds_them(tmp_path, config):
    folder = write_folder(tmp_path, "llama3", eos_token="<|eot_id|>", **config)
    (folder / "special_tokens_map.json").write_text(json.dumps(OLDER))
    (folder / "added_tokens.json").write_text(json.dumps({"<|eot_id|>": 388, "<think>": 389}))
    ours, theirs = both(folder)
    assert ours.eos_token == ("<|eot_id|>" if "added_tokens_decoder" in config else "<|end_of_text|>")
    assert ours.named == theirs.special_tokens_map
    assert ours.tokenizer.get_added_tokens_decoder() == theirs.added_tokens_decoder
    text = "a <think> b<|extra|> c <pad> <|more|>  d<|new|>e <|lone|> <x>"
    ids = ours.encode(text)
    assert ids == theirs.encode(text) and max(ids) >= 389
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_split_special_tokens_encodes_special_tokens_as_text(tmp_path):
    ours, theirs = both(write_folder(tmp_path, "llama3", split_special_tokens=True))
    assert ours.encode("a<|eot_id|>") == theirs.encode("a<|eot_id|>")
    assert ours.eos_token_id not in ours.encode("a<|eot_id|>")


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("Qwen2Tokenizer", {"eos_token": "<|im_end|>", "pad_token": "<|end|>", "unk_token": None}),
        ("Qwen2TokenizerFast", {"eos_token": "<|im_end|>", "pad_token": "<|end|>", "unk_token": None}),
        ("GPT2Tokenizer", {"eos_token": "<|end|>", "bos_token": "<|end|>", "unk_token": "<|end|>"}),
        (
            "GPT2Tokenizer",
            {"eos_token": "<|end|>", "bos_token": "<|im_end|>", "unk_token": "<|end|>", "add_bos_token": True},
        ),
    ],
)
def test_vocab_and_merges_are_read_without_tokenizer_json(tmp_path, kind, config):
    vocab, merges = trained("bytes")
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    size = len(vocab)
    added = {
        str(size): {"content": "<|end|>", "special": True},
        str(size + 1): {"content": "<|im_end|>", "special": True},
    }
    config = {"tokenizer_class": kind, "added_tokens_decoder": added} | config
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = both(tmp_path)
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    assert ours.eos_token_id == theirs.eos_token_id in (size, size + 1)
    assert_streams(ours, ours.encode(TEXTS[3]), skip=True)


BROKEN = {
    "no tokenizer": ({"tokenizer.json": None}, "tokenizer.json: is missing; copy the tokenizer's files there"),
    "only sentencepiece": (
        {"tokenizer.json": None, "tokenizer.model": b"\n"},
        "tokenizer.json: is missing, and tokenizer.model alone is not read: AutoTokenizer.from_pretrained(folder)",
    ),
    "another kind of vocab.json": (
        {
            "tokenizer.json": None,
            "vocab.json": {},
            "merges.txt": b"",
            "tokenizer_config.json": {"tokenizer_class": "X"},
        },
        "tokenizer_config.json: field tokenizer_class is 'X'; without tokenizer.json only GPT2Tokenizer and",
    ),
    "broken merges": (
        {
            "tokenizer.json": None,
            "vocab.json": {"a": 0},
            "merges.txt": b"a b\n",
            "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"},
        },
        "vocab.json: not a tokenizer that `tokenizers` can read: ",
    ),
    "truncated": ({"tokenizer.json": b'{"version": "1.0", "mod'}, "tokenizer.json: not a tokenizer that `tokenizers`"),
    "broken, with its remedy": ({"tokenizer.json": b"{"}, "; download it again, or upgrade tokenizers"),
    "a Git LFS pointer": ({"tokenizer.json": b"version https://git-lfs"}, "tokenizer.json: is a Git LFS pointer"),
    "no UTF-8": ({"tokenizer.json": b"\xff"}, "tokenizer.json: not a tokenizer that `tokenizers` can read"),
    "nested": ({"tokenizer.json": b"[" * 20_000}, "tokenizer.json: not a tokenizer that `tokenizers` can read"),
    "too large": ({"tokenizer.json": b" " * 100_001}, "tokenizer.json: has more than 100000 bytes"),
    "too many values": ({"tokenizer.json": b",[{" * 10_001}, "tokenizer.json: has 30003 values, more than 30000"),
    "a vocabulary that is too large": (
        {
            "tokenizer.json": None,
            "vocab.json": {"a": 0},
            "merges.txt": b"a a\n" * 30_001,
            "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"},
        },
        "merges.txt: has 30001 values, more than 30000",
    ),
    "a named token that is too long": (
        {"tokenizer_config.json": {"pad_token": "x" * 4097}},
        "xxx; must be a token's text of at most 4096 characters",
    ),
    "a token that is too long": (
        {
            "tokenizer.json": {
                "version": "1.0",
                "added_tokens": [],
                "model": {"type": "WordLevel", "vocab": {"a": 0, '"' * 4097: 1}, "unk_token": "a"},
            }
        },
        "tokenizer.json: a token has 4097 characters, more than 4096",
    ),
    "config no JSON": ({"tokenizer_config.json": b"{"}, "tokenizer_config.json: not JSON"),
    "a token's kind": (
        {"tokenizer_config.json": {"bos_token": 3}},
        "tokenizer_config.json: field bos_token is 3; must be",
    ),
    "an empty token": ({"tokenizer_config.json": {"pad_token": ""}}, "field pad_token is ''; must be a token's text"),
    "a flag's kind": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"0": {"content": "<x>", "lstrip": "no"}}}},
        "tokenizer_config.json: field added_tokens_decoder.0 is {'content': '<x>', 'lstrip': 'no'}; must be",
    ),
    "an id's kind": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"x": {"content": "<x>"}}}},
        "field added_tokens_decoder.x is {'content': '<x>'}; the name of the field must be the token's id",
    ),
    "an id of thousands of digits": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"9" * 5000: {"content": "<x>"}}}},
        "the name of the field must be the token's id",
    ),
    "an id in other digits": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"\u0663": {"content": "<x>"}}}},
        "the name of the field must be the token's id",
    ),
    "ids that do not agree": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"7": {"content": "<|im_end|>"}}}},
        "tokenizer_config.json: field <|im_end|> is 7; tokenizer.json makes it 386; use files of the same revision",
    ),
    "ids of added_tokens.json": (
        {"added_tokens.json": {"<new>": 400}, "tokenizer_config.json": {}},
        "added_tokens.json: field <new> is 400; tokenizer.json makes it 389",
    ),
    "the side": ({"tokenizer_config.json": {"padding_side": "up"}}, "field padding_side is 'up'; must be 'left' or"),
    "the side's kind": ({"tokenizer_config.json": {"padding_side": 3}}, "field padding_side is 3; must be str"),
    "the length's kind": (
        {"tokenizer_config.json": {"model_max_length": "x"}},
        "field model_max_length is 'x'; must be",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_an_error_names_the_broken_file_and_field(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(tokenizer_files, "MAX_FILE_BYTES", 100_000 if fault == "too large" else 10**8)
    monkeypatch.setattr(tokenizer_files, "MAX_VALUES", 30_000)
    files, reason = BROKEN[fault]
    folder = write_folder(tmp_path, "qwen")
    for name, content in files.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(CheckpointError) as refused:
        Tokenizer.from_folder(folder)
    assert str(refused.value).startswith(str(folder)) and reason in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 600


def test_a_panic_of_the_library_becomes_a_checkpoint_error(tmp_path):
    folder = write_folder(tmp_path, "qwen")
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["continuing_subword_prefix"] = "longer than what is merged"
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json: not a tokenizer that `tokenizers` can read: range end"
    ):
        Tokenizer.from_folder(folder)


def test_clean_up_of_spaces_is_refused_if_it_would_alter_text(tmp_path):
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"clean_up_tokenization_spaces": true}')
    with pytest.raises(
        CheckpointError, match=r"_config\.json: field clean_up_tokenization_spaces is True; must be false"
    ):
        Tokenizer.from_folder(tmp_path)


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    write_folder(tmp_path / "elsewhere", "qwen")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").symlink_to(tmp_path / "elsewhere" / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"model/tokenizer\.json: is a link that leads out of the folder"):
        Tokenizer.from_folder(tmp_path / "model")


def from_model(folder, model, **components):
    """A tokenizer with this model, read from a folder. components: normalizer, decoder and the like."""
    tokenizer = tokenizers.Tokenizer(model)
    for name, component in components.items():
        setattr(tokenizer, name, component)
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


WITHOUT_UNKNOWN = {
    "word level": models.WordLevel({"a": 0}),
    "unigram": models.Unigram([("a", -1.0)]),
    "word piece": models.WordPiece({"a": 0}, unk_token="[UNK]"),
}


@pytest.mark.parametrize("model", WITHOUT_UNKNOWN)
def test_a_text_that_needs_an_unknown_token_is_refused_where_there_is_none(tmp_path, model):
    tokenizer = from_model(tmp_path, WITHOUT_UNKNOWN[model])
    assert tokenizer.encode("a") == [0]
    refusal = rf"^{tmp_path / 'tokenizer.json'}: cannot encode this text: .*(\[UNK\]|unk_id)"
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(CheckpointError, match=refusal):
            encode("b")
    with pytest.raises(CheckpointError, match=refusal):
        tokenizer.encode_with_offsets(["a", "b"])


def test_a_panic_of_the_library_at_a_text_is_an_error_that_names_the_file(tmp_path):
    """Oniguruma gives up after ten million steps of backtracking, and the library panics."""
    words = pre_tokenizers.Split(tokenizers.Regex("(a|a)*$"), behavior="isolated")
    tokenizer = from_model(tmp_path, models.WordLevel({"a": 0}, unk_token="a"), pre_tokenizer=words)
    assert tokenizer.encode("aab") == [0]
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot encode this text: Onig: .*retry-limit"):
        tokenizer.encode("a" * 60 + "b")


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"], [None]])
def test_ids_that_are_no_token_ids_are_refused(tmp_path, ids):
    tokenizer = from_model(tmp_path, models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(InputError, match=r"^ids: cannot be decoded: .*; must be token ids"):
        tokenizer.decode(ids)


@pytest.mark.parametrize("texts", [["a", 3], ["a", "b\ud83d"]])
def test_invalid_text_is_refused(tmp_path, texts):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "qwen"))
    reason = "is int; must be a string" if texts[1] == 3 else "character 1 is a lone surrogate"
    with pytest.raises(InputError, match=rf"texts\[1\]: {reason}"):
        tokenizer.encode_batch(texts)
    with pytest.raises(InputError, match=rf"texts\[0\]: {reason}"):
        tokenizer.encode(texts[1])


@pytest.mark.parametrize("nested", [False, True])
def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path, nested):
    folder = write_folder(tmp_path, "qwen")

    def load(vocab_size):
        config = {"vocab_size": vocab_size}
        (folder / "config.json").write_text(json.dumps({"text_config": config} if nested else config))
        return ligermodels.load_tokenizer(folder)

    eos = load(500).eos_token_id
    assert load(eos + 1).eos_token_id == eos < load(eos + 1).vocab_size - 1  # unnamed added tokens may be beyond it
    with pytest.raises(CheckpointError) as refused:
        load(eos)
    assert str(refused.value).startswith(f"{folder / 'tokenizer.json'}: token '<|im_end|>' has the id {eos}, but ")
    assert f"{folder / 'config.json'} has a vocab_size of {eos};" in str(refused.value)
    with pytest.raises(CheckpointError, match="has the id 383, but"):
        load_without_names(folder, load)


def test_an_end_token_of_the_config_alone_may_be_beyond_the_embedding_as_in_transformers(tmp_path):
    vocabulary = models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    tokenizers.Tokenizer(vocabulary).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 2, "eos_token_id": 1}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = ligermodels.load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.eos_token, ours.eos_token_id) == (theirs.eos_token, theirs.eos_token_id) == ("<|im_end|>", 2)
    model = SimpleNamespace(generation_config={}, config=SimpleNamespace(raw={"eos_token_id": 1}, vocab_size=2))
    assert model_stop_tokens(model, ours) == {1}


def load_without_names(folder, load):
    (folder / "tokenizer_config.json").unlink()
    assert load(384)
    return load(383)


@pytest.mark.parametrize("text", ["a" * 101, "你" * 34])
def test_a_text_of_which_tokens_would_fill_the_memory_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setattr("ligermodels.tokenizer.tokenizer.MAX_TEXT_BYTES", 100)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "qwen"))
    assert tokenizer.decode(tokenizer.encode(text[:33])) == text[:33]
    with pytest.raises(InputError, match=r"^texts\[0\]: has a text of more than 100 bytes; make it shorter$"):
        tokenizer.encode(text)
    for encode in (tokenizer.encode_batch, tokenizer.encode_with_offsets):
        with pytest.raises(InputError, match=r"^texts\[1\]: has a text of more than 100 bytes; make it shorter$"):
            encode(["a", text])


def test_the_tokens_of_many_spans_are_found_in_linear_time():
    offsets = [(0, 2), (2, 2), (2, 3), (3, 5), (5, 9)]
    for spans in ([], [(2, 3)], [(1, 3), (0, 1)], [(5, 9), (3, 4), (4, 9)], [(2, 2)], [(9, 12)], [(0, 9)]):
        expected = [any(begin < stop and end > start for start, stop in spans) for begin, end in offsets]
        assert overlap_mask(offsets, spans) == expected
    assert overlap_mask([], [(0, 1)]) == []
    tokens = [(place, place + 1) for place in range(20_000)]
    started = time.process_time()
    assert overlap_mask(tokens, [(0, 20_000)] * 20_000) == [True] * 20_000
    assert time.process_time() - started < 1


CALLS = (
    {},
    {"add_special_tokens": False},
    {"padding": True},
    {"padding": "max_length", "max_length": 30, "truncation": True, "return_tensors": "pt"},
    {"truncation": True, "max_length": 5},
    {"padding": "longest", "truncation": True, "max_length": 4, "add_special_tokens": False, "padding_side": "left"},
)


@pytest.mark.parametrize("form", FORMS)
def test_a_call_equals_that_of_transformers(tmp_path, form):
    ours, theirs = both(write_folder(tmp_path, form))
    pads = ours.pad_token is not None
    for options in (options for options in CALLS if pads or "padding" not in options):
        for texts in ([*TEXTS], TEXTS[2]):
            found, wanted = ours(texts, **options), theirs(texts, **options)
            for name in ("input_ids", "attention_mask"):
                x, y = (given.tolist() if hasattr(given, "tolist") else given for given in (found[name], wanted[name]))
                assert x == y, (options, name)


def test_a_call_gives_the_arguments_of_a_model(tmp_path):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "qwen"))
    inputs = tokenizer("Hello world", return_tensors="pt").to("cpu")
    assert inputs.input_ids.shape == inputs.attention_mask.shape == (1, len(tokenizer.encode("Hello world")))
    model = ligermodels.create("qwen2")
    assert model(**tokenizer(["a", "b b"], padding=True, return_tensors="pt")).logits.shape[0] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": "longst"}, "padding: is 'longst'; must be True, False, 'longest' or 'max_length'"),
        ({"return_tensors": "np"}, "return_tensors: is 'np'; must be 'pt' or None"),
        ({"max_length": 4}, "max_length: is 4; it goes with truncation=True or padding='max_length'"),
        ({"return_tensors": "pt"}, "return_tensors: the texts have different numbers of tokens; give padding=True"),
        ({"padding": "max_length", "max_length": 1}, "length: is 1, but a row has"),
    ],
)
def test_a_call_refuses_what_it_cannot_do(tmp_path, options, message):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "qwen"))
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        tokenizer(["a", "b c d e"], **options)
    tokenizer.model_max_length = None
    with pytest.raises(InputError, match=r"max_length: is missing, and .* has no model_max_length; give it"):
        tokenizer("a", truncation=True)
