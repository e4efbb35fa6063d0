"""CPU time of a decoding step in rl-backends-hf with and without storing a shared prompt once.

    python benchmarks/shared_prompts.py --prompt-tokens 512 --threads 1

Two loops sample the same rows, one step each in turn, so both see the same machine. The lower quartile over the steps is
reported, which other processes affect least. Without `--model`, the model is a Llama with the shape of SmolLM2-135M and random
weights: the speed does not depend on the weights.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from generation_vs_transformers import load

from rl_backends_base.row_sampler import DecodeLoop
from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.sampling.sampler import Sampler
from rl_core.data.batched_data_dict import BatchedDataDict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--group", type=int, default=8, help="rows per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.set_defaults(device="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model, config = load(arguments), HFGenerationConfig(max_new_tokens=arguments.new_tokens)
    rows = arguments.prompts * arguments.group
    ids = torch.randint(3, 1000, (arguments.prompts, arguments.prompt_tokens)).repeat_interleave(arguments.group, dim=0)
    data = BatchedDataDict(input_ids=ids, input_lengths=torch.full((rows,), arguments.prompt_tokens))
    spent: dict[str, list[float]] = {"shared": [], "copied": []}
    samplers = {side: Sampler(model, config) for side in spent}
    with samplers["shared"].prepared(rows=rows, steps=arguments.new_tokens), samplers["shared"].without_gradients():
        loops = {}
        for side, sampler in samplers.items():
            sampler._sharing.is_supported = side == "shared"
            loops[side] = DecodeLoop(sampler, frozenset(), vocab_size=sampler.vocab_size)
            loops[side].add(sampler.rows.read(data, greedy=False))
            loops[side].step(0)
        for number in range(arguments.new_tokens - 2):
            for side in list(spent)[:: 1 if number % 2 else -1]:
                start = time.process_time()
                loops[side].step(0)
                spent[side].append(1000 * (time.process_time() - start))
    print(f"CPU-ms per token step of {rows} rows, lower quartile of {arguments.new_tokens - 2} steps:")
    for side, values in spent.items():
        print(f"{side}: {statistics.quantiles(values)[0]:.1f} (median {statistics.median(values):.1f})")


if __name__ == "__main__":
    main()
