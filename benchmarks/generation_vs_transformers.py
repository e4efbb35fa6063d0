"""Sampled tokens per second of `Sampler` in rl-backends-hf and of Transformers' `generate`, on the same rows in one process.

    python benchmarks/generation_vs_transformers.py --rows 16 --group 8 --dtype float32
    python benchmarks/generation_vs_transformers.py --model path/to/model --ragged

Without `--model`, the model is a Llama with the shape of SmolLM2-135M and random weights: the speed does not depend on the
weights. No token ends a row, so both sides sample the same number of tokens: `--new-tokens` per row. With `--ragged`, each row
has a different length between a quarter of `--new-tokens` and all of it, like completions in training.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.sampling.sampler import Sampler
from rl_core.data.batched_data_dict import BatchedDataDict

SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}


class EachRowsOwnLength(transformers.StoppingCriteria):
    """Ends row i after `lengths[i]` tokens."""

    def __init__(self, prompt_width: int, lengths: torch.Tensor) -> None:
        self._ends = prompt_width + lengths

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends.to(input_ids.device)


def load(arguments: argparse.Namespace) -> transformers.PreTrainedModel:
    dtype = getattr(torch, arguments.dtype)
    if arguments.model is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    else:
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMOLLM2_135M), dtype=dtype)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    model.config.eos_token_id = None
    return model.to(arguments.device).eval()


def prompts_of(arguments: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """`rows` prompts, each repeated `group` times, with up to a fifth more or fewer tokens than `prompt_tokens`."""
    spread = arguments.prompt_tokens // 5
    unique = [
        torch.randint(3, vocabulary, (arguments.prompt_tokens + (7 * n) % (2 * spread + 1) - spread,)).tolist()
        for n in range(arguments.rows // arguments.group)
    ]
    return [prompt for prompt in unique for _ in range(arguments.group)]


def rlcore_generate(model: transformers.PreTrainedModel, prompts: list[list[int]], lengths: torch.Tensor) -> Callable[[], int]:
    width = max(len(prompt) for prompt in prompts)
    batch = BatchedDataDict(
        input_ids=torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts]),
        input_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        max_new_tokens=lengths,
    )
    sampler = Sampler(model, HFGenerationConfig(max_new_tokens=int(lengths.max())))
    return lambda: int(sampler.generate(batch)["generation_lengths"].sum())


def hf_generate(model: transformers.PreTrainedModel, prompts: list[list[int]], lengths: torch.Tensor) -> Callable[[], int]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)

    def run() -> int:
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=int(lengths.max()),
                stopping_criteria=transformers.StoppingCriteriaList([EachRowsOwnLength(width, lengths)]),
            )
        assert output.shape[1] == width + int(lengths.max())
        return int(lengths.sum())

    return run


def tokens_per_second(run: Callable[[], int], device: str) -> float:
    def clock() -> float:
        if device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    start = clock()
    tokens = run()
    return tokens / (clock() - start)


def peak_mib(device: str) -> float:
    """Peak memory of the device, or of the process on a CPU."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=16, help="a multiple of --group")
    parser.add_argument("--group", type=int, default=8, help="rows of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=45)
    parser.add_argument("--new-tokens", type=int, default=30)
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="append the results, one JSON object per line")
    arguments = parser.parse_args()
    if arguments.rows < 1 or arguments.rows % arguments.group:
        parser.error(f"--rows {arguments.rows} is not a multiple of --group {arguments.group}, the rows of each prompt.")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = load(arguments)
    prompts = prompts_of(arguments, model.config.vocab_size)
    lengths = torch.full((len(prompts),), arguments.new_tokens)
    if arguments.ragged:
        lengths = torch.randint(max(1, arguments.new_tokens // 4), arguments.new_tokens + 1, (len(prompts),))
        lengths[0] = arguments.new_tokens
    runs = {
        "rl-backends-hf": rlcore_generate(model, prompts, lengths),
        "transformers": hf_generate(model, prompts, lengths),
    }
    warm_up = torch.full_like(lengths, 2)
    rlcore_generate(model, prompts, warm_up)(), hf_generate(model, prompts, warm_up)()
    # Take turns, so that other load on the machine affects both sides.
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.repeats):
        for name, run in runs.items():
            speeds[name].append(tokens_per_second(run, arguments.device))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratio = medians["rl-backends-hf"] / medians["transformers"]
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    print(" ".join(f"{key}={value}" for key, value in settings.items()))
    for name, values in speeds.items():
        print(f"{name:16} {medians[name]:8.1f} tokens/s   (runs: {', '.join(f'{value:.1f}' for value in values)})")
    print(f"{'ratio':16} {ratio:8.2f}")
    print(f"{'peak memory':16} {peak_mib(arguments.device):8.0f} MiB, both in one process")
    if arguments.json is not None:
        with arguments.json.open("a") as file:
            file.write(json.dumps({**settings, "tokens_per_s": medians, "ratio": ratio}) + "\n")


if __name__ == "__main__":
    main()
