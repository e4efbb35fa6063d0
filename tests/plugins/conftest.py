"""Third-party distributions as installed: a module folder and a dist-info folder on the path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `keep_plugins`

HEALTHY = """
    from rl_core.plugins import Component, hookimpl

    @hookimpl
    def rlcore_policies():
        return [
            Component(
                "{name}",
                target="{package}.policy:Policy",
                summary="Trains on nothing",
                capabilities=("shared_memory",),
            )
        ]
"""


HIDDEN = ("rl-backends-megatron", "rl-backends-vllm", "rl-backends-openai", "rl-sandbox", "rl-serve")
"""Of our own distributions, those that an interpreter started here does not see: so that some are known and not installed."""
HIDES = f"""
import importlib.metadata

everything = importlib.metadata.distributions
importlib.metadata.distributions = lambda **where: (d for d in everything(**where) if d.name not in {HIDDEN})
"""


IN_ONE_PROCESS = """
import json, sys
from typer.testing import CliRunner
from rlcore_cli.main import app
results = [CliRunner().invoke(app, command) for command in json.loads(sys.argv[1])]
print(json.dumps([[result.exit_code, result.output] for result in results]))
"""


@dataclass
class Site:
    """A folder on the path of the interpreters started here, like site-packages."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    listings: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    """All results of `plugins`."""

    def install(
        self,
        name: str,
        *,
        version: str = "1.0",
        plugin: str | None = None,
        source: str = HEALTHY,
        requires: Sequence[str] = (),
        provides_extras: Sequence[str] = (),
    ) -> Path:
        """Installs a distribution with one plugin; returns its package folder."""
        package = name.replace("-", "_")
        plugin = plugin or name.removesuffix("-rl")
        package_folder = self.folder / package
        package_folder.mkdir(exist_ok=True)
        for module, content in {
            "__init__": "",
            "policy": "class Policy: pass\n",
            "environment": "class Environment: pass\n",
        }.items():
            (package_folder / f"{module}.py").write_text(content)
        text = textwrap.dedent(source).replace("{name}", plugin).replace("{package}", package)
        (package_folder / "plugin.py").write_text(text)
        self.write_metadata(
            name,
            version=version,
            entry_points={plugin: f"{package}.plugin"},
            requires=requires,
            provides_extras=provides_extras,
        )
        return package_folder

    def write_metadata(
        self,
        name: str,
        *,
        version: str = "1.0",
        entry_points: dict[str, str] | None = None,
        requires: Sequence[str] = (),
        provides_extras: Sequence[str] = (),
    ) -> None:
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        headers = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        headers += [f"Provides-Extra: {extra}" for extra in provides_extras]
        headers += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text("\n".join(headers) + "\n")
        lines = [f"{point} = {module}" for point, module in (entry_points or {}).items()]
        (info / "entry_points.txt").write_text("\n".join(["[rl_core.plugins]", *lines]) + "\n" if lines else "")

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("RLCORE_")}
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, *arguments],
            env={**clean, "PYTHONPATH": path, **self.environment},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def rlcore(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "rlcore_cli.main", *arguments)

    def rlcore_in_one_process(self, *commands: tuple[str, ...]) -> list[tuple[int, str]]:
        """Exit code and output of several commands that import much, one after another in one interpreter."""
        result = self.python("-c", IN_ONE_PROCESS, json.dumps(commands))
        assert result.returncode == 0, result.stderr
        return [(code, output) for code, output in json.loads(result.stdout.splitlines()[-1])]

    def plugins(self) -> dict[str, dict[str, Any]]:
        """The output of `rlcore list-plugins --all --json` by plugin name."""
        result = self.rlcore("list-plugins", "--all", "--json")
        assert result.returncode == 0, result.stderr
        self.listings.append({plugin["name"]: plugin for plugin in json.loads(result.stdout)})
        return self.listings[-1]

    def look_up(self, kind: str, name: str, *, requires: Sequence[str] = ()) -> str:
        """Looks up a component in a new interpreter: its target, or the class and message of the error."""
        code = (
            "import sys\n"
            "from rl_core.errors import PluginError\n"
            "from rl_core.plugins.manager import discover\n"
            "from rl_core.plugins.registry import Registry\n"
            "try:\n"
            f"    print(Registry(discover()).find({kind!r}, {name!r}, requires={tuple(requires)!r}).target)\n"
            "except PluginError as error:\n"
            "    print(f'{type(error).__name__}: {error}')\n"
        )
        result = self.python("-c", code)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()


def make_site(parent: Path) -> Site:
    """A site whose interpreters do not see the distributions in `HIDDEN`."""
    folder = parent / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDES)
    return Site(folder)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_site(tmp_path)


@pytest.fixture(scope="module")
def site_of_the_module(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_site(tmp_path_factory.mktemp("module"))


@pytest.fixture
def words() -> Callable[[str], str]:
    """Joins the lines of a text, to compare words independently of line breaks."""
    return lambda text: " ".join(text.split())
