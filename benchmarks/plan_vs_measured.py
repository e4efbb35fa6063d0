"""Compares the memory that `rlcore plan` predicts with the measured peak of each process.

    python benchmarks/plan_vs_measured.py              # all configs; writes results/plan_vs_measured.json and .md
    python benchmarks/plan_vs_measured.py full lora    # some of them; replaces their rows

Each config trains two steps of a randomly initialized model, whose completions have full length, in a separate process. The
measured peak of a process is the largest proportional set size (`Pss` in `/proc/PID/smaps_rollup`) of samples
taken every 0.2 s, so a shorter peak can be missed. Needs Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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
    """A config: overrides of the common one, and of the shape of the model."""

    overrides: Mapping[str, Any] = field(default_factory=dict)
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
    "reference": Case(overrides={"++loss_fn.reference_policy_kl_penalty": 0.01}),
    "ray": Case(overrides={"cluster.backend": "ray"}),
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
    (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False), encoding="utf-8")
    return ["run.yaml", *(f"{key}={str(value).lower()}" for key, value in case.overrides.items())]


def measure(command: list[str], folder: Path) -> dict[str, int]:
    """Peak proportional set size in bytes of the command's process (`driver`) and of each of its descendants, by title.

    Raises:
        RuntimeError: the command failed.
    """
    peaks: dict[tuple[int, str], int] = {}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.terminate()
            for pid in [process.pid, *_descendants(process.pid)]:
                title = "driver" if pid == process.pid else _title(pid)
                if (size := _proportional_size(pid)) is not None:
                    peaks[pid, title] = max(peaks.get((pid, title), 0), size)
            time.sleep(SAMPLE_S)
    if process.returncode:
        raise RuntimeError((folder / "output").read_text(encoding="utf-8", errors="replace")[-3000:])
    largest: dict[str, int] = {}
    for (_, title), size in peaks.items():
        largest[title] = max(largest.get(title, 0), size)
    return largest


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


def compare(case: Case, registry: Registry) -> list[dict[str, Any]]:
    """A row for each process of the models: its name, and its predicted and measured peak in bytes."""
    with TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        folder = Path(temporary)
        given = write_inputs(case, folder)
        predicted = predict(given, registry)
        measured = measure([str(Path(sys.executable).with_name("rlcore")), "train", *given], folder)
    rows = []
    for name, size in predicted.items():
        titles = [title for title in measured if any(word in title.lower() for word in TITLES.get(name, ("driver",)))]
        if name != "environments":
            rows.append({"process": name, "predicted": size, "measured": max(measured[title] for title in titles)})
    return rows


TITLES = {"policy": ("policy",), "engine": ("generation",)}
"""Words in the titles of Ray's processes, by the name in the plan."""


def table(results: Mapping[str, list[dict[str, Any]]]) -> str:
    """The results as Markdown, in MiB."""
    lines = ["| config | process | predicted | measured | predicted / measured |", "|---|---|---|---|---|"]
    for name, rows in results.items():
        for row in rows:
            sizes = [f"{row[key] / 2**20:.0f}" for key in ("predicted", "measured")]
            lines.append(f"| {name} | {row['process']} | {sizes[0]} | {sizes[1]} | {row['predicted'] / row['measured']:.2f} |")
    ratios = [row["predicted"] / row["measured"] for rows in results.values() for row in rows if row["process"] != "driver"]
    within = sum(abs(ratio - 1) <= TOLERANCE for ratio in ratios)
    return "\n".join(lines) + f"\n\n{within} of {len(ratios)} processes with models are within {TOLERANCE:.0%}.\n"


HEAD = """# Predicted and measured memory

Peak proportional set size in MiB, written by `benchmarks/plan_vs_measured.py`; see there for the configs. Measured on CPUs.

"""


def main() -> None:
    """Compare the chosen configs, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CONFIG", help=f"any of {', '.join(CASES)}; all by default")
    chosen = parser.parse_args().cases or list(CASES)
    if unknown := set(chosen) - set(CASES):
        parser.error(f"unknown configs: {', '.join(sorted(unknown))}")
    registry = Registry(discover())
    path = RESULTS.with_suffix(".json")
    for name in chosen:
        rows = compare(CASES[name], registry)
        results = (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}) | {name: rows}
        results = {case: results[case] for case in CASES if case in results}
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        RESULTS.with_suffix(".md").write_text(HEAD + table(results), encoding="utf-8")
        print(name, rows, flush=True)


if __name__ == "__main__":
    main()
