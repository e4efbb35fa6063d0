"""Compares the memory that `rlcore plan` predicts with the measured peak of each process.

    python benchmarks/plan_vs_measured.py              # all configs; writes results/plan_vs_measured.json and .md
    python benchmarks/plan_vs_measured.py full lora    # some of them; replaces their rows
    python benchmarks/plan_vs_measured.py --return-freed

Each config trains two steps of a randomly initialized model, whose completions have full length, in a separate process. The
measured peak of a process is the largest proportional set size (`Pss` in `/proc/PID/smaps_rollup`) of samples
taken every 0.2 s, so a shorter peak can be missed. Needs Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.loader import load_config
from rl_train.plan.planner import plan_memory

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "plan_vs_measured"
TOKENIZER = ROOT / "examples" / "addition" / "model"
SAMPLE_S = 0.2
TOLERANCE = 0.15
LIMIT_S = 900.0
"""Time limit of one run, in seconds."""
SHAPE = {
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
"""A Llama of 45M parameters."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A config: overrides of the common one, its sections that are replaced (None: left out), and the model's shape."""

    overrides: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict)


CONFIG: dict[str, Any] = {
    "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 8, "max_num_steps": 2, "val_period": 0},
    "policy": {
        "backend": "hf",
        "model_name": "model",
        "max_total_sequence_length": 128,
        "train_micro_batch_size": 8,
        "logprob_batch_size": 8,
        "shared_prefix": "off",
        "generation": {"backend": "hf", "max_new_tokens": 120},
    },
    "data": {"train": {"dataset_name": "arithmetic", "num_samples": 64, "min_digits": 2}},
    "env": {"arithmetic": {"reward_fn": "varied_rewards.varied"}},
    "cluster": {"backend": "in_process"},
    "checkpointing": {"enabled": False},
}
REWARDS = """import itertools

_calls = itertools.count()


def varied(completion: str) -> float:
    return next(_calls) % 7 / 7
"""
"""Rewards that differ within each group, so that no row is left out of training."""
CASES = {
    "full": Case(),
    "long_rows": Case(overrides={"policy.max_total_sequence_length": 512, "policy.generation.max_new_tokens": 504}),
    "large_microbatch": Case(overrides={"policy.train_micro_batch_size": 32}),
    "checkpointed_layers": Case(
        overrides={"policy.train_micro_batch_size": 32, "policy.activation_checkpointing": True},
    ),
    "lora": Case(overrides={"++policy.hf_cfg.lora.rank": 16, "policy.train_micro_batch_size": 16}),
    "large_vocabulary": Case(shape={"vocab_size": 65536, "num_hidden_layers": 4}),
    "bfloat16": Case(
        overrides={
            "policy.precision": "bfloat16",
            "grpo.num_prompts_per_step": 1,
            "grpo.num_generations_per_prompt": 4,
            "policy.train_micro_batch_size": 2,
            "policy.max_total_sequence_length": 40,
            "policy.generation.max_new_tokens": 32,
        },
        shape={"vocab_size": 32768, "num_hidden_layers": 4},
    ),
    "ppo": Case(
        overrides={"policy.train_micro_batch_size": 4},
        sections={
            "grpo": None,
            "ppo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 1, "max_num_steps": 2, "val_period": 0},
            "value": {
                "backend": "hf",
                "model_name": "model",
                "max_total_sequence_length": 128,
                "train_micro_batch_size": 4,
                "logprob_batch_size": 8,
            },
        },
    ),
    "reference": Case(overrides={"++loss_fn.reference_policy_kl_penalty": 0.01}),
    "ray": Case(overrides={"cluster.backend": "ray"}),
    "megatron_tp2": Case(
        overrides={
            "policy.backend": "megatron",
            "cluster.backend": "ray",
            "++cluster.workers_per_node": 2,
            "++policy.megatron_cfg.tensor_model_parallel_size": 2,
        },
    ),
    "vllm": Case(
        overrides={
            "policy.generation.backend": "vllm",
            "cluster.backend": "ray",
            "++policy.hf_cfg.lora.rank": 8,
            "grpo.num_prompts_per_step": 1,
            "policy.train_micro_batch_size": 2,
            "policy.logprob_batch_size": 2,
            "policy.max_total_sequence_length": 64,
            "policy.generation.max_new_tokens": 56,
        },
        shape={"hidden_size": 1024, "intermediate_size": 3072},
    ),
}


