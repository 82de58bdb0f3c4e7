"""The number of questions that a model answers correctly."""

import pytest
import torch

import ligermodels
from ligermodels.training.data.embedded_stories import vocabulary_texts
from ligermodels.training.data.run_tokenizer import train_tokenizer
from ligermodels.training.objectives import evaluation as module
from ligermodels.training.objectives.evaluation import count_correct_answers


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(vocabulary_texts(), 1024)


def test_an_answer_is_correct_if_the_continuation_starts_with_it(tokenizer, monkeypatch):
    replies = {"1 + 1 =": " 2. They", "10 + 2 =": " 12.", "2 + 3 =": " 15.", "7 + 5 =": " 1.", "9 + 1 =": "\n10."}
    texts = []

    def generate(model, prompts, max_new_tokens, images):
        texts.extend(tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts)
        replies_of_batch = [next(reply for end, reply in replies.items() if text.endswith(end)) for text in texts]
        return [tokenizer.encode(text, add_special_tokens=False)[:max_new_tokens] for text in replies_of_batch]

    monkeypatch.setattr(module, "generate", generate)
    questions = [("1 + 1 =", "2."), ("So 10 + 2 =", "12."), ("2 + 3 =", "5."), ("7 + 5 =", "12."), ("9 + 1 =", "10.")]
    assert count_correct_answers(torch.nn.Module(), tokenizer, questions) == 3
    assert texts[1] == "<|endoftext|>So 10 + 2 ="


def test_conversations_are_continued_by_the_assistant_in_one_batch(tokenizer, monkeypatch):
    batches = []

    def generate(model, prompts, max_new_tokens, images):
        assert not model.training
        batches.append([len(prompt) for prompt in prompts])
        assert all(tokenizer.decode(p, skip_special_tokens=False).endswith("<|im_start|>assistant\n") for p in prompts)
        return [tokenizer.encode("4 + 4 = 8.", add_special_tokens=False) for _ in prompts]

    monkeypatch.setattr(module, "generate", generate)
    question = {"role": "user", "content": "4 and 4?"}
    longer = [question, {"role": "assistant", "content": "4 + 4 = 8."}, question]
    questions = [([question], "4 + 4 = 8."), (longer, "4 + 4 = 8."), ([question], "4 - 4 = 0.")] * 20
    model = torch.nn.Module()
    assert count_correct_answers(model, tokenizer, questions) == 40
    assert model.training
    assert [len(batch) for batch in batches] == [60]


def test_the_answer_is_compared_with_the_greedy_continuation(tokenizer):
    model = ligermodels.create("llama", size="tiny")
    prompt = tokenizer.encode("7 + 5 =")
    reply = tokenizer.decode(ligermodels.generate(model, [prompt], max_new_tokens=3)[0]).strip()
    assert count_correct_answers(model, tokenizer, [("7 + 5 =", reply), ("7 + 5 =", f"not {reply}")]) == 1
