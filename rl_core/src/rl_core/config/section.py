"""Base class of all config sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, ConfigDict

from rl_core.config.source_tree import KeyPath
from rl_core.plugins.component import did_you_mean

if TYPE_CHECKING:
    from rl_core.config.schema import ClusterConfig, EnvironmentConfig, PolicyConfig


class Section(BaseModel):
    """A section of the config: keyword-only, frozen, and closed to unknown keys. `section["key"]` is `section.key`."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )

    def __contains__(self, key: object) -> bool:
        return key in type(self).model_fields

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(f"{type(self).__name__} has no key {key!r}.{did_you_mean(key, [*type(self).model_fields])}")
        return getattr(self, key)


class RunSections(Protocol):
    """The sections of a run that a component's checks read; each attribute has the name of its section."""

    @property
    def algorithm_name(self) -> str:
        """Name of the algorithm."""

    @property
    def algorithm(self) -> Any:
        """The algorithm's section of the config; its `needs_generation` is true if it trains on rollouts."""

    @property
    def policy(self) -> PolicyConfig: ...

    @property
    def value(self) -> PolicyConfig | None: ...

    @property
    def teacher(self) -> PolicyConfig | None: ...

    @property
    def data(self) -> Any: ...

    @property
    def env(self) -> dict[str, EnvironmentConfig]: ...

    @property
    def cluster(self) -> ClusterConfig: ...

    @property
    def model_fields_set(self) -> set[str]:
        """Names of the sections that the config sets."""


class ComponentSection(Section):
    """Section of a component, which may add its own checks."""

    def conflicts(self, run: RunSections) -> Iterator[tuple[KeyPath, str]]:
        """Checks the section against the rest of the run: each wrong key, relative to this section, and the reason.

        `rlcore validate` calls it, so it must not import torch, ray, numpy or transformers.
        """
        yield from ()

    def deep_conflicts(self, run: RunSections) -> Iterator[tuple[KeyPath, str]]:
        """Like `conflicts`, but may import torch and read a tokenizer or a model's config; it must not load weights.

        `rlcore validate --deep` calls it. A `UserError` that it raises is reported at the key that its message names.
        """
        yield from ()
