"""The section `lora` of policies that train low-rank adapters, and the layers that it names. Does not import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import Field, model_validator

from rl_backends_base.adapter_folder import ALL_LINEAR, SAVED_NAMES, AdapterFolder, matching
from rl_core.config.schema import Section
from rl_core.config.section import NAME_OR_PATH
from rl_core.data.model_digests import safetensors_header
from rl_core.errors import UserError
from rl_core.plugins.component import did_you_mean

_OTHER_NAMES: Final = {
    **{other: key for key, other in SAVED_NAMES.items() if other != key},
    "dim": "rank",
    "lora_dropout": "dropout",
    "lora_adapter_path": "adapter_path",
}
"""Names used by peft and others that a spelling suggestion would not find."""


class AdapterConfig(Section):
    """Low-rank adapters (LoRA): train small matrices added to frozen linear layers instead of all weights."""

    adapter_path: Annotated[str | None, NAME_OR_PATH] = None
    """Adapter folder in peft's format, or its `NAME@REVISION` on the hub, whose adapter is trained further. Keys that decide
    what the adapter computes (`rank`, `alpha`, `target_modules` and so on) are read from it if they are not set. By default,
    training starts from the base model."""
    rank: int = Field(default=16, ge=1)
    """Rank of the adapters: the number of rows of A and columns of B in W + scale * B A. Called `r` in peft."""
    alpha: int = Field(default=32, ge=1)
    """Numerator of the scale, alpha / rank. Called `lora_alpha` in peft."""
    target_modules: str | list[str] = ALL_LINEAR
    """Linear layers to adapt: a list of names or name suffixes (`[q_proj, v_proj]`), a regular expression for full names, or
    `all-linear`, which means all except the LM head."""
    exclude_modules: str | list[str] | None = None
    """Layers among `target_modules` to exclude; names or a regular expression, as in `target_modules`."""
    use_rslora: bool = False
    """Whether to use the scale alpha / sqrt(rank), so that large ranks learn as fast as small ones."""
    seed: int = 0
    """Seed of the random initial matrix of each adapter."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key in _OTHER_NAMES:
                raise ValueError(f"`{key}` is called `{_OTHER_NAMES[key]}` here")
            if key == "enabled":
                raise ValueError("there is no `enabled`: the section itself enables LoRA, and `lora: null` disables it")
        if isinstance(given, dict) and isinstance(given.get("adapter_path"), str) and not SAVED_NAMES.keys() <= given.keys():
            with suppress(UserError):  # reported by the checks of the config
                saved = AdapterFolder(given["adapter_path"]).settings()
                return {**{key: value for key, value in saved.items() if key in cls.model_fields}, **given}
        return given

    @model_validator(mode="after")
    def _check_target_modules(self) -> Self:
        if not self.target_modules:
            raise ValueError(f"target_modules is empty, so nothing would be trained: name layers, or use {ALL_LINEAR!r}")
        return self

    def problems(self, model_name: str, *, head: str) -> Iterator[tuple[str, str]]:
        """Why the adapters do not fit a local model or the folder that training continues from, each by key.

        Of names, only the last component is compared with the model's files, because Transformers may load weights under a
        longer name. Regular expressions are matched against full names, which requires loading the model: see `rlcore validate
        --deep`.

        Args:
            model_name: `policy.model_name`.
            head: head type of the model.
        """
        if self.adapter_path is not None:
            yield from AdapterFolder(self.adapter_path).problems(self.model_dump(), model_name=model_name, head=head)
        for key, wanted in (("target_modules", self.target_modules), ("exclude_modules", self.exclude_modules)):
            if isinstance(wanted, str):
                try:
                    re.compile(wanted)
                except re.error as error:
                    yield key, f"{wanted!r} is not a regular expression: {error}."
                continue
            modules = _module_names(model_name) if wanted else None
            for name in wanted or ():
                if modules is not None and name.rpartition(".")[2] not in modules:
                    yield (
                        key,
                        f"{name!r} matches no layer of {model_name}.{did_you_mean(name, sorted(modules))} Its layers with "
                        f"weights: {', '.join(sorted(modules))}.",
                    )


def matching_names(
    wanted: str | Sequence[str], names: Iterable[str], linear: Iterable[str], *, section: str, key: str, hint: str = ""
) -> set[str]:
    """The names that peft would match, each given name or expression at least one.

    Args:
        wanted: the list or the expression.
        names: the names of all modules.
        linear: those of the linear layers, for the error.
        section: the section of the adapters, such as `policy.hf_cfg.lora`.
        key: the key in it, such as `target_modules`.
        hint: what else the model has, at the end of an error.

    Raises:
        UserError: a name or the expression matches nothing, or the expression is invalid.
    """
    if isinstance(wanted, str):
        try:
            re.compile(wanted)
        except re.error as error:
            raise UserError(
                f"`{section}.{key}`: {wanted!r} is not a regular expression: {error}.", key=f"{section}.{key}"
            ) from error
        if not (found := matching(wanted, names)):
            how = "as a regular expression for full module names "
            raise _no_match_error(wanted, set(linear), at=f"{section}.{key}", how=how, hint=hint)
        return found
    found_by_name = {each: matching([each], names) for each in wanted}
    for each in (each for each, found in found_by_name.items() if not found):
        raise _no_match_error(each, set(linear), at=f"{section}.{key}", how="", hint=hint)
    return set().union(*found_by_name.values())


def _no_match_error(wanted: str, linear: set[str], *, at: str, how: str, hint: str) -> UserError:
    ends = sorted({name.rpartition(".")[2] for name in linear})
    return UserError(
        f"`{at}`: {wanted!r} {how}matches no module of the model.{did_you_mean(wanted, ends)} Its linear "
        f"layers are {', '.join(ends)} (one is {sorted(linear)[0]}).{hint}"
        if linear
        else f"`{at}`: the model has no linear layer except its head.{hint}",
        key=at,
    )


def nothing_left_error(section: str) -> UserError:
    """The error of a section that excludes all that it names."""
    return UserError(
        f"`{section}`: exclude_modules excludes all modules of target_modules, so nothing would be trained.", key=section
    )


def _module_names(model_name: str) -> set[str] | None:
    """Last components of the names of all modules with weights or submodules; None if the files do not contain names."""
    names = _weight_names(model_name)
    if names is None:
        return None
    components = {component for name in names for component in name.split(".")[:-1]}
    return {component for component in components if not component.isdigit()}


def _weight_names(name_or_path: str) -> set[str] | None:
    """The names of the weights in the safetensors files of a model folder; None if there are no readable ones."""
    folder = Path(name_or_path).expanduser()
    try:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        return {name for name in safetensors_header(folder / "model.safetensors") if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError):
        return None
