"""A training loop of the library's parts over documents, for tests, and the ways to make batches of documents."""

import torch
from torch.nn.utils.rnn import pad_sequence

from ligermodels.training.optimizers import build_optimizer, clip_and_step, set_learning_rate
from ligermodels.training.optimizers.schedules import learning_rate
from ligermodels.training.scaling.fsdp import gradient_norm

CLIP = 1.0


def of_texts(tokenizer, texts):
    """Documents (input_ids, labels), of which all but the first token is predicted."""
    return [(ids, ids) for ids in (torch.tensor([*ids, 0]) for ids in tokenizer.encode_batch(texts))]


def of_conversations(tokenizer, conversations):
    """Documents (input_ids, labels), of which what the assistant says is predicted."""
    documents = []
    for messages in conversations:
        ids, said = map(torch.tensor, tokenizer.apply_chat_template_with_mask(messages))
        documents.append((ids, ids.masked_fill(~said, -100)))
    return documents


def in_steps(documents, per_step):
    return [documents[start : start + per_step] for start in range(0, len(documents) - per_step + 1, per_step)]


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
    """The loss of every step; steps: of each its documents. update(step, loss) follows the step's gradients."""
    losses = []
    for step, documents in enumerate(steps):
        predicted = sum(int((labels[1:] != -100).sum()) for _, labels in documents)
        loss = torch.zeros(())
        for batch in batches_of(documents):
            share = model(**batch, num_items_in_batch=predicted).loss
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
        clip_and_step(optimizer, loss, gradient_norm(model), CLIP)
        optimizer.zero_grad()

    return run(model, steps, batches_of, update)
