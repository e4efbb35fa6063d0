"""The config models of components, by kind, and those that are given as they are."""

from __future__ import annotations

from pydantic import BaseModel

from rl_core.config import schema as core_schema
from rl_core.config.introspection import Model
from rl_core.config.source_tree import KeyPath, Node
from rl_core.errors import InvalidComponentError
from rl_core.plugins.component import Component, Kind, is_path
from rl_train.config import schema

BASES: dict[Kind, tuple[Model, Model]] = {
    Kind.ALGORITHM: (schema.AlgorithmConfig, schema.AlgorithmConfig),
    Kind.LOSS: (schema.LossConfig, schema.OpenLossConfig),
    Kind.POLICY: (core_schema.PolicyConfig, schema.OpenPolicyConfig),
    Kind.GENERATION: (core_schema.GenerationConfig, schema.OpenGenerationConfig),
    Kind.ENVIRONMENT: (core_schema.EnvironmentConfig, schema.OpenEnvironmentConfig),
    Kind.DATASET: (core_schema.DatasetConfig, schema.OpenDatasetConfig),
    Kind.LOGGER: (schema.LoggerConfig, schema.OpenLoggerConfig),
}
"""The base class of the config model of each kind, and the model of a component given by its path."""


def model_at(written: Node, path: KeyPath) -> BaseModel | None:
    """The model that is given as a section; None if its values are written one by one, or not at all."""
    node = written.at(path)
    return node.value if node is not None and isinstance(node.value, BaseModel) else None


def section_of(component: Component, kind: Kind) -> Model:
    """The model of a component's section.

    Raises:
        PluginError: The model cannot be imported, or does not extend the base model of its kind.
    """
    base, opened = BASES[kind]
    model = component.load_config()
    if model is None:
        return opened if is_path(component.name) else base
    if not issubclass(model, base):
        raise InvalidComponentError(
            f"The config model {component.config} of the {kind.label} {component.name!r} is not a subclass of "
            f"{base.__module__}.{base.__name__}. This is a bug in the package that registers it."
        )
    return model
