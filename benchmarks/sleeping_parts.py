"""An engine and a policy that spend their time asleep, for benchmarks of the schedule on machines with few cores.

Both are those of the Transformers backend with a tiny model, so weights, versions, refits and checks are real. A row of the
engine occupies one of `SLOTS` slots of its replica for a lognormal time that depends on its seed only, and a training call
takes at least `TRAIN_S` seconds.
"""

from __future__ import annotations

import heapq
import os
import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from rl_backends_hf.config import HFGenerationConfig, HFPolicyConfig
from rl_backends_hf.generation import HFGenerationWorker, HuggingFaceGeneration
from rl_backends_hf.policy import HuggingFacePolicy
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.worker import GenerationRequest

SLOTS = int(os.environ.get("SLEEPING_SLOTS", "32"))
TRAIN_S = float(os.environ.get("SLEEPING_TRAIN_S", "2.0"))
MEDIAN_S, SIGMA, LONGEST_S = 1.0, 0.9, 13.6


def row_seconds(seed: int) -> float:
    """The time of a row on its slot."""
    return min(MEDIAN_S * random.Random(seed).lognormvariate(0.0, SIGMA), LONGEST_S)


class SleepingGenerationWorker(HFGenerationWorker):
    """Samples a row when its slot becomes free, and returns it when its time has passed."""

    def setup(self) -> Any:
        self._queue: deque[GenerationRequest] = deque()
        self._ends: list[tuple[float, str]] = []
        self._answers: dict[str, BatchedDataDict[Any]] = {}
        return super().setup()

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool = False) -> BatchedDataDict[Any]:
        started, free = time.monotonic(), [0.0] * SLOTS
        seeds = data["sample_seeds"].tolist() if "sample_seeds" in data else []
        for seed in seeds if len(seeds) >= SLOTS else ():  # fewer rows are those of the canary
            heapq.heapreplace(free, free[0] + row_seconds(seed))
        answer = super().generate(data, greedy=greedy)
        time.sleep(max(started + max(free) - time.monotonic(), 0.0))
        return answer

    def poll(
        self, arrivals: Sequence[GenerationRequest], *, cancelled: Sequence[str] = (), wait_s: float = 0.1
    ) -> dict[str, Any]:
        self._queue += arrivals
        for name in cancelled:
            self._answers.pop(name, None)
        self._queue = deque(request for request in self._queue if request.name not in cancelled)
        self._ends = [(end, name) for end, name in self._ends if name not in cancelled]
        heapq.heapify(self._ends)
        until = time.monotonic() + (0.0 if cancelled else wait_s)
        while True:
            self._begin()
            now = time.monotonic()
            ended = {}
            while self._ends and self._ends[0][0] <= now:
                name = heapq.heappop(self._ends)[1]
                ended[name] = self._answers.pop(name)
            if ended or now >= until:
                return ended
            time.sleep(max(min([until, *(end for end, _ in self._ends[:1])]) - now, 0.0))

    def _begin(self) -> None:
        began = time.monotonic()
        requests: list[GenerationRequest] = []
        while self._queue and len(self._ends) + len(requests) < SLOTS:
            requests.append(self._queue.popleft())
        if not requests:
            return
        answers = super().generate(BatchedDataDict.from_batches([request.row for request in requests]))
        for row, request in enumerate(requests):
            self._answers[request.name] = answers.slice(row, row + 1)
            seconds = row_seconds(int(request.row["sample_seeds"][0]))
            heapq.heappush(self._ends, (began + seconds, request.name))


class SleepingPolicyWorker(HFPolicyWorker):
    """Trains the tiny model, then sleeps for the rest of the time."""

    def train(self, *arguments: Any, **options: Any) -> Any:
        started = time.monotonic()
        result = super().train(*arguments, **options)
        time.sleep(max(started + TRAIN_S - time.monotonic(), 0.0))
        return result


class Generation(HuggingFaceGeneration):
    """The engine."""

    capabilities = ("async_rows", "refit_in_flight", "held_weight_digests", "shared_memory", "collective", "disk")

    def __init__(self, *, config: Any, **options: Any) -> None:
        with patch("rl_backends_hf.generation.HFGenerationWorker", SleepingGenerationWorker):
            super().__init__(config=HFGenerationConfig(**config.model_dump()), **options)


class Policy(HuggingFacePolicy):
    """The policy."""

    capabilities = ("shared_memory", "collective", "disk")

    def __init__(self, *, config: Any, **options: Any) -> None:
        with patch("rl_backends_hf.policy.HFPolicyWorker", SleepingPolicyWorker):
            super().__init__(config=HFPolicyConfig(**config.model_dump()), **options)
