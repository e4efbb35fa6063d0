"""An environment of 1 to 4 turns whose responses take a lognormal time, for benchmarks of the schedule."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import torch

from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn

TURNS = 4
MEDIAN_S, SIGMA = float(os.environ.get("SLOW_SUMS_MEDIAN_S", "0.5")), 1.0


class SlowSums(EnvironmentInterface):
    """Asks for further sums; each row of a call waits for its own time, so give it `max_concurrency`."""

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        time.sleep(max(MEDIAN_S * random.lognormvariate(0.0, SIGMA) for _ in message_log_batch))
        turns = [sum(message["role"] == "assistant" for message in log) for log in message_log_batch]
        prompts = [log[0]["content"] for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "1+2="} for _ in turns],
            metadata=metadata,
            next_stop_strings=[None] * len(turns),
            rewards=torch.rand(len(turns)),
            terminateds=torch.tensor([n >= random.Random(p).randint(1, TURNS) for n, p in zip(turns, prompts, strict=True)]),
        )
