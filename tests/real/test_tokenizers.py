"""Tokenizers and chat templates of trained models, beside transformers and a tokenizer made by hand."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

import ligermodels
from tests.real.conftest import MODELS
from tests.real.texts import varied_lines

LINES = 2000
SPECIAL = {
    "smollm2": ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>"],
    "gemma3": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<unused7>", "<0x0A>"],
}
QUESTION = {"role": "user", "content": "What is 17 × 23?\n  Show the steps. 🙂"}
SYSTEM = {"role": "system", "content": "You answer in one line; 用中文也可以。"}
ANSWER = {"role": "assistant", "content": " 391 "}
CHATS = [[QUESTION], [SYSTEM, QUESTION], [QUESTION, ANSWER, QUESTION], [SYSTEM, QUESTION, ANSWER]]


@pytest.mark.parametrize("name", MODELS)
def test_ids_and_texts_of_varied_lines_equal_those_of_transformers(name, folder_of):
    ours, theirs = ligermodels.load_tokenizer(folder_of(name)), AutoTokenizer.from_pretrained(folder_of(name))
    lines = varied_lines(LINES, SPECIAL[name])
    expected = theirs(lines)["input_ids"]
    assert sum(map(len, expected)) > 35_000
    found = [ours.encode(line) for line in lines]
    assert [line for line, a, b in zip(lines, found, expected, strict=True) if a != b] == []
    decoded = theirs.batch_decode(expected, skip_special_tokens=True)
    assert [ids for ids, text in zip(expected, decoded, strict=True) if ours.decode(ids) != text] == []


def test_smollm2_splits_digits_and_bytes_as_its_original(folder_of, gguf_of):
    """The original's tokenizer.json splits digits, then at ByteLevel's pattern: made here from the file's tokens."""
    import gguf

    fields = gguf.GGUFReader(gguf_of("smollm2")).fields
    tokens, merges = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges"))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(tokens[:17])
    ours = ligermodels.load_tokenizer(folder_of("smollm2"))
    lines = varied_lines(LINES, SPECIAL["smollm2"])
    expected = [encoding.ids for encoding in made.encode_batch(lines)]
    assert [line for line, ids in zip(lines, expected, strict=True) if ours.encode(line) != ids] == []


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_chats_are_rendered_as_by_transformers(add_generation_prompt, folder_of):
    folder = folder_of("smollm2")  # Gemma's is a base model, without a template
    ours, theirs = ligermodels.load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for chat in CHATS:
        options = {"add_generation_prompt": add_generation_prompt}
        text = theirs.apply_chat_template(chat, tokenize=False, **options)
        assert "<|im_start|>user\nWhat is 17 × 23?\n" in text
        ids = theirs.apply_chat_template(chat, return_dict=False, **options)
        assert ours.apply_chat_template(chat, **options) == ids == ours.encode(text)
