"""Compare engine and policy on samples with top-p, top-k and min-p, with and without the sets of kept tokens.

    python benchmarks/sampled_sets.py
    python benchmarks/sampled_sets.py --model path/to/model --rows 64 --new-tokens 64

The Transformers engine samples in float32; the policy scores the same tokens among the sets, and among all tokens. The ratio is
the policy's probability of a sampled token divided by the engine's, before any optimizer step, so it should be 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import SETS, kept_tokens
from rl_core.data.tokenizer import load_tokenizer
from rl_train.logprob_agreement import rows_to_score, sampled_tokens

ADDITION = Path(__file__).parents[1] / "examples/addition/model"
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.99": {"top_p": 0.99},
    "top_k 20": {"top_k": 20},
    "min_p 0.05": {"min_p": 0.05},
    "top_p 0.9, top_k 20, min_p 0.05": {"top_p": 0.9, "top_k": 20, "min_p": 0.05},
}


def main() -> None:
    """Print a row of the table for each filter."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(ADDITION))
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=5)
    arguments = parser.parse_args()
    ids = prompts(arguments.model, arguments.rows)
    print("| filter | kept tokens | bytes per token | difference | mean ratio | difference, ignored | mean ratio, ignored |")
    print("|---|---|---|---|---|---|---|")
    for name, filters in FILTERS.items():
        print(f"| {name} | {measured(arguments.model, ids, arguments.new_tokens, filters)} |", flush=True)


def prompts(model: str, rows: int) -> BatchedDataDict[Any]:
    """Sums of two numbers."""
    tokenizer = load_tokenizer(model)
    texts = [f"{10 + row * 7 % 90}+{10 + row * 31 % 90}=" for row in range(rows)]
    tokens = [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    lengths = torch.tensor([len(each) for each in tokens])
    return BatchedDataDict(
        {
            "input_ids": torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
            "input_lengths": lengths,
            "sample_seeds": torch.arange(rows),
            "sampling": [{SETS: True}] * rows,
        }
    )


def measured(model: str, rows: BatchedDataDict[Any], new_tokens: int, filters: dict[str, Any]) -> str:
    """The cells of a filter: differences are means of |log p of the policy - log p of the engine|, in nats."""
    engine = HuggingFaceGeneration(model, max_new_tokens=new_tokens, torch_dtype="float32", **filters)
    output = engine.generate(rows)
    engine.shutdown()
    policy = HuggingFacePolicy(model, generation={"backend": "hf", **filters}, max_total_sequence_length=256)
    data, mask, cells = rows_to_score(output), sampled_tokens(output), []
    sets = output[SETS]
    kept = sum(len(kept_tokens(each)[1]) for each in sets) / int(mask.sum())
    size = sum(each["words"].nbytes + each["counts"].nbytes for each in sets) / int(mask.sum())
    for scored in (data, BatchedDataDict({key: data[key] for key in data if key != SETS})):
        difference = (policy.get_logprobs(scored)["logprobs"] - output["logprobs"])[mask].double()
        cells += [f"{float(difference.abs().mean()):.2g}", f"{float(difference.exp().mean()):.6f}"]
    policy.shutdown()
    return " | ".join([f"{kept:.1f}" if filters else "all", f"{size:.0f}", *cells])


if __name__ == "__main__":
    main()
