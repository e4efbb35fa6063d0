"""A checkpoint as files of another format, made by the policy backend that wrote it; knows no format but plain folders.

A checkpoint of a run is converted by the backend of its config. A folder of Transformers that no run wrote is converted by the
backend that has the format's name. Where a checkpoint's weights are a folder of Transformers already, `hf` is a copy.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import NotSupportedError, UnknownComponentError, UserError, WrongKindError
from rl_core.interfaces.conversion import Conversion
from rl_core.plugins.component import did_you_mean, is_path
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.checkpoints.damage import damage_error, verify_checkpoint
from rl_train.checkpoints.state import read_state

HF = "hf"
"""The format that every other is made from: config.json and safetensors, as Transformers loads them."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What came of it.

    Attributes:
        output: the folder.
        files: their names in it.
        num_bytes: of all files.
        backend: whose function made them; None where they were copied.
    """

    output: Path
    files: tuple[str, ...]
    num_bytes: int
    backend: str | None


def convert(
    checkpoint: Path,
    output: Path,
    *,
    to: str,
    merge: bool = False,
    model: str | None = None,
    trust: bool = False,
    registry: Registry | None = None,
) -> Converted:
    """Write `checkpoint` to `output` in another format; `output` is whole or absent.

    Args:
        checkpoint: a step folder of a run, or a folder of Transformers.
        output: a folder that does not exist yet, or is empty.
        to: the format.
        merge: fold adapters into the weights that they belong to.
        model: where the model is that the run began from, if it is elsewhere by now.
        trust: run code that the checkpoint's own config names: a policy backend by its path, a model with
            `trust_remote_code`.
        registry: where backends are found; the installed plugins by default.

    Raises:
        CheckpointError: `checkpoint` is not one, or is damaged.
        UserError: `output` is taken, lies in `checkpoint` or cannot be written, or the backend does not write this format.
    """
    registry = registry if registry is not None else Registry(discover())
    source, policy = _source(checkpoint)
    if not trust:
        _refuse_named_code(checkpoint, policy, merge=merge)
        policy = _without_remote_code(policy)
    _refuse_place(output, checkpoint)
    backend = str(policy["backend"]) if policy else to
    conversions = _conversions(registry, backend) if policy else _conversions_of_a_folder(registry, to)
    partial = _partial(output)
    try:
        function = conversions.get(to)
        if function is not None:
            _load(function)(Conversion(source=source, output=partial, policy=policy, merge=merge, model=model))
        elif to == HF and (source / "config.json").is_file():
            shutil.copytree(source, partial, dirs_exist_ok=True)
        else:
            raise _not_written(backend, to, {*conversions, *_copied(source)})
        if output.exists():
            output.rmdir()
        os.replace(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    files = sorted(path for path in output.rglob("*") if path.is_file())
    return Converted(
        output=output,
        files=tuple(str(path.relative_to(output)) for path in files),
        num_bytes=sum(path.stat().st_size for path in files),
        backend=None if function is None else backend,
    )


def _source(checkpoint: Path) -> tuple[Path, Mapping[str, Any]]:
    """The folder of the weights, and the section `policy` of the run that wrote them."""
    if (checkpoint / "config.json").is_file():
        return checkpoint, {}
    state = read_state(checkpoint)
    weights = checkpoint / "policy" / "weights"
    if not weights.is_dir():
        raise damage_error(checkpoint, ["policy/weights: missing"])
    verify_checkpoint(checkpoint, only=["policy/weights"])
    policy = state["config"].get("policy")
    if not isinstance(policy, Mapping) or not isinstance(policy.get("backend"), str):
        raise damage_error(checkpoint, ["state.json: `config.policy.backend` must be the name of a backend"])
    return weights, policy


def _refuse_named_code(checkpoint: Path, policy: Mapping[str, Any], *, merge: bool) -> None:
    """Which code runs is for the user to say, not for a file of the checkpoint."""
    backend = policy.get("backend", "")
    code = None
    if is_path(backend):
        code = f"the class {backend} as its policy backend"
    elif merge and policy != _without_remote_code(policy):
        code = f"the code of the model {policy.get('model_name')} (trust_remote_code)"
    if code is not None:
        raise UserError(
            f"The config in {checkpoint / 'state.json'} names {code}, and converting would run it. If you trust whoever wrote "
            "this checkpoint, add --trust-checkpoint."
        )


def _without_remote_code(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_remote_code(value) if isinstance(value, Mapping) else False if key == "trust_remote_code" else value
        for key, value in section.items()
    }


def _refuse_place(output: Path, checkpoint: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists already. Name a new folder, or remove it first.")
    if output.resolve().is_relative_to(checkpoint.resolve()):
        raise UserError(f"{output} lies in {checkpoint}, which would then hold a copy of itself. Name a folder elsewhere.")


def _partial(output: Path) -> Path:
    """An empty folder beside the output, which gets its name at the end."""
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error}. Name a folder where there can be one.") from error
    return partial


def _conversions_of_a_folder(registry: Registry, to: str) -> Mapping[str, str]:
    """What the backend that has the format's name makes of a folder of Transformers; nothing where that is a copy."""
    if to == HF:
        return {}
    try:
        return _conversions(registry, to)
    except (UnknownComponentError, WrongKindError) as error:
        formats = [HF, *(name for name in registry.names("policy") if name != HF and name in _conversions(registry, name))]
        raise NotSupportedError(
            f"There is no format {to!r}.{did_you_mean(to, formats)} A folder of Transformers converts to: {', '.join(formats)}."
        ) from error


def _conversions(registry: Registry, backend: str) -> Mapping[str, str]:
    policy_class = registry.find("policy", backend).load()
    found: Mapping[str, str] = getattr(policy_class, "checkpoint_conversions", {})
    return found


def _copied(source: Path) -> set[str]:
    return {HF} if (source / "config.json").is_file() else set()


def _load(function: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def _not_written(backend: str, to: str, formats: set[str]) -> NotSupportedError:
    known = sorted(formats)
    return NotSupportedError(
        f"The policy backend {backend!r} does not convert to {to!r}.{did_you_mean(to, known)} It converts to: "
        f"{', '.join(known) or 'nothing'}. Another backend's format is made from a folder of Transformers: convert to {HF!r} "
        "first (with a merge, where adapters were trained), and then that folder."
    )
