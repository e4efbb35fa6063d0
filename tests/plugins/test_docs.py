"""The pages on plugins match the code: hooks are listed as specified, and the environment of the tutorial is built and run."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl_core.plugins import hookspecs
from rl_train.control import EVENT_HOOKS
from rlcore_cli.new_plugin.scaffold import plugin_files

DOCS = Path(__file__).parents[2] / "docs"
SPECIFICATIONS = {
    name: tuple(inspect.signature(function).parameters)
    for name, function in vars(hookspecs).items()
    if name.startswith("rlcore_")
}
UNTYPED = ("rlcore_algorithms", "rlcore_commands")
"""Hooks whose components are functions, not subclasses of an interface."""


def test_the_page_lists_every_hook_with_the_arguments_of_its_specification():
    headings = re.findall(r"^### `(\w+)\((.*)\)`$", (DOCS / "hooks.md").read_text(), flags=re.MULTILINE)
    documented = {name: tuple(arguments.split(", ")) if arguments else () for name, arguments in headings}
    assert documented == SPECIFICATIONS


@pytest.mark.parametrize("hook", sorted(SPECIFICATIONS))
def test_every_hook_specification_documents_its_components_or_when_it_is_called(hook):
    returned = ": functions" if hook in UNTYPED else r"`rl_\w+\."
    expected = "Called " if SPECIFICATIONS[hook] else returned
    assert re.search(expected, inspect.getdoc(getattr(hookspecs, hook)))


def test_the_module_of_the_specifications_documents_both_kinds_of_hooks_with_an_example():
    for component_or_event in inspect.getdoc(hookspecs).split("\n\nRun event hooks"):
        for text in ("are called", "process", "If one raises", "Example:", "@hookimpl"):
            assert text in component_or_event


def test_every_hook_without_arguments_returns_components_and_every_other_hook_is_an_event():
    nouns = {name for name, arguments in SPECIFICATIONS.items() if not arguments}
    assert {*hookspecs.KIND_OF_HOOK, "rlcore_known_components"} == nouns
    assert set(EVENT_HOOKS) == set(SPECIFICATIONS) - nouns


@pytest.mark.slow
def test_the_environment_of_the_tutorial_is_built_installed_and_works(site, tmp_path):
    project = tmp_path / "project"
    for path, text in plugin_files("acme", "environment").items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(site.folder), str(project)],
        check=True,
        capture_output=True,
        timeout=240,
    )
    assert site.plugins()["acme"]["status"] == "ready"
    assert site.rlcore("doctor", "acme", "--deep").returncode == 0
    result = site.python(
        "-c",
        "import json\n"
        "from rl_core.plugins.manager import discover\n"
        "from rl_core.plugins.component import Kind\n"
        "from rl_core.plugins.registry import Registry\n"
        "from rl_train.config.schema import section_of\n"
        "component = Registry(discover()).find('environment', 'acme')\n"
        "environment = component.load()(section_of(component, Kind.ENVIRONMENT)(partial_credit=0.5))\n"  # as for a config
        "logs = [[{'role': 'assistant', 'content': text}] for text in ('42', '41', 'forty-two')]\n"
        "print(json.dumps(environment.step(logs, [{'expected_answer': '42'}] * 3).rewards.tolist()))\n",
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [1.0, 0.25, 0.0]


TUTORIALS = {
    "write_an_environment": ("environment", "session-environment"),
    "write_an_algorithm": ("algorithm", "loss"),
    "write_a_logger": ("logger",),
    "write_a_policy": ("policy",),
    "write_a_generation_backend": ("generation",),
    "write_a_weight_transport": ("weight-transport",),
}


@pytest.mark.parametrize("page", TUTORIALS)
def test_the_code_of_a_tutorial_is_what_the_command_writes(page):
    """`test_scaffold.py` installs these files and trains three steps with them."""
    text = (DOCS / f"{page}.md").read_text()
    assert len(text.splitlines()) <= 150
    written = [_compact(text) for kind in TUTORIALS[page] for text in plugin_files("acme", kind).values()]
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        assert any(_compact(block) in file for file in written), block


def _compact(code: str) -> str:
    """Code without what formatting a fragment changes: whitespace and trailing commas."""
    return re.sub(r",(?=[)\]}])", "", re.sub(r"\s", "", code))
