"""Fine-tuning works: a model trained on stories answers no question, and learns to answer from chats.

Everything is small: a grammar of a few words, sums up to 6, one or two questions per chat, and a model of two layers.
The questions are about stories that are not in the training data.
"""

import itertools

import pytest
import torch

import ligermodels
from ligermodels.training.data import embedded_stories
from ligermodels.training.data.embedded_stories import conversation_question, conversations, stories
from ligermodels.training.data.run_tokenizer import train_tokenizer
from ligermodels.training.objectives.evaluation import count_correct_answers
from tests.training.loops import chat_documents, padded, split_into_steps, text_documents, train

DOCUMENTS, WARMUP = 8, 20  # per step; steps
BASE_STEPS, CHAT_STEPS = 300, 250
QUESTIONS = 60


@pytest.fixture(scope="module", autouse=True)
def small():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CHARACTER_NAMES", "ANIMALS", "PLACES", "THINGS", "LOSSES", "OPENINGS", "ENDINGS"):
            patch.setattr(embedded_stories, name, getattr(embedded_stories, name)[-3:])
        patch.setattr(embedded_stories, "ADDENDS", range(1, 4))
        patch.setattr(embedded_stories, "MINUENDS", range(2, 7))
        patch.setattr(embedded_stories, "TURN_COUNTS", (1, 2))
        yield


@pytest.fixture(scope="module")
def story_texts():
    return [text for text, _ in stories(seed=0, count=BASE_STEPS * DOCUMENTS)]


@pytest.fixture(scope="module")
def chats():
    return list(conversations(seed=0, count=500))


@pytest.fixture(scope="module")
def tokenizer(story_texts, chats):
    chat_texts = (text for messages in chats for message in messages for text in message.values())
    return train_tokenizer([*story_texts, *chat_texts], vocab_size=512)


@pytest.fixture(scope="module")
def questions(chats):
    unseen = (messages for messages in conversations(seed=1, count=200) if messages not in chats)
    return [conversation_question(messages) for messages in itertools.islice(unseen, QUESTIONS)]


@pytest.fixture(scope="module")
def base(story_texts, tokenizer):
    config = {
        "model_type": "qwen2", "vocab_size": tokenizer.vocab_size, "hidden_size": 64, "intermediate_size": 192,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    model = ligermodels.create(config, seed=0)
    steps = split_into_steps(text_documents(tokenizer, story_texts), DOCUMENTS)
    train(model, steps, padded, peak=1e-2, warmup=WARMUP, weight_decay=0.1)
    return model.requires_grad_(False)


def test_lora_on_chats_raises_accuracy_from_near_zero_to_80_percent(base, tokenizer, chats, questions):
    """Of a base whose weights were all trained."""
    model = ligermodels.create(base.config.raw)
    model.load_state_dict(base.state_dict())
    assert count_correct_answers(model, tokenizer, questions) <= 3
    ligermodels.add_lora(model, rank=8, alpha=32)
    documents = chat_documents(tokenizer, chats)
    repeated = itertools.islice(itertools.cycle(documents), CHAT_STEPS * DOCUMENTS)
    steps = split_into_steps(list(repeated), DOCUMENTS)
    train(model, steps, padded, peak=5e-3, warmup=WARMUP, weight_decay=0.0)
    assert count_correct_answers(model, tokenizer, questions) >= 48
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen
    for name in frozen:
        torch.testing.assert_close(
            model.get_parameter(name), base.get_parameter(name.replace(".base_layer", "")), rtol=0, atol=0
        )
