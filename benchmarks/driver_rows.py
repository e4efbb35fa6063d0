"""CPU time of the driver per row, from prompts to batch to rollout log, with 8,192 single-turn rows per step.

Engine and environment answer at once, in this process, so what remains is the driver's own work. Two runs alternate: with
full garbage collections as rare as in `rlcore train`, and as frequent as Python's default.

    python benchmarks/driver_rows.py --rounds 3
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from pydantic import Field

from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.generation import HFGenerationWorker, HuggingFaceGeneration
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_train.config.algorithm import RolloutNeeds, RuntimeNeeds
from rl_train.config.schema import AlgorithmConfig
from rl_train.garbage_collection import rare_full_collections
from rl_train.launch.train import train as train_run
from rl_train.rollouts.records import rollout_records

MODEL = Path(__file__).parents[1] / "examples" / "addition" / "model"
PROMPTS, SAMPLES, NEW_TOKENS = 1024, 8, 3
_seconds: list[float] = []


class CollectConfig(AlgorithmConfig):
    """The section `collect`."""

    default_loss = "nll"
    num_prompts_per_step: int = Field(default=PROMPTS, ge=1)
    """Number of prompts per step."""

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        """The run has an engine, prompts and an environment."""
        return RuntimeNeeds(rollouts=RolloutNeeds(prompts_per_draw=self.num_prompts_per_step, samples_per_prompt=SAMPLES))


def collect(config: CollectConfig, run: Any) -> None:
    """Collect and log the rollouts of each step, and train nothing."""
    for step in run.steps():
        run.weights.sync(only_if_stale=True)
        started = time.process_time()
        rollouts = run.rollouts.take(step, config.num_prompts_per_step)
        run.log_rollouts(rollout_records(rollouts.trajectories), step)
        _seconds.append(time.process_time() - started)


class InstantWorker(HFGenerationWorker):
    """Answers each row of a large batch at once; the few rows of the canary are sampled."""

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool = False) -> BatchedDataDict[Any]:
        lengths = data["input_lengths"]
        if len(lengths) < PROMPTS:
            return super().generate(data, greedy=greedy)
        ids = torch.zeros(len(lengths), int(lengths.max()) + NEW_TOKENS, dtype=torch.long)
        ids[:, : data["input_ids"].shape[1]] = data["input_ids"]
        new = lengths[:, None] + torch.arange(NEW_TOKENS)
        return BatchedDataDict(
            {
                "output_ids": ids.scatter(1, new, 5),
                "logprobs": torch.zeros(ids.shape).scatter(1, new, -1.0),
                "generation_lengths": torch.full_like(lengths, NEW_TOKENS),
                "unpadded_sequence_lengths": lengths + NEW_TOKENS,
                "truncated": torch.zeros(len(lengths), dtype=torch.bool),
                "weight_version": torch.full_like(lengths, self.get_weight_version()),
            }
        )


class Engine(HuggingFaceGeneration):
    """The engine of `InstantWorker`."""

    capabilities = ("async_rows", "refit_in_flight", "held_weight_digests", "by_reference", "shared_memory")

    def __init__(self, *, config: Any, **options: Any) -> None:
        with patch("rl_backends_hf.generation.HFGenerationWorker", InstantWorker):
            super().__init__(config=HFGenerationConfig(**config.model_dump()), **options)


class Ends(EnvironmentInterface):
    """Ends each rollout after its first turn, with reward 1."""

    def __init__(self, config: Any = None) -> None:
        pass

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        rows = len(message_log_batch)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * rows,
            metadata=metadata,
            next_stop_strings=[None] * rows,
            rewards=torch.ones(rows),
            terminateds=torch.ones(rows, dtype=torch.bool),
        )


def driver_ms_per_row(folder: Path, *, rare: bool) -> float:
    """CPU milliseconds of this process per row; the first of three steps is not counted."""
    _seconds.clear()
    config = {
        "algorithm": {"train": "driver_rows.collect", "config": "driver_rows.CollectConfig"},
        "collect": {"max_num_steps": 3},
        "cluster": {"backend": "in_process"},
        "policy": {
            "backend": "hf",
            "model_name": str(MODEL),
            "max_total_sequence_length": 16,
            "optimizer": {"kwargs": {"lr": 1e-4}},
            "generation": {"backend": "driver_rows.Engine", "max_new_tokens": 5},
        },
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 3 * PROMPTS, "min_digits": 2}},
        "env": {"arithmetic": {"env_cls": "driver_rows.Ends"}},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(folder)},
    }
    folder.mkdir()
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    gc.collect()
    with patch("rl_train.run.rare_full_collections", rare_full_collections if rare else nullcontext):
        train_run(file, resume="never", console=False)
    return 1000 * sum(_seconds[1:]) / (len(_seconds[1:]) * PROMPTS * SAMPLES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    os.chdir(Path(__file__).parent)  # the config names this module
    times: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(parser.parse_args().rounds):
            for rare in (True, False):
                times[rare].append(driver_ms_per_row(Path(folder) / f"{number}_{rare}", rare=rare))
    for rare, name in ((True, "rare full collections"), (False, "Python's default")):
        lowest, median, highest = min(times[rare]), statistics.median(times[rare]), max(times[rare])
        print(f"{name}: {median:.3f} ms of CPU time per row ({lowest:.3f} to {highest:.3f})")
    print(f"ratio of the medians: {statistics.median(times[True]) / statistics.median(times[False]):.2f}")


if __name__ == "__main__":
    from driver_rows import main as measure  # the module that the config names, not a second copy

    measure()
