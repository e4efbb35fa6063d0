"""CPU time of the driver per turn, and occupied slots, with 1,024 rollouts on 8 replicas that sleep."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rl_backends_base.distributed_generation import DistributedGeneration
from rl_core.backend import GenerationFacts
from rl_core.cluster import RayVirtualCluster
from rl_core.config.schema import GenerationConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.tokenizer import load_tokenizer
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_core.interfaces.worker import GenerationRequest, GenerationWorker
from rl_core.interfaces.worker_context import WorkerContext
from rl_train.rollouts.collect import Collector, RolloutLoop
from rl_train.rollouts.trajectory import SampleStream, Trajectory

MODEL = Path(__file__).parents[1] / "examples" / "addition" / "model"
REPLICAS, ROWS, TURNS, NEW_TOKENS = 8, 1024, 5, 8


class SleepingWorker(GenerationWorker):
    """Returns each row after 2 to 3 s, without a model."""

    def __init__(self, context: WorkerContext, config: GenerationConfig) -> None:
        self._rows: dict[str, tuple[float, BatchedDataDict[Any]]] = {}
        self._slept_s = 0.0

    def setup(self) -> GenerationFacts:
        return {"max_model_len": 4096, "vocab_size": 64, "device": "cpu", "reads_text": False, "reads_sampling": True}

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool = False) -> BatchedDataDict[Any]:
        raise NotImplementedError

    def poll(
        self, arrivals: Sequence[GenerationRequest], *, cancelled: Sequence[str] = (), wait_s: float = 0.1
    ) -> dict[str, Any]:
        now = time.monotonic()
        for request in arrivals:
            seconds = 2.0 + random.Random(int(request.row["sample_seeds"][0])).random()
            self._rows[request.name] = now + seconds, request.row
            self._slept_s += seconds
        until = now + wait_s
        while True:
            now = time.monotonic()
            ended = [name for name, (end, _) in self._rows.items() if end <= now]
            if ended or now >= until:
                return {name: _answer(self._rows.pop(name)[1]) for name in ended}
            time.sleep(max(min([until, *(end for end, _ in self._rows.values())]) - now, 0.0))

    def slept_s(self) -> float:
        """Seconds of all rows so far."""
        return self._slept_s

    def get_weight_version(self) -> int:
        return 0

    def invalidate_kv_cache(self) -> bool:
        return True


def _answer(row: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    prompt = row["input_ids"][0, : int(row["input_lengths"][0])]
    logprobs = torch.zeros(1, len(prompt) + NEW_TOKENS)
    logprobs[:, len(prompt) :] = -1.0
    return BatchedDataDict(
        {
            "output_ids": torch.cat([prompt, torch.full((NEW_TOKENS,), 5)])[None],
            "logprobs": logprobs,
            "generation_lengths": torch.tensor([NEW_TOKENS]),
            "unpadded_sequence_lengths": torch.tensor([len(prompt) + NEW_TOKENS]),
            "truncated": torch.tensor([False]),
            "weight_version": torch.tensor([0]),
        }
    )


class Continues(EnvironmentInterface):
    """Responds at once, in this process, until the last turn."""

    def __init__(self) -> None:
        self.ended: list[float] = []
        """When each rollout had its last turn, in seconds of `time.perf_counter`."""

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        turns = [sum(message["role"] == "assistant" for message in log) for log in message_log_batch]
        self.ended += [time.perf_counter() for turn in turns if turn == TURNS]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "1+1="} for _ in turns],
            metadata=metadata,
            next_stop_strings=[None] * len(turns),
            rewards=torch.ones(len(turns)),
            terminateds=torch.tensor([turn == TURNS for turn in turns]),
        )


def driver_cost() -> dict[str, float]:
    """CPU time of this process per turn, and the fraction of a rollout's time in which its row was asleep in the engine.

    All rollouts begin at the same time, and the environment takes no time, so the rest is the overhead of driver and Ray.
    """
    with ExitStack() as exits:
        cluster = RayVirtualCluster([REPLICAS], use_gpus=False, cpus_per_bundle=0.1)
        exits.callback(cluster.shutdown)
        generation = DistributedGeneration(
            worker_class=SleepingWorker, config=GenerationConfig(backend="sleeping", max_new_tokens=NEW_TOKENS), cluster=cluster
        )
        exits.callback(generation.shutdown)
        tokenizer = load_tokenizer(MODEL)
        ids = torch.tensor(tokenizer("12+34=", add_special_tokens=False)["input_ids"])
        rows = [
            Trajectory(
                message_log=[{"role": "user", "content": "12+34=", "token_ids": ids}],
                metadata=None,
                task_name="continues",
                group_id=number // 8,
                index=number,
                ordinal=number // 8,
                sample=number % 8,
            )
            for number in range(ROWS)
        ]
        environment = Continues()
        collector = Collector(
            generation=generation,
            environments={"continues": environment},
            tokenizer=tokenizer,
            seed=0,
            max_turns={"continues": TURNS},
            max_total_length=4096,
            row_by_row=True,
            loop=RolloutLoop(threaded=True),
        )
        exits.callback(collector.loop.close)
        generation.wait_ready()
        cpu, started = time.process_time(), time.perf_counter()
        collector.collect(rows, stream=SampleStream.TRAINING)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - started
        slept = sum(generation.group.run_all("slept_s"))
    in_progress = sum(end - started for end in environment.ended)
    return {
        "rows": ROWS,
        "turns": ROWS * TURNS,
        "driver_cpu_ms_per_turn": round(1000 * cpu / (ROWS * TURNS), 3),
        "wall_s": round(wall, 2),
        "mean_rollout_s": round(in_progress / ROWS, 2),
        "mean_rollout_s_asleep": round(slept / ROWS, 2),
        "slots_occupied": round(slept / in_progress, 3),
    }
