def sample(logits, temperature, top_k, top_p, min_p, seeds, counters):
    t = logits.argmax(-1)
    return t, logits.float().log_softmax(-1).gather(1, t[:, None])[:, 0]
