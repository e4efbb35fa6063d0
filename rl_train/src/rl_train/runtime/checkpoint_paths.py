"""Which weights a path means: a step folder of a run, a run folder, or a folder of Hugging Face; loads none of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rl_core.errors import CheckpointError
from rl_train.checkpoints.damage import damage_error, verify_checkpoint
from rl_train.checkpoints.manifest import read_manifest
from rl_train.checkpoints.state import read_state
from rl_train.checkpoints.store import CheckpointStore
from rl_train.runtime.run_provenance import CONFIG

MODEL_FILE = "config.json"
"""What every folder of Hugging Face has."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPaths:
    """Where a policy's weights are."""

    path: Path
    """The step folder, or the model's folder."""
    step: int | None
    """Steps that they have seen; None of a model."""
    run_folder: Path | None
    """The run that wrote them; None of a model, or where the checkpoint was moved out of its run."""

    @property
    def is_checkpoint(self) -> bool:
        """Whether the policy reads them with `load_checkpoint`."""
        return self.step is not None

    @property
    def weights(self) -> Path:
        """The policy's own part."""
        return self.path / "policy" / "weights" if self.is_checkpoint else self.path


def find_weights(path: Path, *, best: bool = False) -> CheckpointPaths:
    """The weights that `path` means; of a run folder the newest.

    Args:
        path: a step folder, a run folder, a folder of step folders, or a model's folder.
        best: of a run folder, those that its `checkpointing.metric_name` ranks first.

    Raises:
        CheckpointError: there are none; says what is there instead.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is no folder. Name a step folder (runs/NAME/checkpoints/step_000010), a run folder (runs/NAME) or a "
            "model's folder; a GGUF file is named by policy.model_name=FILE."
        )
    path = path.resolve()
    if path.suffix == ".partial":
        raise CheckpointError(f"{path} was not written to its end. Take another step folder beside it.")
    if path.name.startswith("step_") or (path / "manifest.json").is_file():
        if best:
            raise CheckpointError(
                f"{path} is one checkpoint, so there is no best of it. Name its run folder, or leave --best out."
            )
        return _of_step(path)
    store = _store_in(path)
    if store is not None and store.steps():
        return _of_step(_best(store) if best else store.find(store.steps()[-1]))
    if (path / MODEL_FILE).is_file():
        if best:
            raise CheckpointError(f"{path} is a model and no run folder, so there is no best of it. Leave --best out.")
        return CheckpointPaths(path=path, step=None, run_folder=None)
    there = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    what = "holds no complete checkpoint" if store is not None else "is neither a checkpoint, a run folder nor a model"
    raise CheckpointError(
        f"{path} {what} (it holds {there}). A step folder has a manifest.json, a run folder has checkpoints/step_*, and a "
        f"model has a {MODEL_FILE}."
    )


def _of_step(path: Path) -> CheckpointPaths:
    state = read_state(path)
    verify_checkpoint(path, only=["policy/weights"])
    run_folder = path.parent.parent if path.parent.name == "checkpoints" else None
    return CheckpointPaths(path=path, step=int(state["step"]), run_folder=run_folder)


def _store_in(path: Path) -> CheckpointStore | None:
    """The checkpoints of a run folder, wherever its config keeps them, or of a folder that holds step folders itself."""
    if (path / "checkpoints").is_dir():
        return CheckpointStore(path / "checkpoints")
    if (path / CONFIG).is_file():
        config = yaml.safe_load((path / CONFIG).read_text(encoding="utf-8"))
        elsewhere = config.get("checkpointing", {}).get("checkpoint_dir") if isinstance(config, dict) else None
        return CheckpointStore(Path(elsewhere) if elsewhere else path / "checkpoints")
    return CheckpointStore(path) if CheckpointStore(path).steps() else None


def _best(store: CheckpointStore) -> Path:
    newest = store.find(store.steps()[-1])
    section: Any = read_state(newest)["config"].get("checkpointing")
    if not isinstance(section, dict) or not {"metric_name", "higher_is_better"} <= section.keys():
        raise damage_error(newest, ["state.json: `config.checkpointing` has no `metric_name` and `higher_is_better`"])
    name = section["metric_name"]
    if name is None:
        raise CheckpointError(
            f"The run of {store.folder} ranks its checkpoints by no metric (checkpointing.metric_name), so none is the best. "
            "Leave --best out for the newest, or name a step folder."
        )
    sign = 1.0 if section["higher_is_better"] else -1.0
    found = {step: read_manifest(store.find(step))["metrics"].get(name, math.nan) for step in store.steps()}
    ranked = sorted((sign * value, step) for step, value in found.items() if not math.isnan(value))
    if not ranked:
        raise CheckpointError(
            f"No checkpoint in {store.folder} has {name}: validation was due at none of their steps. "
            "Leave --best out for the newest, or name a step folder."
        )
    return store.find(ranked[-1][1])
