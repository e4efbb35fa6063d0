"""Files that a release needs: license, changelog, pre-commit hooks, Docker image."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]
SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def makefile_commands(target):
    """The commands that make would run for a target in an installed environment."""
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", "--old-file", ".venv/.installed-dev", target]
    # The suite itself runs under make, whose options and recursion level a nested make would inherit.
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_makefile_installs_and_builds_every_distribution_of_the_workspace():
    text = (ROOT / "Makefile").read_text()
    listed = [name for line in re.findall(r"^(?:MORE_)?PACKAGES := (.*)$", text, flags=re.MULTILINE) for name in line.split()]
    assert sorted(listed) == sorted(PACKAGES) == sorted(path.parent.name for path in ROOT.glob("*/pyproject.toml"))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_distribution_has_a_copy_of_the_license(package):
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    # A copy, not a link: an sdist cannot contain a file from outside its folder.
    assert not (ROOT / package / "LICENSE").is_symlink()
    assert (ROOT / package / "LICENSE").read_text() == text


def test_the_changelog_starts_with_unreleased_changes_and_uses_the_known_sections():
    text = (ROOT / "CHANGELOG.md").read_text()
    first, *versions = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    assert first == "[Unreleased]"
    assert [heading for heading in versions if not re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading)] == []
    assert set(re.findall(r"^### (.+)$", text, flags=re.MULTILINE)) <= SECTIONS
    unreleased = text.split("## [Unreleased]")[1].split("\n## ")[0]
    assert "(docs/changes.md)" in unreleased


def test_pre_commit_hooks_run_the_commands_of_make_lint_without_downloads():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    [local] = config["repos"]
    assert local["repo"] == "local"
    assert {hook["language"] for hook in local["hooks"]} == {"system"}
    assert [hook["entry"] for hook in local["hooks"]] == makefile_commands("lint")


def test_make_test_is_what_ci_runs_and_leaves_out_only_tests_marked_full():
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec make test"
    [run] = [command for command in makefile_commands("test") if "pytest" in command]
    assert run.endswith(' --no-loadscope-reorder -m "not full"')
    [everything] = [command for command in makefile_commands("test-full") if "pytest" in command]
    assert everything.endswith(" --no-loadscope-reorder --closing-line tests")


@pytest.mark.parametrize("path", ["/nonexistent", os.environ["PATH"]])
def test_a_suite_that_skips_tests_of_the_sandbox_ends_with_their_number_and_how_to_install_bubblewrap(path):
    environment = {key: value for key, value in os.environ.items() if key != "RLCORE_REQUIRE_SANDBOX"} | {"PATH": path}
    command = [sys.executable, "-m", "pytest", "-q", "tests/sandbox/test_sessions.py", "-k", "an_exception"]
    done = subprocess.run([*command, "-m", "not full"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    line = re.fullmatch(
        r"(\d+) tests of the sandbox were skipped, because bubblewrap is not installed: apt-get install bubblewrap",
        done.stdout.splitlines()[-1],
    )
    assert (line is not None) == (shutil.which("bwrap", path=path) is None), done.stdout
    if line is not None:
        assert f"{line[1]} skipped" in done.stdout


def test_every_mark_full_says_what_covers_the_behavior_in_make_test():
    marks = {
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}": found[1]
        for path in (ROOT / "tests").rglob("*.py")
        for text in [path.read_text()]
        for found in re.finditer(r"mark\.full\b(?!\\)(.{0,30})", text, flags=re.DOTALL)
    }
    assert len(marks) > 10
    assert {place: after for place, after in marks.items() if not re.match(r'\(\s*"\w+', after)} == {}


def test_the_docker_image_is_built_with_the_makefile_from_files_that_are_not_ignored():
    text = (ROOT / "Dockerfile").read_text()
    assert "Not run on this hardware" in text
    assert re.search(r"^FROM python:3\.11-slim$", text, flags=re.MULTILINE)
    [target] = re.findall(r"^RUN make .*?(\S+)$", text, flags=re.MULTILINE)
    assert target == ".venv/.installed"
    ignored = {line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")}
    needed = {"Makefile", "constraints.txt", "pyproject.toml", *PACKAGES}
    assert needed & ignored == set()
    assert {".git", ".venv", "runs", "dist"} <= ignored
