"""The repository: versions in lockstep, size limits of modules, a correct README, no generated or large files in git."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "rl_core",
    "rl_train",
    "rl_backends_base",
    "rl_backends_hf",
    "rl_backends_megatron",
    "rl_backends_vllm",
    "rl_backends_openai",
    "rl_sandbox",
    "rl_envs",
    "rl_serve",
    "cli",
)
MAX_LINES = 500
MAX_BYTES = 5_000_000


def tracked(*patterns):
    out = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in out.splitlines()]


def description(package):
    return tomllib.loads((ROOT / package / "pyproject.toml").read_text())


def test_versions_are_literal_and_in_lockstep():
    versions = {package: description(package)["project"]["version"] for package in PACKAGES}
    assert len(set(versions.values())) == 1, versions
    version = versions["rl_core"]
    minor = version.rsplit(".", 1)[0]
    for package in PACKAGES:
        for requirement in description(package)["project"]["dependencies"]:
            if requirement.startswith(("rl-", "rlcore")):
                assert requirement in {
                    f"{name}~={minor}.0" for name in ("rl-core", "rl-train", "rl-sandbox", "rl-backends-base")
                }, f"{package} requires {requirement}"
    import rl_core
    import rl_train

    assert rl_core.__version__ == rl_train.__version__ == version


@pytest.mark.parametrize("package", PACKAGES)
def test_every_distribution_is_typed_and_has_a_readme(package):
    [source] = (ROOT / package / "src").iterdir()
    assert (source / "py.typed").is_file()
    assert len((ROOT / package / "README.md").read_text().splitlines()) > 5


def test_rl_core_has_at_most_14000_lines():
    """It has only what backends and environments are written against; what only the runtime uses belongs to rl_train."""
    modules = [path for path in tracked("rl_core/src/**/*.py") if "testing" not in path.parts]
    assert sum(len(path.read_text().splitlines()) for path in modules) <= 14_000


def test_tokens_become_text_in_one_module():
    """So that rewards, stop strings, history, servers and logs see the same text."""
    sources = [path for path in (*tracked("*/src/**/*.py"), *tracked("*/src/**/*.j2")) if "tokenizer.py" not in path.name]
    assert not [path for path in sources if re.search(r"tokenizer\.(batch_)?decode\b", path.read_text())]


SHARED = ("checks.py",)
"""Modules of `environments/` that `rlcore check env` and `rlcore env` run as well."""


def test_the_conformance_kit_has_at_most_3910_lines():
    """Without `SHARED` (413 lines), and without `outputs/`: those checks of returned values run in every training step."""
    modules = tracked("rl_core/src/rl_core/testing/*.py", "rl_train/src/rl_train/testing/*.py")
    own = [path for path in modules if "outputs" not in path.parts and path.name not in SHARED]
    assert sum(len(path.read_text().splitlines()) for path in own) <= 3_910


def test_modules_have_at_most_500_lines():
    sizes = {path: len(path.read_text().splitlines()) for path in tracked("*/src/**/*.py")}
    assert {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > MAX_LINES} == {}


def test_every_module_has_a_docstring():
    undocumented = [path for path in tracked("*/src/**/*.py") if not path.read_text().removeprefix("r").startswith('"""')]
    assert undocumented == []


def test_no_module_is_called_utils_helpers_common_or_misc():
    assert [path for path in tracked() if path.stem in {"utils", "helpers", "common", "misc"}] == []


def test_git_contains_neither_generated_nor_large_files():
    large = [str(path) for path in tracked() if path.is_file() and path.stat().st_size > MAX_BYTES]
    generated = [str(p) for p in tracked() if {"__pycache__", "runs", ".venv", "dist"} & set(p.relative_to(ROOT).parts)]
    assert large == []
    assert generated == []


def test_every_relative_link_in_the_documents_exists():
    broken = []
    for page in tracked("*.md"):
        text = re.sub(r"`[^`\n]+`", "", page.read_text())
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
            if not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert broken == []


def test_the_repository_map_in_the_readme_is_correct():
    text = (ROOT / "README.md").read_text()
    named = re.findall(r"^    (\S+/)\s", text, flags=re.MULTILINE)
    assert set(PACKAGES) <= {name.rstrip("/") for name in named}
    assert [name for name in named if not (ROOT / name).is_dir()] == []


def test_every_pinned_requirement_is_in_the_constraints():
    pinned = {re.split(r"[=<>]", line)[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()}
    for package in PACKAGES:
        project = description(package)["project"]
        for requirement in project["dependencies"]:
            name = re.split(r"[\[=<>~ ]", requirement)[0].lower().replace("_", "-")
            assert name in pinned or name.startswith(("rl-", "rlcore")), f"{package}: {name} is not pinned"
