"""Conformance of plugins as packages: metadata, registration and imports."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel

from rl_core.config.schema import DatasetConfig, EnvironmentConfig, GenerationConfig, PolicyConfig
from rl_core.config.section import Section
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import LossFunction, TrainableInterface, WeightTransport
from rl_core.plugins.component import Kind, Plugin
from rl_core.plugins.component import Status as PluginStatus
from rl_core.plugins.manager import HEAVY_MODULES, PluginManager, discover
from rl_core.plugins.registry import Registry
from rl_core.plugins.requirements import unmet_needs
from rl_core.testing.promises import Conformance, Found, promise, run_elsewhere

_CONTRACTS: dict[Kind, tuple[type, type[BaseModel]]] = {
    Kind.POLICY: (TrainableInterface, PolicyConfig),
    Kind.GENERATION: (GenerationInterface, GenerationConfig),
    Kind.ENVIRONMENT: (EnvironmentInterface, EnvironmentConfig),
    Kind.LOSS: (LossFunction, BaseModel),
    Kind.WEIGHT_TRANSPORT: (WeightTransport, Section),
    Kind.DATASET: (object, DatasetConfig),
}
"""Base classes of the targets and config models of a kind; the tests of a kind of rl_train check its own base."""
_IMPORT = """
import {modules}
print("HEAVY", *sorted(set({heavy}) & sys.modules.keys()))
"""


class PackagingConformance(Conformance[Plugin]):
    """Promises of a plugin as a package. `component` is the name of the plugin's entry point or of its distribution."""

    minimum = 9

    @classmethod
    def title(cls) -> str:
        return "plugin"

    @classmethod
    def create(cls) -> Plugin:
        return plugin_named(cls.component, discover(strict=False))

    @promise("It is installed, its requirements are met, and its module and hooks work.")
    def test_it_is_ready(self) -> str:
        plugin = self.subject()
        if plugin.status is not PluginStatus.READY:
            raise Found(f"{plugin.label} is {plugin.status.value}: {plugin.reason}.")
        return plugin.label

    @promise("It registers at least one component or event hook.")
    def test_it_registers_something(self) -> str:
        if not self.subject().components and not self.subject().hooks:
            raise Found(f"the module {self.subject().module} has no function with @hookimpl.")
        return ", ".join(f"{kind.label} {component.name!r}" for kind, component in self.subject().components)

    @promise("Its distribution requires rl-core and a range of Python versions.")
    def test_its_metadata_names_what_it_needs(self) -> str:
        metadata = importlib.metadata.metadata(self.subject().distribution)
        required = {canonicalize_name(Requirement(text).name) for text in metadata.get_all("Requires-Dist") or ()}
        if canonicalize_name(self.subject().distribution) != "rl-core" and not any(name.startswith("rl-") for name in required):
            raise Found("`dependencies` do not name rl-core, so pip could install a version that it was not written for.")
        if "Requires-Python" not in metadata:
            raise Found("`requires-python` is not set.")
        return f"Python {metadata['Requires-Python']}"

    @promise("Importing its entry point prints nothing, and imports none of the heavy libraries.")
    def test_registration_is_silent_and_light(self) -> None:
        check_import([self.subject().module])

    @promise("Importing its config models prints nothing, and imports none of the heavy libraries.")
    def test_config_models_are_silent_and_light(self) -> str:
        modules = sorted({c.config.partition(":")[0] for _, c in self.subject().components if c.config is not None})
        if modules:
            check_import(modules)
        return ", ".join(modules)

    @promise("Every config model can be imported, extends the base model of its kind, and documents each key.")
    def test_config_models_are_documented(self) -> str:
        count = 0
        for kind, component in self.subject().components:
            model: Any = component.load_config()
            if model is None:
                continue
            _, base = _CONTRACTS.get(kind, (object, BaseModel))
            if not issubclass(model, base):
                raise Found(f"{component.config} does not extend {base.__module__}.{base.__name__}.")
            undocumented = [name for name, field in model.model_fields.items() if not field.description]
            if undocumented:
                raise Found(f"{component.config} has keys without a docstring: {', '.join(undocumented)}.")
            count += len(model.model_fields)
        return f"{count} keys"

    @promise("Every target can be imported and implements the interface of its kind.", after="test_it_is_ready")
    def test_targets_implement_their_interfaces(self) -> None:
        for kind, component in self.subject().components:
            if unmet_needs(component.needs) is not None:
                continue
            target = component.load()
            if isinstance(target, type) and kind in _CONTRACTS:
                component.load(expect=_CONTRACTS[kind][0])
            elif not callable(target):
                raise Found(f"{component.target} is {target!r}, which cannot be called.")

    @promise("Its components have names that no other installed plugin registers.", after="test_it_is_ready")
    def test_its_names_are_its_own(self) -> None:
        registry = Registry(discover(strict=False))
        for kind, component in self.subject().components:
            registry.find(kind, component.name)

    @promise("Loading it twice registers equal components: hooks are called in every process.")
    def test_hooks_may_be_called_again(self) -> None:
        again = plugin_named(self.component, discover(strict=False))
        if again.components != self.subject().components:
            raise Found("a second call of its hooks returned other components.")


def plugin_named(name: str, manager: PluginManager) -> Plugin:
    """The plugin with this entry point name or distribution.

    Raises:
        Found: there is none, or several.
    """
    by_name = [plugin for plugin in manager.plugins if plugin.name == name]
    matches = by_name or [p for p in manager.plugins if canonicalize_name(p.distribution) == canonicalize_name(name)]
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(sorted(plugin.name for plugin in matches or manager.plugins))
    raise Found(f"{len(matches)} installed plugins have this name; there are {names}.")


def check_import(modules: list[str]) -> None:
    """Raise Found if importing these modules prints something or imports heavy libraries."""
    names = ", ".join(modules)
    output, errors = run_elsewhere(_IMPORT.format(modules=names, heavy=HEAVY_MODULES), f"importing {names}")
    printed, _, heavy = output.rpartition("HEAVY")
    if printed or errors:
        raise Found(f"importing {names} printed {(printed or errors).strip()[:200]!r}. It would corrupt `--json` outputs.")
    if heavy.strip():
        raise Found(f"importing {names} imports {', '.join(heavy.split())}. Import them inside the functions that need them.")
