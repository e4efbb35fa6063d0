"""Converts checkpoints to other formats with the policy backend that wrote them.

A run's checkpoint is converted by the backend in its config. Any other Transformers model folder is converted by the backend
with the name of the format. If a checkpoint's weights are already a Transformers model folder, `hf` copies it. The format with
the name of the backend is what it saved, unless it names a function.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import CheckpointError, NotSupportedError, UnknownComponentError, UserError, WrongKindError
from rl_core.interfaces.conversion import Conversion
from rl_core.plugins.component import did_you_mean, is_path
from rl_core.plugins.import_path import resolve
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.checkpoints.manifest import damage_error, read_state, verify_checkpoint
from rl_train.checkpoints.published_files import carry_over_config, copy_files, tokenizer_code
from rl_train.run_folders.checkpoint_paths import check_model, copy_model, left_out, needed_code, other_base

HF = "hf"
"""The format that all other formats are made from: config.json and safetensors, as Transformers loads them."""


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    """The result of a conversion.

    Attributes:
        output: the folder.
        files: their names in it.
        num_bytes: of all files.
        backend: the backend that wrote them; None if they were copied.
        left_out: files and folders next to the weights that were not copied.
        needed_code: those of them without which the model or its tokenizer cannot be loaded.
        tokenizer: import path of a tokenizer that is code; its files were copied, but Transformers cannot load it.
    """

    output: Path
    files: tuple[str, ...]
    num_bytes: int
    backend: str | None
    left_out: tuple[str, ...] = ()
    needed_code: tuple[str, ...] = ()
    tokenizer: str | None = None


def convert(
    checkpoint: Path,
    output: Path,
    *,
    to: str,
    merge: bool = False,
    adapter: bool = False,
    model: str | None = None,
    trust: bool = False,
    allow_config_change: bool = False,
    registry: Registry | None = None,
) -> ConversionResult:
    """Write `checkpoint` to `output` in another format; `output` is complete or absent.

    Args:
        checkpoint: a step folder of a run, or a Transformers model folder.
        output: a folder that does not exist yet, or is empty.
        to: the format.
        merge: merge adapters into the base weights.
        adapter: require a checkpoint of adapters, which are written unmerged.
        model: current path of the base model, if it was moved.
        trust: allow code that the checkpoint's config names: a policy backend given by its path, or a model with
            `trust_remote_code`.
        allow_config_change: merge although the base weights are not those of the run.
        registry: used to look up backends; the installed plugins by default.

    Raises:
        CheckpointError: `checkpoint` is not a checkpoint, or is corrupt; or adapters would be merged into other weights.
        UserError: `output` exists, is inside `checkpoint` or cannot be written, the backend does not support the format, or
            there is no adapter.
    """
    if adapter and merge:
        raise UserError("--adapter writes only the adapter, and --merge a full model. Use one of them.")
    registry = registry if registry is not None else Registry(discover())
    source, policy = _source(checkpoint)
    if adapter and not (source / "adapter_config.json").is_file():
        raise UserError(f"{checkpoint} contains the weights of a full model and no adapter. Convert it without --adapter.")
    if not trust:
        _reject_untrusted_code(checkpoint, policy, merge=merge)
        policy = _without_remote_code(policy)
    if merge and not allow_config_change and (problem := other_base(checkpoint, model or str(policy.get("model_name")))):
        raise CheckpointError(
            f"{problem} Merged, they would give a wrong model. Restore the model, give the path of a copy with --model, or "
            "merge anyway with --allow-config-change."
        )
    _check_output(output, checkpoint)
    backend = str(policy["backend"]) if policy else to
    conversions = _conversions(registry, backend) if policy else _conversions_of_a_folder(registry, to)
    partial = _partial(output)
    try:
        function = conversions.get(to)
        if function is not None:
            if to == HF:
                check_model(source)
            fill = resolve(function, key=f"{backend}.checkpoint_conversions")
            fill(Conversion(source=source, output=partial, policy=policy, merge=merge, model=model))
            if merge or not policy:
                carry_over_config(partial, model=str(model or policy.get("model_name") or source))
        else:
            copied = ([HF] if _is_of_transformers(source) else []) + ([backend] if policy else [])
            if to not in copied:
                raise _unsupported_format(backend, to, {*copied, *conversions}, source)
            _copy(source, partial, to)
        tokenizer, tokenizer_files = tokenizer_code(source)
        copy_files(source, partial, tokenizer_files)
        if output.exists():
            output.rmdir()
        os.replace(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    files = sorted(path for path in output.rglob("*") if path.is_file())
    return ConversionResult(
        output=output,
        files=tuple(str(path.relative_to(output)) for path in files),
        num_bytes=sum(path.stat().st_size for path in files),
        backend=None if function is None else backend,
        left_out=tuple(name for name in left_out(source) if not (output / name).exists()),
        needed_code=needed_code(source) if to == HF else (),
        tokenizer=tokenizer,
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


def _copy(source: Path, output: Path, to: str) -> None:
    """Copy a model of Transformers, whose files are checked; or, in the own format of a backend, all that it has saved."""
    if to == HF:
        copy_model(source, output)
    else:
        shutil.copytree(source, output, dirs_exist_ok=True)


def _is_of_transformers(folder: Path) -> bool:
    """Whether a folder has a config.json of Transformers; that of another library names neither model type nor class."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True  # damaged, which is reported when it is copied
    return not isinstance(content, dict) or not content.keys().isdisjoint(("model_type", "architectures", "auto_map"))


