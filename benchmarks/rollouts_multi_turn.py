"""Seconds for one batch of multi-turn rollouts: one coroutine per rollout against a loop in which all rows take turns together.

    python benchmarks/rollouts_multi_turn.py --seeds 5
    python benchmarks/rollouts_multi_turn.py --in-process --rows 16

Each response of the environment takes a lognormal time (median 0.5 s, sigma 1), and a rollout has 1 to 4 turns; both depend
only on the seed. The environment waits for all rows of a call at the same time, so a call of the lock-step loop takes as long
as its slowest row. Engine and environment run over Ray unless `--in-process` is given. Both loops alternate in one process and
sample the same tokens; a difference is an error.

The limit is the time of the slowest rollout alone: the sum of its environment times, plus its turns sampled without other rows.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from cpu_time import cpu_seconds

from rl_backends_hf.generation import HuggingFaceGeneration
from rl_core.cluster import RayVirtualCluster
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.tokenizer import load_tokenizer
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_train.data.special_tokens import decode_answers
from rl_train.pools.actor_pool import ActorPool
from rl_train.pools.pool import InProcessPool
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.drivers import TurnFormatter
from rl_train.rollouts.environment_pool import EnvironmentPool
from rl_train.rollouts.trajectory import SampleStream, Trajectory, rollout_seed

MODEL = Path(__file__).parents[1] / "examples" / "addition" / "model"
TURNS = 4
MEDIAN_S, SIGMA = 0.5, 1.0


class Delayed(EnvironmentInterface):
    """Responds after the time that the metadata of each row states for its turn; the rows of a call wait together."""

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        time.sleep(max(state["delays"][state["turn"]] for state in metadata))
        turns = [state["turn"] + 1 for state in metadata]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "1+1="} for _ in metadata],
            metadata=[{**state, "turn": turn} for state, turn in zip(metadata, turns, strict=True)],
            next_stop_strings=[None for _ in metadata],
            rewards=torch.ones(len(metadata)),
            terminateds=torch.tensor([turn == len(s["delays"]) for s, turn in zip(metadata, turns, strict=True)]),
        )


def prompts(tokenizer: Any, rows: int, seed: int) -> list[Trajectory]:
    """Rollouts with their delays."""
    draw = random.Random(seed)
    trajectories = []
    for number in range(rows):
        delays = [MEDIAN_S * draw.lognormvariate(0.0, SIGMA) for _ in range(draw.randint(1, TURNS))]
        text = f"{draw.randint(10, 99)}+{draw.randint(10, 99)}="
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        trajectories.append(
            Trajectory(
                message_log=[{"role": "user", "content": text, "token_ids": ids}],
                metadata={"delays": delays, "turn": 0},
                task_name="delayed",
                group_id=number,
                index=number,
                ordinal=number,
                sample=0,
            )
        )
    return trajectories


def lock_step(collector: Collector, rows: Sequence[Trajectory]) -> None:
    """All rows sample a turn in one call, then the environment responds to all of them in one call."""
    formatter, environment = TurnFormatter(collector.tokenizer), collector.environments["delayed"]
    collector.generation.prepare_for_generation()
    active, turn = list(rows), 0
    while active:
        _sample_together(collector, active, turn)
        step_return = environment.step([row.conversation() for row in active], [row.metadata for row in active])
        for i, row in enumerate(active):
            row.metadata, row.done = step_return.metadata[i], bool(step_return.terminateds[i])
            if not row.done:
                ids = formatter.observation_ids(step_return.observations[i], row.message_log[-1]["token_ids"])
                row.add_observation(step_return.observations[i], ids)
        active, turn = [row for row in active if not row.done], turn + 1
    collector.generation.finish_generation()


def _sample_together(collector: Collector, rows: Sequence[Trajectory], turn: int) -> None:
    ids = [row.token_ids() for row in rows]
    lengths = torch.tensor([len(row) for row in ids])
    seeds = [rollout_seed(collector.seed, SampleStream.TRAINING, ordinal=r.ordinal, sample=0, turn=turn) for r in rows]
    output = collector.generation.generate(
        BatchedDataDict(
            {
                "input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
                "input_lengths": lengths,
                "stop_strings": [None] * len(rows),
                "sample_seeds": torch.tensor(seeds),
            }
        )
    )
    for i, row in enumerate(rows):
        start, end = int(lengths[i]), int(output["unpadded_sequence_lengths"][i])
        tokens = output["output_ids"][i, start:end]
        [text] = decode_answers(collector.tokenizer, [tokens])
        row.add_answer(text, tokens.clone(), output["logprobs"][i, start:end].clone())


def concurrent(collector: Collector, rows: Sequence[Trajectory]) -> None:
    """The library's loop."""
    collector.collect(rows, stream=SampleStream.TRAINING)


