"""The learning rate of each step, as a function of nothing but its number: a run that is resumed needs no state.

A step's number counts from 0. All schedules rise linearly over the warmup to `peak`, which the step after it has too.
    cosine   half a cosine, to a tenth of the peak at the last step
    linear   a straight line to zero, which the step after the last would have: Bergsma et al. 2025,
             https://arxiv.org/abs/2502.15938
    wsd      constant, then over the last fifth of all steps 1 - √ of the part of it that is gone: Hägele et al. 2024,
             https://arxiv.org/abs/2405.18392
"""

import math

FINAL_OF_COSINE = 0.1
DECAY_OF_WSD = 0.2  # the part of all steps


def learning_rate(schedule: str, step: int, steps: int, warmup: int, peak: float) -> float:
    """schedule: one of SCHEDULES."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * SCHEDULES[schedule](step, steps, warmup)


def cosine(step: int, steps: int, warmup: int) -> float:
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return FINAL_OF_COSINE + (1 - FINAL_OF_COSINE) * 0.5 * (1 + math.cos(math.pi * progress))


def linear(step: int, steps: int, warmup: int) -> float:
    return (steps - step) / (steps - warmup)


def wsd(step: int, steps: int, warmup: int) -> float:
    decay = min(math.ceil(DECAY_OF_WSD * steps), steps - warmup)
    return 1 - math.sqrt(max(0, step - (steps - decay)) / decay)


SCHEDULES = {"cosine": cosine, "linear": linear, "wsd": wsd}


def default_peak(hidden_size: int, *, pretrained: bool, lora: bool) -> float:
    """New weights: 4.5e-3 at the width of the tiny presets, falling as 1 / width. Pretrained ones: 1e-5, with LoRA ten
    times that (Schulman et al. 2025, https://thinkingmachines.ai/blog/lora). The same for all optimizers: Muon's
    update has the size of AdamW's."""
    if not pretrained:
        return 4.5e-3 * 128 / hidden_size
    return 1e-4 if lora else 1e-5
