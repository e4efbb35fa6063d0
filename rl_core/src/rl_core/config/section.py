"""Base class of all config sections, and the check of template variables that several sections share."""

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


_RESERVED = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs",
    "tools", "truncation",
)  # fmt: skip


def check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The variables, if they are valid.

    Raises:
        ValueError: A name is reserved or is not an identifier, or a value is not plain YAML.
    """
    for name, value in kwargs.items():
        if name in _RESERVED:
            raise ValueError(f"{name!r} is set by rlcore for every conversation: remove it")
        if not name.isidentifier():
            raise ValueError(f"{name!r} cannot be a template variable: use letters, digits and underscores")
        _check_value(name, value)
    return kwargs


def _check_value(name: str, value: Any) -> None:
    if isinstance(value, dict) and (odd := [key for key in value if not isinstance(key, str)]):
        raise ValueError(f"{name!r} has the key {odd[0]!r}: keys must be text")
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_value(name, inner)
    elif not (value is None or isinstance(value, str | bool | int | float)) or value in (float("inf"), float("-inf")):
        raise ValueError(f"{name!r} is {value!r}: expected text, a number, true, false, null, or lists and mappings of them")
