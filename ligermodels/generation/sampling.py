"""One token drawn from the logits of each row. Must not know models."""

import torch
from torch import Tensor


def sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """One token a row, [B], from logits [B, V]."""
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p is not None:
        probability, order = logits.softmax(-1).sort(descending=True)
        before = probability.cumsum(-1) - probability  # what likelier tokens hold; the likeliest always stays
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter_(1, order, before >= top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
