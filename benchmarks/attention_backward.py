"""CPU time of attention in bfloat16, forward and backward, with the backward pass in float32 and in bfloat16.

    python benchmarks/attention_backward.py --lengths 64 128 256 512 1024 --rounds 5

Both variants alternate in one process and compute the same tokens: `--tokens` in rows of each length, on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from rl_backends_hf import cpu_attention

QUERY_HEADS, KEY_HEADS, WIDTH = 9, 3, 64
"""Those of SmolLM2-135M."""


def float32_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = cpu_attention._Float32Backward.apply(query, key, value, None)  # type: ignore[no-untyped-call]
    return output


def bfloat16_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def cpu_time(attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> float:
    """CPU-seconds of the forward and the backward pass."""
    before = time.process_time()
    attend(*inputs).sum().backward()
    return time.process_time() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    variants = {"float32": float32_backward, "bfloat16": bfloat16_backward}
    for length in arguments.lengths:
        inputs = [
            torch.randn(arguments.tokens // length, heads, length, WIDTH, dtype=torch.bfloat16, requires_grad=True)
            for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
        ]
        spent: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(arguments.rounds + 1):
            for name in list(variants)[:: 1 if number % 2 else -1]:
                spent[name].append(cpu_time(variants[name], inputs))
        medians = {name: statistics.median(times[1:]) for name, times in spent.items()}  # the first round warms up
        ratio = medians["float32"] / medians["bfloat16"]
        print(f"{length:5} tokens: {1000 * medians['float32']:.1f} ms, {1000 * medians['bfloat16']:.1f} ms, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
