"""`make test-gpu` reports each test of a GPU, and fails if one of them does not run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

SESSIONS = """
import contextlib, io, json, os, sys
from pathlib import Path

import pytest

sys.path.insert(0, sys.argv[1])
from gpu_results import GpuResults

class Markers:
    def pytest_configure(self, config):
        config.addinivalue_line("markers", "smoke: first")

ended = []
for folder in sys.argv[2:]:
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
        code = pytest.main(options, plugins=[Markers(), GpuResults(Path("results.json"))])
    ended.append([int(code), output.getvalue()])
print(json.dumps(ended))
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


SETTINGS = {
    "complete": {"smoke": True, "absent": False},
    "one device": {"smoke": True, "absent": True},
    "failed smoke test": {"smoke": False, "absent": False},
}


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    """By settings: exit code, output and cases of a session of `CASES`. One process imports torch for all of them."""
    folders = [tmp_path_factory.mktemp("session") for _ in SETTINGS]
    for number, (folder, settings) in enumerate(zip(folders, SETTINGS.values(), strict=True)):
        (folder / f"test_cases_{number}.py").write_text(CASES.format(**settings))
    command = [sys.executable, "-c", SESSIONS, ROOT / "tests", *folders]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=folders[0])
    results = {}
    for name, folder, (code, output) in zip(SETTINGS, folders, json.loads(ended.stdout), strict=True):
        cases = json.loads((folder / "results.json").read_text())["cases"]
        results[name] = code, output, {name.partition("::")[2]: case for name, case in cases.items()}
    return results


@pytest.mark.slow
def test_every_case_is_written_and_a_complete_session_passes(sessions):
    code, output, cases = sessions["complete"]
    assert code == 0, output
    assert [case["outcome"] for case in cases.values()] == ["passed"] * 3
    assert next(iter(cases)) == "test_smoke"  # first, though written second


def test_a_case_that_does_not_run_fails_the_session_and_gives_its_reason(sessions):
    code, output, cases = sessions["one device"]
    assert code == 1
    assert cases["test_two_devices"] == {"outcome": "not run", "reason": "needs two CUDA devices"}
    assert "test_two_devices (needs two CUDA devices)" in output


def test_after_a_failed_smoke_test_the_others_are_not_run(sessions):
    code, _, cases = sessions["failed smoke test"]
    assert code == 1
    assert cases["test_smoke"]["outcome"] == "failed"
    assert cases["test_other"]["outcome"] == "not run"
    assert "test_smoke failed" in cases["test_other"]["reason"]


@pytest.mark.slow
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
