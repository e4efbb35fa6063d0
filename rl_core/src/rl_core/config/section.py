"""Base class of all config sections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from rl_core.config.source_tree import KeyPath
from rl_core.plugins.component import did_you_mean


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


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices that a component runs on, from which it derives defaults.

    Attributes:
        use_gpus: whether it runs on GPUs.
        trains: whether a run trains on them, so that policy and engine share them.
        have_bfloat16: whether they are GPUs that all compute in bfloat16.
    """

    use_gpus: bool
    trains: bool = False
    have_bfloat16: bool = False


class ComponentSection(Section):
    """Section of a component, which may add its own checks."""

    def for_devices(self, devices: Devices) -> Self:
        """This section with the values of keys that are null, if their defaults depend on the devices."""
        return self

    def conflicts(self, run: Any) -> Iterator[tuple[KeyPath, str]]:
        """Checks the section against the rest of the run: each wrong key, relative to this section, and the reason.

        `run` has the sections of `rl_core.config.schema.RunSections`. The section of a policy backend is checked for the
        policy, the value model and the teacher alike; `run.policy is self` tells which of them it is.

        `rlcore validate` calls it, so it must not import torch, ray, numpy or transformers.
        """
        yield from ()

    def deep_conflicts(self, run: Any) -> Iterator[tuple[KeyPath, str]]:
        """Like `conflicts`, but may import torch and read a tokenizer or a model's config; it must not load weights.

        `rlcore validate --deep` calls it. A `UserError` that it raises is reported at the key that its message names.
        """
        yield from ()
