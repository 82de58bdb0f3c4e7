"""The growth computed from a tokenizer's settings bounds what it makes of any text; ordinary ones are accepted."""

import base64
import json
import re

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from ligermodels.errors import CheckpointError
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.files import MAX_ADDED, MAX_ADDED_TOKEN_BYTES, MAX_FACTOR, growth_of, longest_replacement
from tests.tokenizer.folders import FORMS, write_folder

TEXTS = ("", "a", "aaaaaaaaaa", "a b  c\td", "héé ﷺ ½", "日本語 x", "\n\n ab")
Replace, Sequence = normalizers.Replace, normalizers.Sequence
NORMALIZERS = {
    "a replacement": (Replace("a", "12345"), (5, 0)),
    "a longer pattern": (Replace("aa", "12345"), (2.5, 0)),
    "a shorter text": (Replace("aa", "1"), (1, 0)),
    "an expression": (Replace(Regex("x*"), "123"), (4, 0)),
    "a prefix": (normalizers.Prepend("123"), (1, 3)),
    "twice": (Sequence([Replace("a", "aaa"), Replace("a", "aaa")]), (9, 0)),
    "a prefix that grows": (Sequence([normalizers.Prepend("aa"), Sequence([Replace("a", "aaaa")])]), (4, 8)),
    "a prefix that follows": (Sequence([Replace("a", "aaaa"), normalizers.Prepend("aa")]), (4, 2)),
}


@pytest.mark.parametrize("name", NORMALIZERS)
def test_the_growth_of_a_normalizer_bounds_its_output_and_is_reached(name):
    normalizer, expected = NORMALIZERS[name]
    factor, added = growth_of(settings(normalizer))
    assert (factor, added) == expected
    lengths = {text: len(normalizer.normalize_str(text)) for text in TEXTS}
    assert all(length <= factor * len(text) + added + factor for text, length in lengths.items())
    assert name == "a shorter text" or lengths["aaaaaaaaaa"] > len("aaaaaaaaaa")


def settings(component):
    return json.loads(component.__getstate__())


def test_the_growth_of_templates_counts_their_tokens_and_the_copies_of_the_text():
    special = [("<s>", 1), ("</s>", 2)]
    once = processors.TemplateProcessing("<s> $A </s> </s>", special_tokens=special)
    assert growth_of(settings(once)) == (1, 3)
    assert growth_of(settings(processors.TemplateProcessing("<s> $A $A $A", special_tokens=special))) == (3, 1)
    twice = processors.Sequence([once, processors.TemplateProcessing("$A $A", special_tokens=[])])
    assert growth_of(settings(twice)) == (2, 6)
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a"))
    tokenizer.post_processor = once
    assert len(tokenizer.encode("a").ids) == 1 + 3


def test_the_growth_of_a_character_map_is_its_longest_text():
    charsmap = (8).to_bytes(4, "little") + bytes(8) + b"ab\0abcdefghij\0c\0"
    assert longest_replacement(charsmap) == 10
    encoded = base64.b64encode(charsmap).decode()
    assert growth_of({"type": "Precompiled", "precompiled_charsmap": encoded}) == (10, 0)


@pytest.mark.parametrize("form", FORMS)
def test_the_tokenizers_of_model_families_grow_no_text(tmp_path, form):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, form)).tokenizer
    assert all(growth_of(settings(c)).factor == 1 for c in (tokenizer.normalizer, tokenizer.decoder) if c)


HOSTILE = {
    "normalizer": Replace("a", "b" * 100),
    "pre_tokenizer": pre_tokenizers.Split("x" * 2**22, behavior="isolated"),
    "decoder": decoders.Sequence([decoders.Replace("a", "aaa")] * 30),
    "post_processor": processors.TemplateProcessing(["a"] * (MAX_ADDED + 1) + ["$A"], special_tokens=[("a", 0)]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_component_that_could_fill_the_memory_is_refused(tmp_path, name):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    setattr(tokenizer, name, HOSTILE[name])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    reason = rf"(may make a text .*; at most {MAX_FACTOR} times and {MAX_ADDED} are|has \d+ bytes, more than)"
    with pytest.raises(CheckpointError, match=rf"^{tmp_path / 'tokenizer.json'}: field {name} {reason}"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("pattern", ["", Regex("")], ids=["text", "expression"])
@pytest.mark.parametrize("whole", [lambda part: part, lambda part: Sequence([part])], ids=["alone", "in a sequence"])
def test_a_replacement_of_an_empty_pattern_is_refused(tmp_path, pattern, whole):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.normalizer = whole(Replace(pattern, "hi"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    reason = "field normalizer replaces an empty pattern; its pattern must be a text to find"
    with pytest.raises(CheckpointError, match=f"^{tmp_path / 'tokenizer.json'}: {reason}$"):
        Tokenizer.from_folder(tmp_path)


LONG = "a" * 4000
MANY_BYTES = {
    "one token": lambda: json.dumps([{"id": 1, "content": "a" * (MAX_ADDED_TOKEN_BYTES + 1)}]),
    "many tokens": lambda: json.dumps([{"id": i, "content": f"{LONG}{i}"} for i in range(1100)]),
    "an escaped name": lambda: f'[{{"id": 1, "\\u0063ontent": "{"a" * MAX_ADDED_TOKEN_BYTES}"}}]',
}


@pytest.mark.parametrize("harm", MANY_BYTES)
def test_added_tokens_of_megabytes_are_refused_before_the_library_reads_them(harm, tmp_path, monkeypatch):
    monkeypatch.setattr("tokenizers.Tokenizer", None)
    (tmp_path / "tokenizer.json").write_text(f'{{"added_tokens": {MANY_BYTES[harm]()}}}')
    reasons = (
        r"(its added tokens have [\d,]+ bytes in all, more than 4,194,304|writes letters as escapes such as \\u0061)"
    )
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(tmp_path / 'tokenizer.json'))}: {reasons}"):
        Tokenizer.from_folder(tmp_path)


def test_added_tokens_of_other_files_are_counted_too(tmp_path):
    listed = {str(1000 + i): {"content": f"{LONG}{i}"} for i in range(1100)}
    folder = write_folder(tmp_path, "qwen", added_tokens_decoder=listed)
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: its added tokens have 4,403,\d+ bytes in all"):
        Tokenizer.from_folder(folder)
