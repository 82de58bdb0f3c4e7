"""Tokenizers and chat templates of trained models, beside transformers and llama.cpp."""

import pytest
from transformers import AutoTokenizer

from tests.real.conftest import MODELS, tokenizer_of
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
    ours, theirs = tokenizer_of(folder_of(name)), AutoTokenizer.from_pretrained(folder_of(name))
    lines = varied_lines(LINES, SPECIAL[name])
    expected = theirs(lines)["input_ids"]
    assert sum(map(len, expected)) > 35_000
    found = [ours.encode(line) for line in lines]
    assert [line for line, a, b in zip(lines, found, expected, strict=True) if a != b] == []
    decoded = theirs.batch_decode(expected, skip_special_tokens=True)
    assert [ids for ids, text in zip(expected, decoded, strict=True) if ours.decode(ids) != text] == []


@pytest.mark.parametrize("name", MODELS)
def test_ids_of_varied_lines_equal_those_of_llama_cpp(name, folder_of, gguf_of):
    llama_cpp = pytest.importorskip("llama_cpp")
    ours = tokenizer_of(folder_of(name))
    theirs = llama_cpp.Llama(str(gguf_of(name)), vocab_only=True, verbose=False)
    lines = varied_lines(LINES, SPECIAL[name])
    expected = [theirs.tokenize(line.encode(), add_bos=name == "gemma3", special=True) for line in lines]
    assert [line for line, ids in zip(lines, expected, strict=True) if ours.encode(line) != ids] == []


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_chats_are_rendered_as_by_transformers(add_generation_prompt, folder_of):
    folder = folder_of("smollm2")  # Gemma's is a base model, without a template
    ours, theirs = tokenizer_of(folder), AutoTokenizer.from_pretrained(folder)
    for chat in CHATS:
        options = {"add_generation_prompt": add_generation_prompt}
        text = theirs.apply_chat_template(chat, tokenize=False, **options)
        assert "<|im_start|>user\nWhat is 17 × 23?\n" in text
        ids = theirs.apply_chat_template(chat, return_dict=False, **options)
        assert ours.apply_chat_template(chat, **options) == ids == ours.encode(text)
