"""The named learning-rate schedules, as factors of the learning rate. Independent of optimizers.

Arguments: the optimizer steps done, then those of `policy.scheduler.kwargs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def constant(step: int, num_warmup_steps: int = 0) -> float:
    """1 after a linear warm-up."""
    return (step + 1) / (num_warmup_steps + 1) if step < num_warmup_steps else 1.0


def linear(step: int, num_training_steps: int, num_warmup_steps: int = 0) -> float:
    """Linear decay from 1 to 0, after a linear warm-up."""
    if step < num_warmup_steps:
        return constant(step, num_warmup_steps)
    return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))


def cosine(step: int, num_training_steps: int, num_warmup_steps: int = 0, min_lr_ratio: float = 0.0) -> float:
    """Cosine decay from 1 to `min_lr_ratio` over half a period, after a linear warm-up."""
    if step < num_warmup_steps:
        return constant(step, num_warmup_steps)
    done = min(1.0, (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps))
    return min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))


SCHEDULES: dict[str, Callable[..., float]] = {"constant": constant, "cosine": cosine, "linear": linear}
