"""A training loop over documents for tests, and several ways to batch documents."""

import torch
from torch.nn.utils.rnn import pad_sequence

from ligermodels.training.optimizers import build_optimizer, clip_and_step, set_learning_rate
from ligermodels.training.optimizers.schedules import learning_rate
from ligermodels.training.parallel.fsdp import gradient_norm

MAX_GRAD_NORM = 1.0


def text_documents(tokenizer, texts):
    """Returns documents (input_ids, labels) in which every token but the first is supervised."""
    return [(ids, ids) for ids in (torch.tensor([*ids, 0]) for ids in tokenizer.encode_batch(texts))]


def chat_documents(tokenizer, conversations):
    """Returns documents (input_ids, labels) in which the assistant's tokens are supervised."""
    documents = []
    for messages in conversations:
        ids, assistant_mask = map(torch.tensor, tokenizer.apply_chat_template_with_mask(messages))
        documents.append((ids, ids.masked_fill(~assistant_mask, -100)))
    return documents


def split_into_steps(documents, per_step):
    return [documents[start : start + per_step] for start in range(0, len(documents) - per_step + 1, per_step)]


def padded(documents):
    """Returns one batch with one document per row, padded at the end; padding is not supervised."""
    input_ids, labels = zip(*documents, strict=True)
    ids = pad_sequence(list(input_ids), batch_first=True)
    return [{"input_ids": ids, "labels": pad_sequence(list(labels), batch_first=True, padding_value=-100)}]


def packed(documents):
    """Returns one row of all documents: sequence packing with document masking."""
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
    """Returns one micro-batch per document, with unequal numbers of supervised tokens."""
    return [{"input_ids": input_ids[None], "labels": labels[None]} for input_ids, labels in documents]


def run(model, steps, batches_of, update):
    """Returns the loss of every step.

    steps: the documents of each step. update(step, loss): called after the backward passes of a step.
    """
    losses = []
    for step, documents in enumerate(steps):
        supervised = sum(int((labels[1:] != -100).sum()) for _, labels in documents)
        loss = torch.zeros(())
        for batch in batches_of(documents):
            share = model(**batch, num_items_in_batch=supervised).loss
            share.backward()
            loss += share.detach()
        update(step, loss)
        losses.append(float(loss))
    return losses


def train(model, steps, batches_of, *, peak, warmup, weight_decay):
    model.train()
    optimizer = build_optimizer(model, weight_decay=weight_decay)

    def update(step, loss):
        set_learning_rate(optimizer, learning_rate("cosine", step, len(steps), warmup, peak))
        clip_and_step(optimizer, loss, gradient_norm(model), MAX_GRAD_NORM)
        optimizer.zero_grad()

    return run(model, steps, batches_of, update)
