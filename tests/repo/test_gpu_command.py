"""`make test-gpu` reports each test of a GPU, and fails if one of them does not run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

PLUGIN = """
import sys
from pathlib import Path

sys.path.insert(0, {tests!r})
from gpu_results import GpuResults

def pytest_configure(config):
    config.addinivalue_line("markers", "smoke: first")
    config.pluginmanager.register(GpuResults(Path("results.json")))
"""

CASES = """
import pytest

def test_other():
    pass

@pytest.mark.smoke
def test_smoke():
    assert {smoke}

@pytest.mark.skipif({absent}, reason="needs two CUDA devices")
def test_two_devices():
    pass
"""


def run(folder, *, smoke, absent):
    (folder / "test_cases.py").write_text(CASES.format(smoke=smoke, absent=absent))
    (folder / "conftest.py").write_text(PLUGIN.format(tests=str(ROOT / "tests")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    cases = json.loads((folder / "results.json").read_text())["cases"]
    return ended, {name.partition("::")[2]: case for name, case in cases.items()}


def test_every_case_is_written_and_a_complete_session_passes(tmp_path):
    ended, cases = run(tmp_path, smoke=True, absent=False)
    assert ended.returncode == 0, ended.stdout
    assert [case["outcome"] for case in cases.values()] == ["passed"] * 3
    assert next(iter(cases)) == "test_smoke"  # first, though written second


def test_a_case_that_does_not_run_fails_the_session_and_gives_its_reason(tmp_path):
    ended, cases = run(tmp_path, smoke=True, absent=True)
    assert ended.returncode == 1
    assert cases["test_two_devices"] == {"outcome": "not run", "reason": "needs two CUDA devices"}
    assert "test_two_devices (needs two CUDA devices)" in ended.stdout


def test_after_a_failed_smoke_test_the_others_are_not_run(tmp_path):
    ended, cases = run(tmp_path, smoke=False, absent=False)
    assert ended.returncode == 1
    assert cases["test_smoke"]["outcome"] == "failed"
    assert cases["test_other"]["outcome"] == "not run"
    assert "test_smoke failed" in cases["test_other"]["reason"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_case_of_a_file_is_listed_as_not_run(tmp_path):
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--gpu-results", str(results)]
    command.append("tests/core/weights/test_cuda_ipc.py")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert ended.returncode == 1
    cases = json.loads(results.read_text())["cases"]
    assert len(cases) == ended.stdout.count("not run: ") > 0
    assert {case["outcome"] for case in cases.values()} == {"not run"}
