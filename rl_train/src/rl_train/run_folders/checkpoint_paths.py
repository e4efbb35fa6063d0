"""Finds the weights at a path: a step folder, a run folder or a Transformers model folder, which is checked as data.

Weights are not loaded, and no code of a model runs.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.config.policy_sections import PolicyConfig
from rl_core.config.section import model_files
from rl_core.data.loaded_model import check_files
from rl_core.data.model_digests import base_weights, path_digests, recorded_base, weights_digest
from rl_core.errors import CheckpointError
from rl_core.plugins.component import did_you_mean
from rl_train.checkpoints.inputs import input_changes, inputs_in
from rl_train.checkpoints.manifest import damage_error, read_manifest, read_state, verify_checkpoint
from rl_train.checkpoints.published_files import copy_files, tokenizer_code
from rl_train.checkpoints.store import CheckpointStore
from rl_train.run_folders.run_folder import CHECKPOINTS, CONFIG, recorded_checkpoint_dir

_log = logging.getLogger("rlcore")
MODEL_FILE = "config.json"
"""A file that every Hugging Face model folder has."""
_WEIGHTS = (".safetensors", ".pth", ".pt", ".bin")
"""Suffixes of weights: a model that Transformers does not have needs no `config.json`, and its backend checks the folder."""
_CODE_KEY = "auto_map"
_CONFIGS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


@dataclass(frozen=True, kw_only=True)
class CheckpointPaths:
    """Location of a policy's weights."""

    path: Path
    """The step folder, or the model's folder."""
    step: int | None
    """Training steps of the checkpoint; None for a model."""
    run_folder: Path | None
    """The run that wrote them; None for a model, or if the checkpoint was moved out of its run."""

    @property
    def is_checkpoint(self) -> bool:
        """Whether the policy reads them with `load_checkpoint`."""
        return self.step is not None

    @property
    def weights(self) -> Path:
        """The folder of the weights."""
        return self.path / "policy" / "weights" if self.is_checkpoint else self.path

    def policy_to_load(self, policy: PolicyConfig) -> PolicyConfig:
        """The section of the policy that reads this checkpoint, whose model is not a GGUF file, which takes a minute to read.

        The checkpoint itself replaces the file, unless it has only an adapter. Logs a warning if the model is not the one that
        the adapter was trained on.
        """
        if self.is_checkpoint and (problem := other_base(self.path, policy.model_name)):
            _log.warning("%s The results are those of a model that was never trained. Restore the model.", problem)
        if not self.is_checkpoint or not policy.model_name.endswith(".gguf") or not (self.weights / MODEL_FILE).is_file():
            return policy
        return policy.model_copy(update={"model_name": str(self.weights)})


def other_base(checkpoint: Path, base: str) -> str | None:
    """Why a model is not the one that the adapters of a checkpoint were trained on; None if it is, or it has no adapters."""
    key = "policy.model_name"
    has_adapters = not (checkpoint / "policy" / "weights" / MODEL_FILE).is_file() and not (checkpoint / MODEL_FILE).is_file()
    if not has_adapters:
        return None
    then, now = inputs_in(read_state(checkpoint)).get(key, {}), path_digests(base)
    changes = input_changes({key: base_weights(then)}, {key: base_weights(now)}).get(key)
    if not then.keys() & now.keys():  # such as the commit of the hub and the tensors of a copy
        saved, here = _recorded_base(checkpoint / "policy" / "weights"), weights_digest(base)
        changes = f"their digest is {here} instead of {saved}" if None not in (saved, here) and saved != here else None
    return (
        None
        if changes is None
        else f"The adapters of {checkpoint} were trained on other weights than {base} has now: {changes}."
    )


def _recorded_base(weights: Path) -> str | None:
    with suppress(OSError, ValueError):  # reported when the weights are loaded
        return recorded_base(weights)
    return None


