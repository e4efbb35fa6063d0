"""Files that a release needs: license and changelog, and marks of tests that CI leaves out."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rl_core.old_paths import NEW_PATHS
from rl_core.plugins.manager import discover

ROOT = Path(__file__).parents[2]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]
OURS = {tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]["name"] for package in PACKAGES}
SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_distribution_has_a_copy_of_the_license(package):
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    # A copy, not a link: an sdist cannot contain a file from outside its folder.
    assert not (ROOT / package / "LICENSE").is_symlink()
    assert (ROOT / package / "LICENSE").read_text() == text


def test_the_changelog_describes_the_version_and_lists_every_path_that_has_moved():
    text = (ROOT / "CHANGELOG.md").read_text()
    first, *released = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    version = tomllib.loads((ROOT / "rl_core" / "pyproject.toml").read_text())["project"]["version"]
    assert first == f"[{version}] - unreleased"
    assert [heading for heading in released if not re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading)] == []
    assert set(re.findall(r"^### (.+)$", text, flags=re.MULTILINE)) <= SECTIONS
    deprecated = text.split("\n### Deprecated\n")[1].split("\n## ")[0]
    moved = dict(re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|$", deprecated, flags=re.MULTILINE))
    assert moved == NEW_PATHS


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/nonexistent", os.environ["PATH"]])
def test_a_suite_that_skips_tests_of_the_sandbox_ends_with_their_number_and_how_to_install_bubblewrap(path):
    environment = {key: value for key, value in os.environ.items() if key != "RLCORE_REQUIRE_SANDBOX"} | {"PATH": path}
    command = [sys.executable, "-m", "pytest", "-q", "tests/sandbox/test_sessions.py", "-k", "an_exception"]
    done = subprocess.run([*command, "-m", "not full"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    line = re.fullmatch(
        r"(\d+) tests of the sandbox were skipped, because bubblewrap is not installed: apt-get install bubblewrap; then "
        r"`pytest @(\S+)` runs them",
        done.stdout.splitlines()[-1],
    )
    assert (line is not None) == (shutil.which("bwrap", path=path) is None), done.stdout
    if line is not None:
        assert f"{line[1]} skipped" in done.stdout
        assert len((ROOT / line[2]).read_text().splitlines()) == int(line[1])


def test_every_mark_full_says_what_covers_the_behavior_in_make_test():
    marks = {
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}": found[1]
        for path in (ROOT / "tests").rglob("*.py")
        for text in [path.read_text()]
        for found in re.finditer(r"mark\.full\b(?!\\)(.{0,30})", text, flags=re.DOTALL)
    }
    assert len(marks) > 10
    assert {place: after for place, after in marks.items() if not re.match(r'\(\s*"\w+', after)} == {}


def test_needs_of_components_allow_the_releases_that_their_distribution_allows():
    ours = [plugin for plugin in discover(strict=False).plugins if plugin.distribution in OURS]
    differing = []
    for plugin in ours:
        stated = [Requirement(text) for text in distribution(plugin.distribution).requires or ()]
        stated = [each for each in stated if each.marker is None or 'extra == "tested"' not in str(each.marker)]
        for registration in plugin.registrations:
            for need in map(Requirement, registration.component.needs):
                allowed = [each.specifier for each in stated if each.name == need.name and each.specifier]
                differing += [f"{registration.component.name}: {need}" for each in allowed if each != need.specifier]
    assert len(ours) >= 9
    assert differing == []


def test_the_page_on_compatibility_states_the_ranges_of_the_distributions():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    for package in PACKAGES:
        project = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {})
        for text in (*project["dependencies"], *extras.get("cuda", []), *extras.get("lora", [])):
            found = re.match(r"(torch|transformers|ray|megatron-core|vllm|peft)(\[\w+\])?([<>=].*)", text)
            assert found is None or f"| `{found[3]}` |" in page, f"{package}: {text}"
