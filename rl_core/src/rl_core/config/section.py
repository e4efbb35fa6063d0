"""Base class of all config sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from rl_core.config.source_tree import KeyPath

if TYPE_CHECKING:
    from rl_core.config.schema import RunConfig


class Section(BaseModel):
    """A section of the config: keyword-only, frozen, and closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )


class ComponentSection(Section):
    """Section of a component, which may add its own checks."""

    def conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        """Checks the section against the rest of the run: each wrong key, relative to this section, and the reason.

        `rlcore validate` calls it, so it must not import torch, ray, numpy or transformers.
        """
        yield from ()

    def deep_conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        """Like `conflicts`, but may import torch and read a tokenizer or a model's config; it must not load weights.

        `rlcore validate --deep` calls it. A `UserError` that it raises is reported at the key that its message names.
        """
        yield from ()
