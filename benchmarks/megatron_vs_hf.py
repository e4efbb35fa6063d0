"""Compare the Megatron backend with the Transformers backend, one rank each, in one process: tokens/s of scoring and training.

Both take turns on the same rows, model and threads, so that other load on the machine affects both. The best turns are
compared, by wall-clock time and by CPU time, which does not include other processes.

    python benchmarks/megatron_vs_hf.py [--model path/to/model] [--rows 16] [--length 128] [--threads 1] [--repeats 5]
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path

import torch
import transformers

from rl_backends_hf import HuggingFacePolicy
from rl_backends_megatron import MegatronPolicy
from rl_core.data import BatchedDataDict
from rl_train.algorithms import NLLLossFn

_SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}

_CLOCKS = {"wall": time.perf_counter, "CPU": time.process_time}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder with safetensors; a random Llama of 9 million parameters by default")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128, help="tokens of the longest row; the shortest has half as many")
    parser.add_argument("--micro", type=int, default=4, help="rows per microbatch")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def make_rows(options: argparse.Namespace, vocab_size: int) -> BatchedDataDict:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(options.length // 2, options.length + 1, (options.rows,), generator=generator)
    mask = (torch.arange(options.length) < lengths[:, None]).float()
    return BatchedDataDict(
        input_ids=torch.randint(3, vocab_size, (options.rows, options.length), generator=generator) * mask.long(),
        input_lengths=lengths,
        token_mask=mask,
        sample_mask=torch.ones(options.rows),
    )


def seconds(action) -> dict[str, float]:
    start = {name: clock() for name, clock in _CLOCKS.items()}
    action()
    if torch.cuda.is_available():
        # Pending device work belongs to this phase, not to the next one.
        torch.cuda.synchronize()
    return {name: clock() - start[name] for name, clock in _CLOCKS.items()}


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or str(Path(temporary) / "model")
        if options.model is None:
            torch.manual_seed(0)
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SHAPE)).save_pretrained(folder)
        fields = {
            "precision": options.precision,
            "train_micro_batch_size": options.micro,
            "logprob_batch_size": options.micro,
            "optimizer": {"kwargs": {"lr": 1e-5}},
        }
        policies = {"transformers": HuggingFacePolicy(folder, **fields), "megatron": MegatronPolicy(folder, **fields)}
        rows = make_rows(options, policies["transformers"].facts["vocab_size"])
        tokens = int(rows["input_lengths"].sum())
        work = {
            "score": lambda policy: policy.get_logprobs(rows),
            "train": lambda policy: policy.train(rows, NLLLossFn()),
        }
        best: dict[tuple[str, str, str], float] = {}
        for _ in range(options.repeats + 1):  # the first is a warm-up and slower than the rest
            for phase, action in work.items():
                for name, policy in policies.items():
                    for clock, took in seconds(lambda action=action, policy=policy: action(policy)).items():
                        best[phase, name, clock] = min(took, best.get((phase, name, clock), took))
        for policy in policies.values():
            policy.shutdown()
    print(f"{tokens} tokens, {options.rows} rows, microbatch {options.micro}, {options.precision}, {options.threads} thread(s)")
    for phase, clock in itertools.product(work, _CLOCKS):
        rates = {name: tokens / best[phase, name, clock] for name in policies}
        listing = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
        print(f"{phase}, tokens a second of {clock} time: {listing}, ratio {rates['megatron'] / rates['transformers']:.2f}")


if __name__ == "__main__":
    main()