def find_weights(path: Path, *, best: bool = False) -> CheckpointPaths:
    """The weights at `path`: for a run folder, the newest.

    Args:
        path: a step folder, a run folder, a folder of step folders, or a model's folder.
        best: for a run folder, the checkpoint that its `checkpointing.metric_name` ranks first.

    Raises:
        CheckpointError: there are none, and the message lists what is there; or the newest is damaged.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder. Give a step folder (runs/NAME/checkpoints/step_000010), a run folder (runs/NAME) or a "
            "model folder. For a GGUF file, set policy.model_name=FILE."
        )
    path = path.resolve()
    if path.suffix == ".partial":
        raise CheckpointError(f"{path} is incomplete. Use another step folder of the run.")
    if path.name.startswith("step_") or (path / "manifest.json").is_file():
        if best:
            raise CheckpointError(
                f"{path} is a single checkpoint, so --best does not apply. Give its run folder, or remove --best."
            )
        return _of_step(path)
    store = _store_in(path)
    newest = store.latest_undamaged() if store is not None else None
    if store is not None and newest is not None:
        return _of_step(_best(store, newest) if best else newest)
    if (path / MODEL_FILE).is_file() or (store is None and any(each.suffix in _WEIGHTS for each in path.iterdir())):
        if best:
            raise CheckpointError(f"{path} is a model, not a run folder, so --best does not apply. Remove --best.")
        return CheckpointPaths(path=path, step=None, run_folder=None)
    entries = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    what = "has no complete checkpoint" if store is not None else "is neither a checkpoint, a run folder nor a model"
    raise CheckpointError(
        f"{path} {what} (it contains: {entries}). Pass a step folder (which has a manifest.json), a run folder "
        f"(checkpoints/step_*) or a model folder ({MODEL_FILE})."
    )


def step_folder(path: Path, *, best: bool = False) -> Path:
    """The newest or best step folder of a run folder, or of a folder of step folders; any other path itself.

    Raises:
        CheckpointError: The run has no checkpoint, or the newest is damaged; or `best` does not apply.
    """
    if best:
        return find_weights(path, best=True).path
    is_step = path.name.startswith("step_") or (path / "manifest.json").is_file()
    if is_step or not path.is_dir() or (path / MODEL_FILE).is_file():
        return path
    store = _store_in(path)
    return path if store is None else store.latest_undamaged() or find_weights(path).path


def _of_step(path: Path) -> CheckpointPaths:
    state = read_state(path)
    verify_checkpoint(path, only=["policy/weights"])
    run_folder = path.parent.parent if path.parent.name == CHECKPOINTS else None
    return CheckpointPaths(path=path, step=int(state["step"]), run_folder=run_folder)


def _store_in(path: Path) -> CheckpointStore | None:
    """The checkpoints of a run folder, also in its `checkpoint_dir`, or those in a folder of step folders."""
    if (path / CHECKPOINTS).is_dir():
        return CheckpointStore(path / CHECKPOINTS)
    if (path / CONFIG).is_file():
        return CheckpointStore(Path(recorded_checkpoint_dir(path) or path / CHECKPOINTS))
    return CheckpointStore(path) if CheckpointStore(path).named_steps() else None


def _best(store: CheckpointStore, newest: Path) -> Path:
    section: Any = read_state(newest)["config"].get("checkpointing")
    if not isinstance(section, dict) or not {"metric_name", "higher_is_better"} <= section.keys():
        raise damage_error(newest, ["state.json: `config.checkpointing` has no `metric_name` and `higher_is_better`"])
    name = section["metric_name"]
    if name is None:
        raise CheckpointError(
            f"The run of {store.folder} does not set checkpointing.metric_name, so its checkpoints are not ranked. "
            "Remove --best to use the newest, or give a step folder."
        )
    sign = 1.0 if section["higher_is_better"] else -1.0
    metrics = {step: read_manifest(store.find(step))["metrics"] for step in store.named_steps()}
    ranked = sorted((sign * found[name], step) for step, found in metrics.items() if name in found)
    if not ranked:
        recorded = sorted({metric for found in metrics.values() for metric in found})
        ran = any(metric.startswith("validation/") for metric in recorded)
        why = "" if ran else " Validation did not run at any of their steps."
        raise CheckpointError(
            f"No checkpoint in {store.folder} has the metric {name} (checkpointing.metric_name).{why}"
            f"{did_you_mean(name, recorded)} Remove --best to use the newest, or give a step folder."
        )
    return store.find(ranked[-1][1])


def copy_model(source: Path, output: Path) -> None:
    """Copy weights, config, tokenizer and templates.

    Raises:
        CheckpointError: tensors are missing, have other shapes than the model of the config, or cannot be read.
    """
    check_model(source)
    copy_files(source, output, model_files(source))


def check_model(folder: Path) -> None:
    """Compare the tensors with the model of the config: see `check_files`.

    Raises:
        CheckpointError: tensors are missing, have another shape, or cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    weights = [folder / name for name in model_files(folder) if name.endswith(".safetensors")]
    if not weights:
        raise CheckpointError(
            f"{folder} has no weights in safetensors files. Other formats, such as pickles, are not converted."
        )
    for path in weights:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is incomplete or corrupt: {error}. Restore it from a copy.") from error
    try:
        check_files(str(folder), error=CheckpointError, use_safetensors=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged config or index raises anything
        raise CheckpointError(f"{folder} is not a complete model: {type(error).__name__}: {error}") from error


def left_out(source: Path) -> tuple[str, ...]:
    """Names of files and folders in a model folder that are not copied: documentation, pickles, code."""
    copied = {Path(name).parts[0] for name in (*model_files(source), *tokenizer_code(source)[1])}
    return tuple(sorted(entry.name for entry in source.iterdir() if entry.name not in copied))


def needed_code(source: Path) -> tuple[str, ...]:
    """Python files in a model folder to which its configs refer: model or tokenizer cannot be loaded without them."""
    modules = {reference.partition(".")[0] for name in _CONFIGS for reference in _references(source / name)}
    return tuple(sorted(path.name for path in source.glob("*.py") if modules & {entry.stem for entry in source.glob("*.py")}))


def _references(config: Path) -> list[str]:
    """The classes of a config's own code, as `module.Class`; those of other repositories are left out."""
    try:
        content: Any = json.loads(config.read_text(encoding="utf-8"))
        values = content.get(_CODE_KEY, {}).values()
    except (OSError, ValueError, AttributeError):
        return []
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [item for item in flat if isinstance(item, str) and "--" not in item]