def measure(collector: Collector, loop: Any, rows: int, seed: int) -> tuple[float, float, list[list[int]]]:
    """Wall-clock seconds, CPU-seconds, and the tokens of each rollout."""
    played = prompts(collector.tokenizer, rows, seed)
    cpu, started = cpu_seconds(), time.perf_counter()
    loop(collector, played)
    return time.perf_counter() - started, cpu_seconds() - cpu, [row.token_ids().tolist() for row in played]


def turn_alone(collector: Collector, repeats: int = 5) -> float:
    """Median seconds to sample one turn of one row."""
    seconds = []
    for repeat in range(repeats):
        [row] = prompts(collector.tokenizer, 1, repeat)
        started = time.perf_counter()
        _sample_together(collector, [row], 0)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def make_collector(arguments: argparse.Namespace, exits: ExitStack) -> Collector:
    cluster = None
    if arguments.in_process:
        pool: Any = InProcessPool(Delayed, max_concurrency=arguments.rows, name="env.delayed")
    else:
        cluster = RayVirtualCluster([1], use_gpus=False)
        exits.callback(cluster.shutdown)
        pool = ActorPool(cluster, Delayed, 1, max_concurrency=arguments.rows, name="env.delayed")
    environment = EnvironmentPool(pool, task_name="delayed")
    exits.callback(environment.shutdown)
    generation = HuggingFaceGeneration(str(MODEL), max_new_tokens=arguments.new_tokens, max_model_len=64, cluster=cluster)
    exits.callback(generation.shutdown)
    return Collector(
        generation=generation,
        environments={"delayed": environment},
        tokenizer=load_tokenizer(MODEL),
        seed=0,
        max_turns={"delayed": TURNS},
        max_total_length=64,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--in-process", action="store_true")
    arguments = parser.parse_args()
    print(
        "| seed | lock-step s | concurrent s | limit s | speed-up | largest possible | share of it | CPU-s lock-step | CPU-s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    speedups, shares = [], []
    with ExitStack() as exits:
        collector = make_collector(arguments, exits)
        for warm in (lock_step, concurrent):
            measure(collector, warm, 2, seed=10**6)
        sampling_s = turn_alone(collector)
        for seed in range(arguments.seeds):
            order = (lock_step, concurrent) if seed % 2 == 0 else (concurrent, lock_step)
            results = {loop: measure(collector, loop, arguments.rows, seed) for loop in order}
            (before_s, before_cpu, expected), (after_s, after_cpu, tokens) = results[lock_step], results[concurrent]
            if tokens != expected:
                raise SystemExit(f"seed {seed}: the two loops sampled different tokens")
            delays = [row.metadata["delays"] for row in prompts(collector.tokenizer, arguments.rows, seed)]
            limit_s = max(sum(row) + len(row) * sampling_s for row in delays)
            speedups.append(before_s / after_s)
            shares.append(limit_s / after_s)
            print(
                f"| {seed} | {before_s:.2f} | {after_s:.2f} | {limit_s:.2f} | {speedups[-1]:.2f} | {before_s / limit_s:.2f} | "
                f"{shares[-1]:.0%} | {before_cpu:.1f} | {after_cpu:.1f} |"
            )
    print(f"\nmedian speed-up {statistics.median(speedups):.2f}, median share of the limit {statistics.median(shares):.0%}")


if __name__ == "__main__":
    main()
