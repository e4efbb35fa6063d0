"""CPU-seconds of scoring and training a batch of rollouts with the Transformers backend, with and without a shared prefix.

    python benchmarks/training_step.py --prompts 2 --group 8 --prompt-tokens 74 --completion-tokens 63 --dtype bfloat16

The variants alternate for `--rounds` rounds in one process, because other work on the machine slows down both. Reported are
medians and the range, in CPU-seconds and in wall-clock seconds. Completions have lengths from half to one and a half times
`--completion-tokens`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch

from rl_backends_hf import HuggingFacePolicy
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms.losses import ClippedPGLossFn


def make_rows(arguments: argparse.Namespace) -> BatchedDataDict:
    """Random rows: groups of one prompt each."""
    draw = torch.Generator().manual_seed(0)
    rows, tokens = arguments.prompts * arguments.group, arguments.completion_tokens
    lengths = arguments.prompt_tokens + torch.randint(tokens // 2, tokens * 3 // 2 + 1, (rows,), generator=draw)
    width = int(lengths.max())
    ids = torch.randint(100, 10000, (rows, width), generator=draw)
    prompts = torch.arange(arguments.prompts).repeat_interleave(arguments.group)
    ids[:, : arguments.prompt_tokens] = ids[prompts * arguments.group, : arguments.prompt_tokens]
    column = torch.arange(width)
    is_token = column < lengths.unsqueeze(1)
    mask = (is_token & (column >= arguments.prompt_tokens)).float()
    return BatchedDataDict(
        input_ids=torch.where(is_token, ids, 0),
        input_lengths=lengths,
        token_mask=mask,
        sample_mask=torch.ones(rows),
        advantages=torch.randn(rows, 1, generator=draw) * mask,
        generation_logprobs=torch.zeros(rows, width),
        prompt_id=prompts,
    )


def measure(call, clocks: dict[str, list[float]]) -> None:
    """Add the CPU-seconds and wall-clock seconds of `call` to `clocks`."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    clocks["cpu"].append(time.process_time() - cpu)
    clocks["wall"].append(time.perf_counter() - wall)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a causal LM")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--cpu-products", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--group", type=int, default=8, help="rows per prompt, which are also a microbatch")
    parser.add_argument("--prompt-tokens", type=int, default=74)
    parser.add_argument("--completion-tokens", type=int, default=63)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoint-activations", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows, loss = make_rows(arguments), ClippedPGLossFn()
    loss.on_policy = True
    policies = {
        mode: HuggingFacePolicy(
            arguments.model,
            precision=arguments.dtype,
            shared_prefix=mode,
            max_total_sequence_length=rows["input_ids"].shape[1],
            train_micro_batch_size=arguments.group,
            logprob_batch_size=arguments.group,
            activation_checkpointing=arguments.checkpoint_activations,
            hf_cfg={"cpu_products": arguments.cpu_products},
        )
        for mode in ("off", "auto")
    }
    times = {(call, mode): {"cpu": [], "wall": []} for call in ("score", "train") for mode in policies}
    for number in range(arguments.rounds + 1):
        for mode, policy in policies.items():
            policy.prepare_for_training()
            for call, run in (("score", partial(policy.get_logprobs, rows)), ("train", partial(policy.train, rows, loss))):
                # The first round warms up: optimizer state, memory, and kernels.
                measure(run, times[call, mode] if number else {"cpu": [], "wall": []})
            policy.finish_training()
    for (call, mode), clocks in times.items():
        summary = ", ".join(
            f"{clock} {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"
            for clock, values in clocks.items()
        )
        print(f"{call}, shared_prefix {mode}: {summary}")


if __name__ == "__main__":
    main()
