"""Greedy texts of trained models equal those of transformers, and `ligermodels verify` passes."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import ligermodels
from ligermodels.cli import main
from ligermodels.verify import parity
from tests.real.conftest import DEVICES, tokenizer_of
from tests.reference_model import products

NEW_TOKENS = 8
QUESTIONS = ("What is the capital of France?", "Write one sentence about the sea.", "用一句话介绍长江。")
BEGINNINGS = ("The capital of France is", "def fibonacci(n):\n", "水是地球上最常见的物质之一。")


def greedy(folder, prompts, device):
    """The new tokens of both, in fp32, prompts together in ours and one by one in theirs."""
    model = ligermodels.load(folder, dtype=torch.float32, device=device)
    found = ligermodels.generate(model, prompts, max_new_tokens=NEW_TOKENS, temperature=0.0)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map=device)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    return found, expected


@pytest.mark.parametrize("device", DEVICES)
def test_smollm2_answers_chats_as_in_transformers(device, folder_of):
    folder = folder_of("smollm2")
    tokenizer = tokenizer_of(folder)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    found, expected = greedy(folder, prompts, device)
    assert found == expected
    assert tokenizer.decode(found[0]) == "The capital of France is Paris."


@pytest.mark.parametrize("device", DEVICES)
def test_gemma_continues_texts_as_in_transformers(device, folder_of):
    folder = folder_of("gemma3")
    tokenizer = tokenizer_of(folder)
    found, expected = greedy(folder, [tokenizer.encode(text) for text in BEGINNINGS], device)
    assert found == expected and sum(map(len, found)) > 2 * NEW_TOKENS


@pytest.mark.parametrize("device", DEVICES)
def test_verify_passes(device, shallow, tmp_path, capsys, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(parity, "ROW_TOKENS", 12)  # of 64: fp64 takes most of the time
    flags = ["--output", str(tmp_path), "--device", device, "--tokens", "4"]
    with products(device):
        status = main(["verify", str(shallow), *flags])
    assert status == 0, capsys.readouterr().out
    (certificate,) = (json.loads(file.read_text()) for file in tmp_path.glob("*.json"))
    outcomes = {check["name"]: check["outcome"] for check in certificate["checks"]}
    assert set(outcomes.values()) == {"passed"} and len(outcomes) == 11
