"""Config files in a temporary folder, and their errors line by line."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from rl_core.config.diagnostics import InvalidConfigError
from rl_core.plugins import Component, hookimpl
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.loader import LoadedConfig, load_config

GOOD = """\
grpo:
  num_prompts_per_step: 8
policy:
  backend: hf
  model_name: some/model
  generation:
    backend: hf
    max_new_tokens: 64
data:
  train: {dataset_name: arithmetic}
env:
  arithmetic: {}
"""
"""The shortest config of a GRPO run, 12 lines."""


class Acme:
    """A third-party plugin: a policy without optional capabilities, and config models with various errors."""

    @hookimpl
    def rlcore_policies(self) -> list[Component]:
        return [
            Component("plain", target="acme:Policy", summary="One weight transport", capabilities=("collective",)),
            Component(
                "valuer",
                target="acme:Policy",
                config="acme_models:Valuer",
                summary="Has scalar heads",
                capabilities=("scalar_head",),
            ),
            Component("strange", target="acme:Policy", config="acme_models:NoSection", summary="Its model is no section"),
            Component("absent", target="acme:Policy", config="acme_models:Nothing", summary="Its model does not exist"),
            Component("raising", target="acme:Policy", config="acme_models:Raising", summary="Its model raises"),
            Component("filing", target="acme:Policy", summary="Writes files", capabilities=("disk", "acme:gradients")),
            Component("forgetful", target="acme:Policy", config="acme_models:Forgetful", summary="Has no reference policy"),
        ]

    @hookimpl
    def rlcore_weight_transports(self) -> list[Component]:
        return [Component("acme_files", target="acme_models:AcmeFiles", summary="Files of weights")]

    @hookimpl
    def rlcore_generations(self) -> list[Component]:
        return [
            Component("remote", target="acme:Engine", config="acme_models:Remote", summary="Has its own weights"),
        ]

    @hookimpl
    def rlcore_environments(self) -> list[Component]:
        return [Component("strict", target="acme:Env", config="acme_models:Strict", summary="Scores with two workers")]

    @hookimpl
    def rlcore_algorithms(self) -> list[Component]:
        return [
            Component("filtered", target="acme:train", config="acme_models:Filtered", summary="Corrects for top-p"),
            Component("critical", target="acme:train", config="acme_models:Critical", summary="Has a critic and a teacher"),
            Component("scoring", target="acme:train", config="acme_models:Scoring", summary="Trains a scalar head"),
            Component("untrained", target="acme:train", config="acme_models:Untrained", summary="Needs no data"),
            Component("demanding", target="acme:train", config="acme_models:Demanding", summary="Requires its own policy"),
        ]


ACME_MODELS = """
    from typing import ClassVar
    from pydantic import BaseModel, model_validator
    from rl_train.config.algorithm import RolloutNeeds, RuntimeNeeds
    from rl_core.config.schema import EnvironmentConfig, GenerationConfig, PolicyConfig
    from rl_train.config.schema import AlgorithmConfig

    class NoSection(BaseModel):
        pass

    class Remote(GenerationConfig):
        refits: bool = False

        @property
        def has_own_weights(self):
            return not self.refits

    class Strict(EnvironmentConfig):
        def conflicts(self, run):
            if self.num_workers != 2:
                yield ("num_workers",), "strict scores alone: set it to 2."

    class Raising(PolicyConfig):
        @model_validator(mode="after")
        def _bug(self):
            raise KeyError("acme")

    class Filtered(AlgorithmConfig):
        default_loss: ClassVar[str] = "clipped_pg"
        allows_filtered_sampling: ClassVar[bool] = True

        @property
        def runtime_needs(self):
            return RuntimeNeeds(rollouts=RolloutNeeds(prompts_per_draw=2, samples_per_prompt=2))

    class Forgetful(PolicyConfig):
        @property
        def missing_reference(self):
            return "forgetful keeps no initial weights"

    class Valuer(PolicyConfig):
        def conflicts(self, run):
            if self.precision == "bfloat16":
                yield ("precision",), "valuer computes in float32."

    class Critical(AlgorithmConfig):
        default_loss: ClassVar[str] = "clipped_pg"

        @property
        def runtime_needs(self):
            return RuntimeNeeds(companions=("value", "teacher"))

    class Demanding(Filtered):
        requires = ("acme:gradients",)

    class AcmeFiles:
        requires = ("disk",)

    class Scoring(AlgorithmConfig):
        default_loss: ClassVar[str] = "nll"
        head: ClassVar[str] = "scalar"

        @property
        def runtime_needs(self):
            return RuntimeNeeds()

    class Untrained(AlgorithmConfig):
        default_loss: ClassVar[str] = "nll"

        @property
        def runtime_needs(self):
            return RuntimeNeeds()
"""


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """The installed plugins and `Acme`."""
    folder = tmp_path_factory.mktemp("acme")
    (folder / "acme_models.py").write_text(textwrap.dedent(ACME_MODELS))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import_module("acme_models")  # a test that has changed sys.path before this fixture restores it without the folder
        manager = discover()
        # What else is installed here must not change what the tests see.
        used = ("core", "train", "rlcore", "hf", "envs", "serve")
        manager.plugins = [plugin for plugin in manager.plugins if plugin.name in used]
        manager.add("acme", Acme, distribution="rl-acme", version="1.0")
        yield Registry(manager)


_INSTALLED = re.compile(r"(Installed: |Sections: |\w+ backends with it: |add one of )[\w:-]+(, [\w:-]+)*")


class Files:
    """A folder with configs; it is not the working directory."""

    def __init__(self, folder: Path, registry: Registry) -> None:
        self.folder = folder
        self.registry = registry

    def write(self, text: str | bytes, name: str = "config.yaml") -> Path:
        """Writes a file; lines of the text may be indented as the test is."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, bytes):
            path.write_bytes(text)
        else:
            path.write_text(textwrap.dedent(text).removeprefix("\n"), encoding="utf-8")
        return path

    def load(self, text: str | bytes, *overrides: str) -> LoadedConfig:
        """The config of a text."""
        return load_config(self.write(text), overrides, registry=self.registry)

    def errors(self, text: str | bytes, *overrides: str) -> list[str]:
        """The errors of a text; file names have no folder, and lists of installed components are omitted."""
        with pytest.raises(InvalidConfigError) as caught:
            self.load(text, *overrides)
        lines = str(caught.value).replace(f"{self.folder}{os.sep}", "").splitlines()
        return [_INSTALLED.sub(r"\1...", line) for line in lines]


@pytest.fixture
def files(tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Files:
    """Configs in one folder, and another folder to work in."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    folder = tmp_path / "configs"
    folder.mkdir()
    return Files(folder, registry)


@pytest.fixture
def good() -> str:
    """The shortest config of a GRPO run, 12 lines."""
    return GOOD
