"""The committed table of GPU memory per layout is what the ledger counts with this code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from counting_workers import ALGORITHMS  # noqa: E402
from memory_ledger import GPU  # noqa: E402
from memory_per_phase import HEAD, PHASES, RESERVE, RESULTS, layouts, peaks, table  # noqa: E402

FIGURES = json.loads(RESULTS.with_suffix(".json").read_text())
TOO_LARGE = ("8B 1 hf", "8B 1 megatron", "70B 8 hf fsdp2", "70B 8 megatron tensor 8")
"""Layouts that need LoRA or more GPUs with Adam, as docs/gpus.md says."""


def counted(rows, folder):
    return {
        (name, algorithm): peaks(layout, algorithm, folder)
        for name, layout in layouts(folder)
        for algorithm in ALGORITHMS
        if rows is None or (name, algorithm) in rows
    }


def committed(rows=None):
    found = {(name, algorithm): found for name, by in FIGURES["after"].items() for algorithm, found in by.items()}
    return found if rows is None else {row: found[row] for row in rows}


@pytest.mark.slow
def test_rows_of_each_model_size_and_algorithm_are_counted_as_committed(tmp_path):
    rows = (
        ("0.5B 1 hf", "distillation"),
        ("8B 8 megatron tensor 2", "ppo"),
        ("70B 16 hf fsdp2", "grpo"),
    )
    assert counted(rows, tmp_path) == committed(rows)


@pytest.mark.full("rows of each model size and algorithm are counted above")
def test_all_rows_are_counted_as_committed(tmp_path):
    assert counted(None, tmp_path) == committed()


def test_the_page_shows_the_figures():
    # Rows of the page are in the order of the layouts, and those of the figures are sorted.
    assert sorted(RESULTS.with_suffix(".md").read_text().splitlines()) == sorted((HEAD + table(FIGURES)).splitlines())


def test_all_layouts_fit_except_those_that_the_documentation_names():
    largest = {row: max(found[phase] for phase in PHASES if phase in found) for row, found in committed().items()}
    too_large = {name for (name, _), size in largest.items() if size > GPU - RESERVE}
    assert too_large == set(TOO_LARGE)
    text = (ROOT / "docs" / "gpus.md").read_text()
    assert "8B on one GPU and 70B on eight do not fit with Adam" in text
    old = FIGURES["before"]
    for layout, written in {
        "0.5B 1 hf": "0.5B, 1 GPU, `hf`",
        "8B 8 hf fsdp2": "8B, 8 GPUs, `hf` with FSDP2",
        "8B 8 megatron tensor 2": "8B, 8 GPUs, `megatron`, tensor parallel 2",
        "70B 16 hf fsdp2": "70B, 16 GPUs, `hf` with FSDP2",
        "70B 16 megatron tensor 8 pipeline 2": "70B, 16 GPUs, `megatron`, tensor parallel 8, pipeline 2",
    }.items():
        before = max(old[layout]["grpo"][phase] for phase in PHASES if phase in old[layout]["grpo"])
        figures = (before, largest[layout, "grpo"], committed()[layout, "grpo"]["train"])
        assert f"| {written} | {' | '.join(f'{each / 1e9:.1f}' for each in figures)} |" in text
