"""Learning rate schedules. The rate depends only on the step number, so that resume needs no schedule state.

Steps count from 0. Every schedule has a linear warmup to `peak`; the first step after the warmup has `peak` too.
    cosine   cosine decay to a tenth of the peak at the last step
    linear   linear decay to zero, which would be reached one step after the last: Bergsma et al. 2025,
             https://arxiv.org/abs/2502.15938
    wsd      warmup, stable, decay: constant, then over the last fifth of all steps 1 - √(fraction of the decay that is
             done): Hägele et al. 2024, https://arxiv.org/abs/2405.18392
"""

import math

COSINE_FINAL_FRACTION = 0.1  # of the peak learning rate
WSD_DECAY_FRACTION = 0.2  # of all steps


def learning_rate(schedule: str, step: int, steps: int, warmup: int, peak: float) -> float:
    """Returns the learning rate of a step. schedule: one of SCHEDULES. steps: of the whole run, warmup included."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * SCHEDULES[schedule](step, steps, warmup)


def cosine_decay(step: int, steps: int, warmup: int) -> float:
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return COSINE_FINAL_FRACTION + (1 - COSINE_FINAL_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress))


def linear_decay(step: int, steps: int, warmup: int) -> float:
    return (steps - step) / (steps - warmup)


def wsd_decay(step: int, steps: int, warmup: int) -> float:
    decay = min(math.ceil(WSD_DECAY_FRACTION * steps), steps - warmup)
    return 1 - math.sqrt(max(0, step - (steps - decay)) / decay)


SCHEDULES = {"cosine": cosine_decay, "linear": linear_decay, "wsd": wsd_decay}


def default_learning_rate(hidden_size: int, *, pretrained: bool, lora: bool) -> float:
    """Returns the default peak learning rate, the same for all optimizers: Muon's update has the size of AdamW's.

    New weights: 4.5e-3 at hidden size 128 (the tiny presets), proportional to 1 / hidden_size. Pretrained weights:
    2e-5, which is near the best of three data sets on two real models (docs/real-models.md); with LoRA ten times that
    (Schulman et al. 2025, https://thinkingmachines.ai/blog/lora).
    """
    if not pretrained:
        return 4.5e-3 * 128 / hidden_size
    return 2e-4 if lora else 2e-5


def default_image_learning_rate(hidden_size: int) -> float:
    """Returns the default peak learning rate of new weights that learn from images: 1e-3 at hidden size 128.

    At the rate of new weights of text the tiny Qwen2-VL knows no shape after 500 steps, with this rate half of them.
    """
    return 1e-3 * 128 / hidden_size
