"""The built-in chat templates render what the official template of each format renders, for the tokenizers they fit."""

import json

import pytest
from transformers import AutoTokenizer

from ligermodels.errors import InputError
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.chat_template import BUILT_IN_TEMPLATES
from ligermodels.training.data.run_tokenizer import OWN_TOKENS, fitting_templates, missing_tokens
from tests.tokenizer.folders import write_folder

SYSTEM, HI = {"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi!"}
HELLO, BYE = {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye."}
# name -> a form of folders.py, the text of all four messages with the generation prompt, that of HI and HELLO alone,
# and the supervised part of it
OFFICIAL = {
    "chatml": (
        "qwen",
        "<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\nHello."
        "<|im_end|>\n<|im_start|>user\nBye.<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n",
        "Hello.<|im_end|>",
    ),
    "llama3": (
        "llama3",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe terse.<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nHi!<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi!<|eot_id|><|start_header_id|>assistant"
        "<|end_header_id|>\n\nHello.<|eot_id|>",
        "Hello.<|eot_id|>",
    ),
    "gemma": (
        "gemma",
        "<bos><start_of_turn>user\nBe terse.\n\nHi!<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nBye.<end_of_turn>\n<start_of_turn>model\n",
        "<bos><start_of_turn>user\nHi!<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n",
        "Hello.<end_of_turn>",
    ),
    "granite": (
        "llama3",
        "<|start_of_role|>system<|end_of_role|>Be terse.<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>Hi!"
        "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>Hello.<|end_of_text|>\n<|start_of_role|>user"
        "<|end_of_role|>Bye.<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        "<|start_of_role|>user<|end_of_role|>Hi!<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>Hello."
        "<|end_of_text|>\n",
        "Hello.<|end_of_text|>",
    ),
    "phi3": (
        "llama2",
        "<|system|>\nBe terse.<|end|>\n<|user|>\nHi!<|end|>\n<|assistant|>\nHello.<|end|>\n<|user|>\nBye.<|end|>\n"
        "<|assistant|>\n",
        "<|user|>\nHi!<|end|>\n<|assistant|>\nHello.<|end|>\n</s>",
        "Hello.<|end|>",
    ),
    "tulu": (
        "llama3",
        "<|begin_of_text|><|system|>\nBe terse.\n<|user|>\nHi!\n<|assistant|>\nHello.<|eot_id|>\n<|user|>\nBye.\n"
        "<|assistant|>\n",
        "<|begin_of_text|><|user|>\nHi!\n<|assistant|>\nHello.<|eot_id|>",
        "Hello.<|eot_id|>",
    ),
    "zephyr": (
        "llama2",
        "<|system|>\nBe terse.</s>\n<|user|>\nHi!</s>\n<|assistant|>\nHello.</s>\n<|user|>\nBye.</s>\n<|assistant|>\n",
        "<|user|>\nHi!</s>\n<|assistant|>\nHello.</s>\n",
        "Hello.</s>",
    ),
    "mistral": (
        "llama2",
        "<s> [INST] Be terse.\n\nHi! [/INST] Hello.</s> [INST] Bye. [/INST]",
        "<s> [INST] Hi! [/INST] Hello.</s>",
        " Hello.</s>",
    ),
    "llama2": (
        "llama2",
        "<s>[INST] <<SYS>>\nBe terse.\n<</SYS>>\n\nHi! [/INST] Hello. </s><s>[INST] Bye. [/INST]",
        "<s>[INST] Hi! [/INST] Hello. </s>",
        " Hello. </s>",
    ),
}


def folder_with(name, folder):
    tokens = OWN_TOKENS.get(name, ())
    return write_folder(folder, OFFICIAL[name][0], BUILT_IN_TEMPLATES[name], additional_special_tokens=list(tokens))


@pytest.mark.parametrize("name", BUILT_IN_TEMPLATES)
def test_a_template_renders_the_official_text_here_and_in_transformers_and_marks_the_answer(tmp_path, name):
    _, long, short, answer = OFFICIAL[name]
    folder = folder_with(name, tmp_path)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for messages, prompted, text in (([SYSTEM, HI, HELLO, BYE], True, long), ([HI, HELLO], False, short)):
        for tokenizer in (ours, theirs):
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=prompted, tokenize=False)
            assert rendered == text
    assert [short[slice(*span)] for span in ours.render([HI, HELLO]).spans] == [answer]
    ids, mask = ours.apply_chat_template_with_mask([HI, HELLO, BYE])
    supervised = [token for token, flag in zip(ids, mask, strict=True) if flag]
    assert ours.decode(supervised, skip_special_tokens=False).strip() == answer.strip()


@pytest.mark.parametrize("name", BUILT_IN_TEMPLATES)
def test_messages_that_a_format_cannot_hold_are_refused(tmp_path, name):
    tokenizer = Tokenizer.from_folder(folder_with(name, tmp_path))
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    with pytest.raises(InputError, match="does not support tools"):
        tokenizer.render([HI], tools=[{"type": "function", "function": {"name": "add"}}])
    with pytest.raises(InputError, match="does not support tool calls"):
        tokenizer.render([HI, HELLO | {"tool_calls": [call]}])
    if name in ("gemma", "mistral", "llama2"):
        with pytest.raises(InputError, match="user and assistant must take turns"):
            tokenizer.render([SYSTEM, HI, BYE])
    if name in ("phi3", "tulu", "zephyr"):
        with pytest.raises(InputError, match="has the roles system, user and assistant, not tool"):
            tokenizer.render([HI, {"role": "tool", "content": "21"}])


ENDS_BY_EOS = ["tulu", "zephyr", "mistral", "llama2"]


@pytest.mark.parametrize(
    ("form", "fitting"),
    [("qwen", ["chatml"]), ("llama3", ["llama3"]), ("gemma", ["gemma"]), ("llama2", []), ("prepend", [])],
)
def test_a_template_fits_a_tokenizer_that_has_its_tokens(tmp_path, form, fitting):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, form))
    assert fitting_templates(tokenizer) == fitting + ENDS_BY_EOS


def test_missing_tokens_are_those_of_the_format_and_the_end_of_text_token(tmp_path):
    folder = write_folder(tmp_path, "llama3", additional_special_tokens=["<|user|>", "<|end|>"])
    assert missing_tokens("phi3", Tokenizer.from_folder(folder)) == ["<|system|>", "<|assistant|>"]
    described = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"eos_token": None}))
    tokenizer = Tokenizer.from_folder(folder)
    assert missing_tokens("phi3", tokenizer) == ["<|system|>", "<|assistant|>", "eos_token"]
    assert fitting_templates(tokenizer) == ["llama3"]
