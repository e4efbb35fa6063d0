"""Compares the memory that `rlcore plan` predicts with measurements.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.loader import load_config
from rl_train.files import parse_size
from rl_train.plan.planner import MemoryPlan, plan_memory
from rl_train.plan.suggestions import suggest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "plan_vs_measured"
TOKENIZER = ROOT / "examples" / "addition" / "model"
PICTURES = ROOT / "examples" / "pictures" / "model"
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
    """A config: overrides of the common one, its sections that are replaced (None: left out), and the model's shape.

    With `pictures`, the model is a Qwen2.5-VL, and each prompt has a picture. With `limit`, a size, the overrides that
    `rlcore plan` suggests for this much memory are applied.
    """

    overrides: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict)
    limit: str | None = None
    pictures: bool = False


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
FEW_TOKENS = {
    "grpo.num_prompts_per_step": 1,
    "grpo.num_generations_per_prompt": 4,
    "policy.max_total_sequence_length": 40,
    "policy.generation.max_new_tokens": 32,
}
"""Four rows of 40 tokens in a step."""
WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 8192}
FROZEN = {
    "wide_layers": Case(overrides={"policy.train_micro_batch_size": 2, **FEW_TOKENS}, shape=WIDE),
    "suggested_microbatch": Case(overrides={"grpo.num_prompts_per_step": 1}, shape={"num_hidden_layers": 6}, limit="1075MiB"),
    "suggested_adapters": Case(overrides={"policy.train_micro_batch_size": 2, **FEW_TOKENS}, shape=WIDE, limit="1200MiB"),
}
"""Configs that were chosen after the formulas had been written, which were not changed after these were measured."""
VISION_SHAPE = {
    "text_config": {
        **SHAPE,
        "num_hidden_layers": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
    },
    "vision_config": {
        **{"depth": 6, "hidden_size": 384, "intermediate_size": 1024, "num_heads": 6, "out_hidden_size": 512},
        **{"patch_size": 8, "window_size": 64, "fullatt_block_indexes": [2, 5]},
    },
}
"""A Qwen2.5-VL of 32M parameters."""
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
        overrides={"policy.precision": "bfloat16", "policy.train_micro_batch_size": 2, **FEW_TOKENS},
        shape={"vocab_size": 32768, "num_hidden_layers": 4},
    ),
    "ppo": Case(
        overrides={
            "policy.train_micro_batch_size": 2,
            "policy.max_total_sequence_length": 40,
            "policy.generation.max_new_tokens": 32,
        },
        sections={
            "grpo": None,
            "ppo": {
                "num_prompts_per_step": 4,
                "num_generations_per_prompt": 1,
                "max_num_steps": 2,
                "val_period": 0,
                "ppo_epochs": 1,
            },
            "value": {
                "backend": "hf",
                "model_name": "model",
                "max_total_sequence_length": 40,
                "train_micro_batch_size": 2,
                "logprob_batch_size": 4,
            },
        },
        shape={"vocab_size": 32768, "num_hidden_layers": 6},
    ),
    "shared_prefix": Case(
        overrides={
            "policy.shared_prefix": "auto",
            "grpo.num_prompts_per_step": 1,
            "policy.max_total_sequence_length": 224,
            "policy.generation.max_new_tokens": 32,
        },
        sections={"data": {"train": {"dataset_name": "jsonl", "path": "long.jsonl", "task_name": "arithmetic"}}},
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
    "fsdp2": Case(
        overrides={
            "cluster.backend": "ray",
            "++cluster.workers_per_node": 2,
            "++policy.hf_cfg.data_parallel": "fsdp2",
            "policy.train_micro_batch_size": 2,
            "policy.logprob_batch_size": 2,
            **FEW_TOKENS,
        },
        shape={**WIDE, "vocab_size": 32768},
    ),
    "fsdp2_bfloat16": Case(
        overrides={
            "cluster.backend": "ray",
            "++cluster.workers_per_node": 2,
            "++policy.hf_cfg.data_parallel": "fsdp2",
            "policy.precision": "bfloat16",
            "policy.train_micro_batch_size": 2,
            "policy.logprob_batch_size": 2,
            **FEW_TOKENS,
        },
        shape={**WIDE, "vocab_size": 32768, "num_hidden_layers": 8},
    ),
    "vllm": Case(
        overrides={
            "policy.generation.backend": "vllm",
            "cluster.backend": "ray",
            "++policy.hf_cfg.lora.rank": 8,
            "policy.train_micro_batch_size": 2,
            "policy.logprob_batch_size": 2,
            **FEW_TOKENS,
        },
        shape={"hidden_size": 1024, "intermediate_size": 3072},
    ),
    "pictures": Case(
        pictures=True,
        overrides={
            "grpo.num_generations_per_prompt": 4,
            "policy.max_total_sequence_length": 256,
            "policy.generation.max_new_tokens": 32,
        },
        sections={"data": {"train": {"dataset_name": "jsonl", "path": "pictures.jsonl", "task_name": "arithmetic"}}},
    ),
    **FROZEN,
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


def make_vision_model(folder: Path) -> None:
    """Write a randomly initialized Qwen2.5-VL with the tokenizer and the processor of the example with pictures."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    stored = json.loads((PICTURES / "config.json").read_text(encoding="utf-8"))
    tokens = {key: value for key, value in stored.items() if key.endswith("token_id")}
    special = {key: stored["text_config"][key] for key in ("eos_token_id", "pad_token_id")}
    text = {**VISION_SHAPE["text_config"], **special}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=VISION_SHAPE["vision_config"], tie_word_embeddings=True, **tokens)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(PICTURES / name, folder)
    settings = json.loads((PICTURES / "preprocessor_config.json").read_text(encoding="utf-8"))
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "max_pixels": 224 * 224}), encoding="utf-8")


