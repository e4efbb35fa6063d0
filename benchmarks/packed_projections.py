"""CPU time of a decoding step in rl-backends-hf with and without joining the projections that read the same input.

    python benchmarks/packed_projections.py --dtype float32 --rounds 5 --threads 1
    python benchmarks/packed_projections.py --model path/to/model --dtype bfloat16

Queries, keys and values, and gate and up projection, are one packed product or separate ones. Both run in each round, in
alternating order. The difference between a long and a short call is reported, so prefill and packing do not count. Without
`--model`, the model is a Llama with the shape of SmolLM2-135M and random weights.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from typing import NamedTuple

import torch
import transformers
from generation_vs_transformers import load, rlcore_generate

from rl_backends_hf.sampling import packed_linears

SHORT = 13
"""Tokens of the short call, which is just long enough for packing."""
SIDES = {"joined": packed_linears._SAME_INPUT, "separate": ()}


class Cost(NamedTuple):
    """Milliseconds per token step of all rows."""

    cpu_ms: float
    wall_ms: float


def now() -> tuple[float, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, time.perf_counter()


def cost(model: transformers.PreTrainedModel, side: str, arguments: argparse.Namespace) -> Cost:
    prompts = [list(range(3 + prompt, 77 + prompt)) for prompt in range(2) for _ in range(arguments.rows // 2)]
    packed_linears._SAME_INPUT = SIDES[side]
    spent = []
    for tokens in (SHORT, SHORT + arguments.tokens):
        run = rlcore_generate(model, prompts, torch.full((len(prompts),), tokens))
        before = now()
        assert run() == tokens * len(prompts), "a row ended early"
        spent.append([end - start for start, end in zip(before, now(), strict=True)])
    cpu, wall = (1000 * (long - short) / arguments.tokens for short, long in zip(*spent, strict=True))
    return Cost(cpu, wall)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24, help="measured steps")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.set_defaults(device="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = load(arguments)
    found: dict[str, list[Cost]] = {side: [] for side in SIDES}
    cost(model, "joined", arguments)  # warm-up
    for number in range(arguments.rounds):
        for side in list(SIDES) if number % 2 == 0 else list(SIDES)[::-1]:
            found[side].append(cost(model, side, arguments))
    print(f"{arguments.dtype}, {arguments.rows} rows, {arguments.threads} threads, {arguments.rounds} rounds, per token step:")
    for side, costs in found.items():
        for unit, values in (("CPU-ms", [one.cpu_ms for one in costs]), ("ms", [one.wall_ms for one in costs])):
            print(f"{side:10} {unit:7} {statistics.median(values):6.1f} ({min(values):.1f} to {max(values):.1f})")


if __name__ == "__main__":
    main()
