"""The same fp32 run with transformers: equal data, weights, AdamW, gradient clipping and schedule give equal losses."""

import math
import warnings

import pytest
import torch
from torch import nn

import ligermodels
from ligermodels.training.data.embedded_stories import conversations, vocabulary_texts
from ligermodels.training.data.run_tokenizer import train_tokenizer
from tests.training.loops import MAX_GRAD_NORM, chat_documents, one_by_one, packed, padded, run, split_into_steps, train

STEPS, DOCUMENTS, WARMUP, PEAK, WEIGHT_DECAY = 50, 8, 10, 1e-2, 0.1
CONFIG = {
    "model_type": "qwen2", "vocab_size": 1024, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def steps():
    tokenizer = train_tokenizer(vocabulary_texts(), CONFIG["vocab_size"])
    return split_into_steps(chat_documents(tokenizer, conversations(seed=0, count=STEPS * DOCUMENTS)), DOCUMENTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start") / "model"
    ligermodels.export(ligermodels.create(CONFIG, seed=3), folder)
    return folder


@pytest.fixture(scope="module")
def theirs(folder, steps):
    """Losses and gradient norms of transformers, with torch's optimizer, gradient clipping and schedules."""
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
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings(action="ignore"):
            schedule.step()

    return run(model, steps, padded, update), norms


@pytest.mark.parametrize("batches_of", [padded, packed, one_by_one])
def test_fifty_steps_have_the_losses_of_transformers(batches_of, folder, steps, theirs):
    """With one document per row, all documents packed into one row, or eight micro-batches."""
    losses, norms = theirs
    assert losses[0] == pytest.approx(math.log(CONFIG["vocab_size"]), rel=0.02) and losses[-1] < losses[0] / 3
    assert 5 < sum(norm > MAX_GRAD_NORM for norm in norms) < 45  # some steps are clipped and some are not
    ours = train(ligermodels.load(folder), steps, batches_of, peak=PEAK, warmup=WARMUP, weight_decay=WEIGHT_DECAY)
    torch.testing.assert_close(ours, losses, rtol=1e-4, atol=0)
