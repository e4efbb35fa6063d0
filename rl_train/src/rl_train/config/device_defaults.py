"""Config keys whose null stands for a value that depends on the devices of a run, or on the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rl_core.config.diagnostics import KeyPath
from rl_core.config.section import Devices
from rl_train.config.loader import LoadedConfig
from rl_train.config.rules.models import models_of
from rl_train.config.schema import RunConfig
from rl_train.config.values import leaves_by_path

_ENGINE = ("policy", "generation")


def device_values(run: RunConfig, devices: Devices) -> dict[KeyPath, Any]:
    """The values on some devices of keys that are null, by key."""
    engine = run.policy.generation
    sections: dict[KeyPath, Any] = {(name,): model for name, model in models_of(run).items()}
    sections |= {_ENGINE: engine} if engine is not None else {}
    filled = (_added(path, section, section.for_devices(devices)) for path, section in sections.items())
    return {key: value for values in filled for key, value in values.items()}


def effective_values(run: RunConfig, devices: Devices) -> dict[KeyPath, Any]:
    """As `device_values`, and what the engine takes from the policy."""
    engine, values = run.policy.generation, device_values(run, devices)
    if engine is None:
        return values
    resolved = engine.for_devices(devices).for_policy(run.policy.for_devices(devices))
    return values | _added(_ENGINE, engine, resolved)


def _added(path: KeyPath, given: Any, resolved: Any) -> dict[KeyPath, Any]:
    before, after = (dict(leaves_by_path(section.model_dump(mode="json"), path)) for section in (given, resolved))
    return {key: value for key, value in after.items() if value is not None and before.get(key, value) is None}


def precisions_of(run: RunConfig) -> dict[str, str | None]:
    """The `precision` of each model, by section."""
    return {name: model.precision for name, model in models_of(run).items()}


def saved_precisions(config: Mapping[str, Any]) -> dict[str, str | None]:
    """The same of the config of a checkpoint."""
    return {name: section.get("precision") for name, section in config.items() if isinstance(section, Mapping)}


def with_precisions(loaded: LoadedConfig, precisions: Mapping[str, str | None]) -> LoadedConfig:
    """The config with the `precision` of models that do not set it, by section."""
    unset = {name: model for name, model in models_of(loaded.run).items() if model.precision is None and precisions.get(name)}
    sections = {name: model.model_copy(update={"precision": precisions[name]}) for name, model in unset.items()}
    resolved, redacted = (
        {**values, **{name: {**values[name], "precision": precisions[name]} for name in unset}}
        for values in (loaded.resolved, loaded.redacted)
    )
    return replace(loaded, run=loaded.run.model_copy(update=sections), resolved=resolved, redacted=redacted)
