"""The same run there and here, in fp32: equal data, seed, AdamW, clipping and schedule give equal losses."""

import math
import warnings

import pytest
import torch
from ligermodels.training.optimizers import build_optimizer, clipped_step, set_learning_rate
from ligermodels.training.schedules import learning_rate
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import ligermodels
from ligermodels.training.corpus import conversations, vocabulary_texts
from ligermodels.training.parallel import gradient_norm
from ligermodels.training.tokens import train_tokenizer

STEPS, DOCUMENTS, WARMUP, PEAK, WEIGHT_DECAY, CLIP = 50, 8, 10, 1e-2, 0.1, 1.0
CONFIG = {
    "model_type": "qwen2", "vocab_size": 1024, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def steps():
    """Of each step the documents, as (input_ids, labels); only what the assistant says is predicted."""
    tokenizer = train_tokenizer(vocabulary_texts(), CONFIG["vocab_size"])
    documents = []
    for messages in conversations(seed=0, count=STEPS * DOCUMENTS):
        ids, said = map(torch.tensor, tokenizer.apply_chat_template_with_mask(messages))
        documents.append((ids, ids.masked_fill(~said, -100)))
    return [documents[start : start + DOCUMENTS] for start in range(0, len(documents), DOCUMENTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start") / "model"
    ligermodels.export(ligermodels.create(CONFIG, seed=3), folder)
    return folder


def padded(documents):
    """One batch, a row a document; padding comes after all that is predicted and is not predicted itself."""
    input_ids, labels = zip(*documents, strict=True)
    ids = pad_sequence(list(input_ids), batch_first=True)
    return [{"input_ids": ids, "labels": pad_sequence(list(labels), batch_first=True, padding_value=-100)}]


def packed(documents):
    """One row of all documents, which do not see each other."""
    input_ids, labels = zip(*documents, strict=True)
    lengths = torch.tensor([0, *map(len, input_ids)])
    labels = torch.cat([torch.cat((torch.tensor([-100]), row[1:])) for row in labels])
    return [
        {
            "input_ids": torch.cat(input_ids)[None],
            "labels": labels[None],
            "cu_seqlens": lengths.cumsum(0, dtype=torch.int32),
            "max_seqlen": int(lengths.max()),
        }
    ]


def one_by_one(documents):
    """As many micro-batches as documents, with unequal numbers of predicted tokens."""
    return [{"input_ids": input_ids[None], "labels": labels[None]} for input_ids, labels in documents]


def run(model, steps, batches_of, update):
    losses = []
    for step, documents in enumerate(steps):
        predicted = sum(int((labels[1:] != -100).sum()) for _, labels in documents)
        loss = 0.0
        for batch in batches_of(documents):
            share = model(**batch, num_items_in_batch=predicted).loss
            share.backward()
            loss += share.detach()
        update(step, loss)
        losses.append(float(loss))
    return losses


@pytest.fixture(scope="module")
def theirs(folder, steps):
    """Losses and gradient norms of transformers, with what torch has of optimizer, clipping and schedules."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    decays = {True: [], False: []}
    for name, parameter in model.named_parameters():
        decays[name.endswith("_proj.weight") or name == "lm_head.weight"].append(parameter)
    groups = [{"params": params, "weight_decay": WEIGHT_DECAY * decay} for decay, params in decays.items()]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP, total_iters=WARMUP - 1)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 1 - WARMUP, eta_min=PEAK / 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [WARMUP])
    norms = []

    def update(step, loss):
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings(action="ignore"):
            schedule.step()

    return run(model, steps, padded, update), norms


def ours(folder, steps, batches_of):
    model = ligermodels.load(folder).train()
    optimizer = build_optimizer(model, weight_decay=WEIGHT_DECAY)

    def update(step, loss):
        set_learning_rate(optimizer, learning_rate("cosine", step, STEPS, WARMUP, PEAK))
        clipped_step(optimizer, loss, gradient_norm(model), CLIP)
        optimizer.zero_grad()

    return run(model, steps, batches_of, update)


@pytest.mark.parametrize("batches_of", [padded, packed, one_by_one])
def test_fifty_steps_have_the_losses_of_transformers(batches_of, folder, steps, theirs):
    losses, norms = theirs
    assert losses[0] == pytest.approx(math.log(CONFIG["vocab_size"]), rel=0.02) and losses[-1] < losses[0] / 3
    assert 5 < sum(norm > CLIP for norm in norms) < 45  # clipping is at work, and not always
    torch.testing.assert_close(ours(folder, steps, batches_of), losses, rtol=1e-4, atol=0)
