"""Today's training step takes at most 1.10 times the CPU-seconds of the one of a recorded commit."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMMIT = (BENCHMARKS / "step_baseline.txt").read_text().split()[0]


@pytest.mark.full("ten runs of a minute each, on an otherwise idle machine")
def test_a_step_costs_about_as_much_as_at_the_recorded_commit():
    known = subprocess.run(["git", "cat-file", "-e", COMMIT], cwd=BENCHMARKS, capture_output=True, check=False)
    if known.returncode:
        pytest.skip(f"this clone does not have the commit {COMMIT[:8]}")
    done = subprocess.run(
        [sys.executable, "step_against_commit.py"], cwd=BENCHMARKS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
