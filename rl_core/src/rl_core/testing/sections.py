"""Config sections of components that are tested without a config file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ConfigDict

from rl_core.config.python_sections import section_of_values
from rl_core.config.section import Section
from rl_core.errors import WrongKindError
from rl_core.plugins.component import Component, is_path

SectionT = TypeVar("SectionT", bound=Section)


def section_of(component: Component, base: type[SectionT], values: Mapping[str, Any]) -> SectionT:
    """The section of a component with these values; as in a config, unknown keys reach a class given by its path.

    Args:
        component: the component.
        base: the base class of sections of its kind.
        values: keys of the section.

    Raises:
        ConfigError: a key is unknown or a value is not allowed.
        WrongKindError: the config model does not extend the base class.
    """
    model: Any = component.load_config() or base
    if model is base and is_path(component.name):

        class Opened(base):  # type: ignore[valid-type,misc]
            model_config = ConfigDict(extra="allow")

        model = Opened
    section: Any = section_of_values(model, values, name="config")
    if not isinstance(section, base):
        raise WrongKindError(f"{component.config} does not extend {base.__module__}.{base.__name__}.")
    return section