def _reject_untrusted_code(checkpoint: Path, policy: Mapping[str, Any], *, merge: bool) -> None:
    """Reject code that is named by a file of the checkpoint and not by the user."""
    backend = policy.get("backend", "")
    code = None
    if is_path(backend):
        code = f"the class {backend} as its policy backend"
    elif merge and policy != _without_remote_code(policy):
        code = f"the code of the model {policy.get('model_name')} (trust_remote_code)"
    if code is not None:
        raise UserError(
            f"The config in {checkpoint / 'state.json'} names {code}, and converting would run it. If you trust the author "
            "of this checkpoint, add --trust-checkpoint."
        )


def _without_remote_code(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_remote_code(value) if isinstance(value, Mapping) else False if key == "trust_remote_code" else value
        for key, value in section.items()
    }


def _check_output(output: Path, checkpoint: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} already exists. Give a new folder, or remove it first.")
    if output.resolve().is_relative_to(checkpoint.resolve()):
        raise UserError(
            f"{output} is inside {checkpoint}, which would then contain a copy of itself. Give a folder outside it."
        )


def _partial(output: Path) -> Path:
    """An empty folder next to the output, which is renamed to it at the end."""
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error}. Give a folder in a writable location.") from error
    return partial


def _conversions_of_a_folder(registry: Registry, to: str) -> Mapping[str, str]:
    """Conversions of a Transformers model folder by the backend named like the format; empty if it is only copied."""
    if to == HF:
        return {}
    try:
        return _conversions(registry, to)
    except (UnknownComponentError, WrongKindError) as error:
        formats = [HF, *(name for name in registry.names("policy") if name != HF and name in _conversions(registry, name))]
        raise NotSupportedError(
            f"There is no format {to!r}.{did_you_mean(to, formats)} A Transformers model folder can be converted to: "
            f"{', '.join(formats)}."
        ) from error


def _conversions(registry: Registry, backend: str) -> Mapping[str, str]:
    policy_class = registry.find("policy", backend).load()
    conversions: Mapping[str, str] = getattr(policy_class, "checkpoint_conversions", {})
    return conversions


def _unsupported_format(backend: str, to: str, formats: set[str], source: Path) -> NotSupportedError:
    supported = sorted(formats)
    if HF in formats:
        advice = f"For the format of another backend, first convert to {HF!r} (with --merge if adapters were trained), then "
        advice += "convert that folder."
    else:
        advice = f"Its weights are not in Hugging Face format: {source} has no config.json of Transformers. A backend names "
        advice += "its conversions in `checkpoint_conversions` (docs/convert.md)."
    return NotSupportedError(
        f"The policy backend {backend!r} does not convert to {to!r}.{did_you_mean(to, supported)} It converts to: "
        f"{', '.join(supported) or 'nothing'}. {advice}"
    )
