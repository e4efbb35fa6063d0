"""Peak bytes of each phase of GRPO, PPO and distillation on GPUs of 80 GB, counted by the memory ledger of the tests.

    python benchmarks/memory_per_phase.py                   # writes results/memory_per_phase.json and .md

`--before` counts the code of another checkout, whose packages come first in PYTHONPATH, with the rules of its workers: Megatron
keeps weights and master weights on the GPU and does not shard Adam's state, the Transformers engine keeps its weights, and
FSDP2 loads the whole model on each rank. The committed figures are those of commit 62fe7fc4.

No GPU is needed: nothing is computed. See `tests/memory_ledger.py` for what is counted.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from counting_workers import ALGORITHMS, record  # noqa: E402
from memory_ledger import GPU, Layout, Model, model_of  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "memory_per_phase"
SHAPES = {
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864, "vocab_size": 151936},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256},
    "70B": {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672, "vocab_size": 128256},
}
"""The sizes of Qwen2.5-0.5B, Llama-3.1-8B and Llama-3.1-70B."""
HEADS = {"0.5B": (14, 2), "8B": (32, 8), "70B": (64, 8)}
LAYOUTS: dict[str, dict[int, dict[str, dict[str, Any]]]] = {
    "0.5B": {
        1: {"hf": {}, "megatron": {}},
        8: {"hf": {}, "megatron": {}},
        16: {"hf": {}, "megatron": {}},
    },
    "8B": {
        1: {"hf": {}, "megatron": {}},
        8: {"hf": {"fsdp2": True}, "megatron": {"tensor": 2}},
        16: {"hf": {"fsdp2": True}, "megatron": {"tensor": 2}},
    },
    "70B": {
        8: {"hf": {"fsdp2": True}, "megatron": {"tensor": 8}},
        16: {"hf": {"fsdp2": True}, "megatron": {"tensor": 8, "pipeline": 2}},
    },
}
"""Model and number of GPUs to the parallelism of each policy backend."""
ENGINE_TENSOR = {"0.5B": 1, "8B": 1, "70B": 8}
TOKENS = {"0.5B": 8192, "8B": 8192, "70B": 2048}
PHASES = ("load", "refit", "rollout", "score", "train_value", "train", "save")
BEFORE = {
    "masters_leave": False,
    "engine_leaves": False,
    "gathers_on_save": True,
    "loads_whole": True,
    "distributed_optimizer": False,
}
RESERVE = 2 * 2**30
"""Bytes left for the CUDA contexts of two processes, NCCL and fragmentation; an estimate, not a measurement."""


def model(name: str, folder: Path) -> Model:
    """The sizes of a model."""
    from transformers import LlamaConfig

    heads, kv_heads = HEADS[name]
    config = LlamaConfig(
        **SHAPES[name], num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=name == "0.5B"
    )
    config.save_pretrained(folder / name)
    return model_of(folder / name)


def layouts(folder: Path) -> Iterator[tuple[str, Layout]]:
    """Every layout with its name."""
    for name, by_gpus in LAYOUTS.items():
        sizes = model(name, folder)
        for gpus, backends in by_gpus.items():
            for backend, options in backends.items():
                engine = min(ENGINE_TENSOR[name], gpus)
                layout = Layout(model=sizes, gpus=gpus, policy=backend, engine_tensor=engine, tokens=TOKENS[name], **options)
                described = [key if value is True else f"{key} {value}" for key, value in options.items()]
                yield " ".join([name, str(gpus), backend, *described]), layout


def measure(*, before: bool) -> dict[str, dict[str, dict[str, int]]]:
    """Layout and algorithm to the peak of each phase in bytes; "host" is the largest number of bytes in host memory."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    with TemporaryDirectory() as temporary, _started_as_on_a_cluster() if before else nullcontext():
        folder = Path(temporary)
        for name, layout in layouts(folder):
            counted = replace(layout, **BEFORE) if before else layout
            found[name] = {algorithm: peaks(counted, algorithm, folder) for algorithm in ALGORITHMS}
            print(name, found[name], flush=True)
    return found


def peaks(layout: Layout, algorithm: str, folder: Path) -> dict[str, int]:
    """The peak of each phase in bytes, and "host", the largest number of bytes in host memory."""
    with TemporaryDirectory(dir=folder) as run:
        ledger = record(layout, algorithm, Path(run), {algorithm: {"val_period": 0}})
    by_phase = {phase: ledger.peak(phase) for phase in PHASES if phase in ledger.peaks}
    return {**by_phase, "host": max(ledger.host_peaks.values())}


@contextmanager
def _started_as_on_a_cluster() -> Iterator[None]:
    """Start the engine of the older code first, and let it sleep, as it does on a cluster."""
    from rl_train.assembly.workers import Builder

    def engine_first(builder: Any) -> tuple[Any, Any]:
        generation = builder.generation()
        generation.finish_generation()
        return builder.policy(), generation

    def start(builder: Any, *, samples: bool) -> Any:
        return builder._start_on_gpus(samples=samples)

    with mock.patch.object(Builder, "policy_and_engine", engine_first), mock.patch.object(Builder, "start", start):
        yield


def table(figures: Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]]) -> str:
    """The figures as Markdown: GB per GPU, before and after."""
    columns = ("layout", "algorithm", *PHASES, "host", "fits")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for layout, by_algorithm in figures["after"].items():
        for algorithm, after in by_algorithm.items():
            old = figures.get("before", {}).get(layout, {}).get(algorithm, {})
            cells = [f"{_gb(old.get(phase))} → {_gb(after.get(phase))}" for phase in (*PHASES, "host")]
            fits = [_fits(old), _fits(after)]
            lines.append(f"| {' | '.join([layout, algorithm, *cells, ' → '.join(fits)])} |")
    return "\n".join(lines).replace("– → –", "–") + "\n"


def _gb(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e9:.1f}"


def _fits(peaks: Mapping[str, int]) -> str:
    if not peaks:
        return "–"
    return "yes" if max(size for phase, size in peaks.items() if phase != "host") <= GPU - RESERVE else "no"


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", action="store_true", help="count the checkout in PYTHONPATH, with the older rules")
    before = parser.parse_args().before
    logging.disable(logging.WARNING)
    path = RESULTS.with_suffix(".json")
    figures = json.loads(path.read_text()) if path.exists() else {}
    figures["before" if before else "after"] = measure(before=before)
    path.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    if "after" in figures:
        RESULTS.with_suffix(".md").write_text(HEAD + table(figures))


HEAD = """# GPU memory per phase

Peak GB (10^9 bytes) on one GPU of 80 GB, counted by `benchmarks/memory_per_phase.py`, before → after; see there for what is
counted. Nothing was run on a GPU. `host` is the largest amount in host memory per GPU. A layout fits if its largest peak leaves
2 GiB of the 79 GiB that CUDA reports. Critic and teacher have the size of the policy. Microbatches have 8192 tokens (70B: 2048)
and layers are recomputed in the backward pass.

"""

if __name__ == "__main__":
    main()
