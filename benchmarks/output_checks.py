"""Measure what the checks of an engine's output add to the CPU time of generation, against the same rows read without checks.

    python benchmarks/output_checks.py --rows 512
    python benchmarks/output_checks.py --rows 2048 --whole-batch
    python benchmarks/output_checks.py --model path/to/model --rows 8 --new-tokens 16 --prompt "Name a color."

`RowSampler` samples every row by itself with the Transformers engine in this process, in alternating rounds: with the checks,
and with the columns only read. With `--whole-batch`, `BatchSampler` samples all rows in one call. The functions that read and
check rows are timed in the thread, less the time of the clock itself. The difference per row, divided by the CPU time of
generation of the rounds without checks, is the share of the checks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rl_backends_hf.generation import HuggingFaceGeneration
from rl_core.data.tokenizer import load_tokenizer
from rl_core.testing.outputs import models
from rl_train.metrics.progress import RolloutCounts
from rl_train.rollouts import engines

ADDITION = Path(__file__).parents[1] / "examples/addition/model"
CALLS_OF_THE_CLOCK = 5000


class RowClock:
    """Thread time spent in the functions that turn an engine's output into turns."""

    def __init__(self) -> None:
        self.seconds, self._calls = 0.0, 0
        for name in ("right_row", "checked_generation", "_right_turn", "_outcomes"):
            setattr(engines, name, self._timed(getattr(engines, name)))
        self._checks = {name: getattr(engines, name) for name in ("right_row", "checked_generation")}

    def begin(self, *, with_checks: bool) -> None:
        """Reset the clock; without checks, the columns of a row are read as those of a batch that was checked before."""
        self.seconds, self._calls = 0.0, 0
        engines.right_row = self._checks["right_row"] if with_checks else lambda *_: None
        check = self._checks["checked_generation"] if with_checks else lambda output, **_: output
        engines.checked_generation = models.checked_generation = check  # of streamed rows, and of whole batches

    def per_row(self, rows: int) -> float:
        """Seconds per row since `begin`, without those of reading the clock."""
        begun = time.thread_time()
        for _ in range(CALLS_OF_THE_CLOCK):
            time.thread_time()
        of_clock = (time.thread_time() - begun) / CALLS_OF_THE_CLOCK
        return (self.seconds - self._calls * of_clock) / rows

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - begun
                self._calls += 1

        return call


async def sampled_tokens(sampler: engines.TurnSampler, prompts: list[torch.Tensor]) -> float:
    """Sample all rows at once; the mean number of new tokens."""
    requests = [
        engines.TurnRequest(token_ids=prompt, stop_strings=None, seed=row, prompt_id=row, position=row, messages=[])
        for row, prompt in enumerate(prompts)
    ]
    turns = await asyncio.gather(*map(sampler.sample, requests))
    return statistics.mean(len(turn.token_ids) for turn in turns)


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ADDITION))
    parser.add_argument("--prompt", help="prompt of all rows; by default each row is a sum of two numbers")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--whole-batch", action="store_true", help="sample all rows in one call")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind, after one that is not counted")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(options.model)
    texts = [options.prompt or f"{row % 90 + 10}+{row * 7 % 90 + 10}=" for row in range(options.rows)]
    prompts = [torch.tensor(tokenizer.encode(text)) for text in texts]
    engine = HuggingFaceGeneration(options.model, max_new_tokens=options.new_tokens)
    clock = RowClock()
    reading: dict[bool, list[float]] = {True: [], False: []}
    generation: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * options.rounds + 2):
        with_checks = number % 2 == 0
        clock.begin(with_checks=with_checks)
        begun = time.process_time()
        sampler: engines.TurnSampler
        if options.whole_batch:
            sampler = engines.BatchSampler(
                engine,
                rollouts=options.rows,
                greedy=False,
                pad_token_id=tokenizer.pad_token_id or 0,
                counts=RolloutCounts(),
                one_turn=True,
            )
        else:
            sampler = engines.RowSampler(engine, greedy=False, pad_token_id=tokenizer.pad_token_id or 0)
        tokens = asyncio.run(sampled_tokens(sampler, prompts))
        if number > 1:
            generation[with_checks].append((time.process_time() - begun) / options.rows)
            reading[with_checks].append(clock.per_row(options.rows))
    engine.shutdown()
    read, checked = (statistics.median(reading[kind]) * 1e6 for kind in (False, True))
    whole = statistics.median(generation[False]) * 1e6
    result = {
        "rows": options.rows,
        "new_tokens_per_row": round(tokens, 1),
        "generation_us_per_row": round(whole),
        "read_us_per_row": round(read, 1),
        "read_and_checked_us_per_row": round(checked, 1),
        "share_of_checks_percent": round(100 * (checked - read) / whole, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