def make_model(folder: Path, shape: Mapping[str, Any]) -> None:
    """Write a randomly initialized Llama with the tokenizer of the quickstart, whose ids are the first of its vocabulary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    stored = json.loads((TOKENIZER / "config.json").read_text(encoding="utf-8"))
    special = {key: stored.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    LlamaForCausalLM(LlamaConfig(**{**SHAPE, **shape}, **special)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(TOKENIZER / name, folder)


def write_inputs(case: Case, folder: Path) -> list[str]:
    """Write model, config and reward function of a case; returns the arguments after the command's name."""
    make_model(folder / "model", case.shape)
    (folder / "varied_rewards.py").write_text(REWARDS, encoding="utf-8")
    config = {name: section for name, section in {**CONFIG, **case.sections}.items() if section is not None}
    (folder / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return ["run.yaml", *(f"{key}={str(value).lower()}" for key, value in case.overrides.items())]


def measure(command: list[str], folder: Path, *, keeps_freed: bool) -> dict[str, int]:
    """Peak proportional set size in bytes of the command's process (`driver`) and of its policy and engine.

    Args:
        command: the command.
        folder: where it runs.
        keeps_freed: whether glibc chooses what it keeps of freed tensors; otherwise, it returns all larger than 128 KiB.

    Raises:
        RuntimeError: the command failed.
    """
    peaks: dict[int, int] = {}
    titles: dict[int, set[str]] = {}
    environment = {**os.environ} if keeps_freed else {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, env=environment)
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.terminate()
            for pid in [process.pid, *_descendants(process.pid)]:
                titles.setdefault(pid, set()).add(_title(pid))
                peaks[pid] = max(peaks.get(pid, 0), _proportional_size(pid) or 0)
            time.sleep(SAMPLE_S)
    if process.returncode:
        raise RuntimeError((folder / "output").read_text(encoding="utf-8", errors="replace")[-3000:])
    found = {"driver": peaks[process.pid]}
    for name, title in TITLES.items():
        sizes = [peaks[pid] for pid, seen in titles.items() if title in seen]
        found |= {name: max(sizes)} if sizes else {}
    return found


def _descendants(pid: int) -> Iterator[int]:
    try:
        children = Path(f"/proc/{pid}/task").glob("*/children")
        pids = [int(child) for path in children for child in path.read_text().split()]
    except OSError:  # the process has ended
        return
    for child in pids:
        yield child
        yield from _descendants(child)


def _title(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
    except OSError:
        return "ended"
    return Path(words[0]).name if words else "ended"


def _proportional_size(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), None)


def predict(arguments: list[str], registry: Registry) -> dict[str, int]:
    """Predicted peak in bytes of each process, by the name that `rlcore plan` prints."""
    config, *overrides = arguments
    run = load_config([Path(config)], overrides, registry=registry).run
    plan = plan_memory(run, registry, on_gpu=False, limit=None)
    return {process.name: process.peak for process in plan.processes}


def compare(case: Case, registry: Registry, *, keeps_freed: bool) -> dict[str, dict[str, int]]:
    """Predicted and measured peak in bytes of each process with a model, and of the driver."""
    with TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        folder = Path(temporary)
        given = write_inputs(case, folder)
        predicted = predict(given, registry)
        measured = measure([str(Path(sys.executable).with_name("rlcore")), "train", *given], folder, keeps_freed=keeps_freed)
    key = "measured" if keeps_freed else "measured_without_freed"
    return {
        name: {"predicted": size, key: measured[name.partition(" + ")[0]]}
        for name, size in predicted.items()
        if name != "environments"
    }


TITLES = {"policy": "ray::train", "engine": "ray::generate"}
"""A title that the process of each component has while it works."""
MEASURED = {"measured": "measured", "measured_without_freed": "returning freed memory"}


def table(results: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    """The results as Markdown, in MiB."""
    lines = [
        "| config | process | predicted | measured | ratio | returning freed memory | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    ratios: dict[str, list[float]] = {key: [] for key in MEASURED}
    for case, processes in results.items():
        for name, row in processes.items():
            cells = [case, name, f"{row['predicted'] / 2**20:.0f}"]
            for key in MEASURED:
                ratio = row["predicted"] / row[key] if key in row else None
                cells += ["-", "-"] if ratio is None else [f"{row[key] / 2**20:.0f}", f"{ratio:.2f}"]
                ratios[key] += [ratio] if ratio is not None and name != "driver" else []
            lines.append(f"| {' | '.join(cells)} |")
    for key, title in MEASURED.items():
        within = sum(abs(ratio - 1) <= TOLERANCE for ratio in ratios[key])
        lines.append(f"\n{title}: {within} of {len(ratios[key])} processes with a model are within {TOLERANCE:.0%}.")
    return "\n".join(lines) + "\n"


HEAD = """# Predicted and measured memory

Peak proportional set size in MiB, written by `benchmarks/plan_vs_measured.py`; see there for the configs. Measured on CPUs;
"returning freed memory" with `MALLOC_MMAP_THRESHOLD_=131072` in the environment, so that glibc keeps no freed tensors.

"""


def main() -> None:
    """Compare the chosen configs, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CONFIG", help=f"any of {', '.join(CASES)}; all by default")
    parser.add_argument("--return-freed", action="store_true", help="measure with an allocator that keeps no freed tensors")
    options = parser.parse_args()
    chosen = options.cases or list(CASES)
    if unknown := set(chosen) - set(CASES):
        parser.error(f"unknown configs: {', '.join(sorted(unknown))}")
    registry = Registry(discover())
    path = RESULTS.with_suffix(".json")
    for name in chosen:
        found = compare(CASES[name], registry, keeps_freed=not options.return_freed)
        results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        earlier = results.get(name, {})
        results[name] = {process: earlier.get(process, {}) | row for process, row in found.items()}
        results = {case: results[case] for case in CASES if case in results}
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        RESULTS.with_suffix(".md").write_text(HEAD + table(results), encoding="utf-8")
        print(name, found, flush=True)


if __name__ == "__main__":
    main()