def write_pictures(folder: Path) -> None:
    """Write the rows of the case with pictures."""
    from PIL import Image

    rows = []
    for row in range(16):
        Image.effect_noise((224, 224), 60 + row).convert("RGB").save(folder / f"{row}.png")
        rows.append(json.dumps({"question": "What color is the left shape?", "expected_answer": "0", "images": [f"{row}.png"]}))
    (folder / "pictures.jsonl").write_text("\n".join(rows), encoding="utf-8")


def write_inputs(case: Case, folder: Path) -> list[str]:
    """Write model, config and reward function of a case; returns the arguments after the command's name."""
    if case.pictures:
        make_vision_model(folder / "model")
        write_pictures(folder)
    else:
        make_model(folder / "model", case.shape)
    (folder / "varied_rewards.py").write_text(REWARDS, encoding="utf-8")
    long = [json.dumps({"question": f"{'1234567890+' * 16}{row:04}=", "expected_answer": "0"}) for row in range(8)]
    (folder / "long.jsonl").write_text("\n".join(long), encoding="utf-8")
    config = {name: section for name, section in {**CONFIG, **case.sections}.items() if section is not None}
    (folder / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return ["run.yaml", *(f"{key}={str(value).lower()}" for key, value in case.overrides.items())]


def measure(command: list[str], folder: Path) -> dict[str, int]:
    """Peak proportional set size in bytes of the command's process (`driver`) and of its policy and engine.

    Args:
        command: the command.
        folder: where it runs.

    Raises:
        RuntimeError: the command failed.
    """
    peaks: dict[int, int] = {}
    titles: dict[int, set[str]] = {}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
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


def with_suggestions(case: Case, arguments: list[str], registry: Registry) -> list[str]:
    """The arguments, and the overrides that are suggested for the memory limit of a case.

    Raises:
        RuntimeError: the run fits, or does not fit with them.
    """
    if case.limit is None:
        return arguments
    limit = parse_size(case.limit, "limit")

    def planned(more: Sequence[str]) -> MemoryPlan:
        run = load_config([Path(arguments[0])], [*arguments[1:], *more], registry=registry).run
        return plan_memory(run, registry, on_gpu=False, limit=limit)

    run = load_config([Path(arguments[0])], arguments[1:], registry=registry).run
    first = planned([])
    suggestion = suggest(run, registry, first, planned)
    if first.fits or not suggestion.plan.fits:
        raise RuntimeError(f"{case.limit}: {first.peak / 2**20:.0f} MiB, {suggestion.plan.peak / 2**20:.0f} with suggestions")
    return [*arguments, *suggestion.overrides]


def compare(case: Case, registry: Registry) -> dict[str, dict[str, int]]:
    """Predicted and measured peak in bytes of each process with a model, and of the driver."""
    with TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        folder = Path(temporary)
        given = with_suggestions(case, write_inputs(case, folder), registry)
        predicted = predict(given, registry)
        command = [str(Path(sys.executable).with_name("rlcore")), "train", *given]
        measured = measure(command, folder)
    return {
        name: {"predicted": size, "measured": measured[name.partition(" + ")[0]]}
        for name, size in predicted.items()
        if name != "environments"
    }


def repeat(case: Case, registry: Registry) -> dict[str, dict[str, int]]:
    """Predicted peak in bytes of each process with a model, and of the driver."""
    with TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        predicted = predict(with_suggestions(case, write_inputs(case, Path(temporary)), registry), registry)
    return {name: {"predicted": size} for name, size in predicted.items() if name != "environments"}


TITLES = {"policy": "ray::train", "engine": "ray::generate"}
"""A title that the process of each component has while it works."""


def table(results: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    """The results as Markdown, in MiB."""
    lines = ["| config | process | predicted | measured | ratio |", "|---|---|---|---|---|"]
    ratios = []
    for case, processes in results.items():
        for name, row in processes.items():
            ratio = row["predicted"] / row["measured"]
            ratios += [ratio] if name != "driver" else []
            lines.append(f"| {case} | {name} | {row['predicted'] / 2**20:.0f} | {row['measured'] / 2**20:.0f} | {ratio:.2f} |")
    within = sum(abs(ratio - 1) <= TOLERANCE for ratio in ratios)
    lines.append(f"\n{within} of {len(ratios)} processes with a model are within {TOLERANCE:.0%}.")
    return "\n".join(lines) + "\n"


HEAD = """# Predicted and measured memory

Peak proportional set size in MiB, written by `benchmarks/plan_vs_measured.py`; see there for the configs. Measured on CPUs.
The measuring process has imported torch, too, and so shares its libraries.

"""


def main() -> None:
    """Compare the chosen configs, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CONFIG", help=f"any of {', '.join(CASES)}; all by default")
    parser.add_argument("--predict", action="store_true", help="only predict again, and keep what was measured")
    options = parser.parse_args()
    chosen = options.cases or list(CASES)
    if unknown := set(chosen) - set(CASES):
        parser.error(f"unknown configs: {', '.join(sorted(unknown))}")
    registry = Registry(discover())
    path = RESULTS.with_suffix(".json")
    for name in chosen:
        found = (repeat if options.predict else compare)(CASES[name], registry)
        results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        earlier = results.get(name, {})
        results[name] = {process: earlier.get(process, {}) | row for process, row in found.items()}
        results = {case: results[case] for case in CASES if case in results}
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        RESULTS.with_suffix(".md").write_text(HEAD + table(results), encoding="utf-8")
        print(name, found, flush=True)


if __name__ == "__main__":
    main()
