"""All that a resume needs beside the policy's own files: the step, the data position, and the config it belongs to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rl_core.errors import CheckpointError, NonFiniteError
from rl_core.interfaces.trainable import TrainableInterface
from rl_train.checkpoints.config_changes import refuse_changes
from rl_train.checkpoints.damage import damage_error, read_checked_state, verify_checkpoint
from rl_train.checkpoints.disk_space import check_disk_space
from rl_train.checkpoints.store import CheckpointStore


class Stateful(Protocol):
    """What has a position that a resume must restore; JSON only."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(kw_only=True)
class Checkpoints:
    """Saves and restores a run.

    Attributes:
        store: the step folders.
        models: what is trained, by the name of its folder: `policy`, and what is trained beside it.
        parts: what else has a position, by name.
        config: the resolved config, kept beside the weights.
        algorithm: the section that holds the algorithm's keys.
        save_optimizer: whether a checkpoint can be resumed.
        tokenizer: written beside the weights, so that the folder is a model of its own.
        schedule_lengths: optimizer steps of the learning-rate schedules that follow the length of the run, by model.
    """

    store: CheckpointStore
    models: Mapping[str, TrainableInterface]
    parts: Mapping[str, Stateful]
    config: Mapping[str, Any]
    algorithm: str
    save_optimizer: bool
    tokenizer: Any
    schedule_lengths: Mapping[str, int] = field(default_factory=dict)
    _kept: dict[str, Stateful] = field(default_factory=dict, init=False)
    _found: Mapping[str, dict[str, Any]] = field(default_factory=dict, init=False)

    def keep(self, name: str, part: Stateful) -> None:
        """Save a part of the algorithm's own from now on, and bring it to where a checkpoint that was restored left it.

        A checkpoint that knows nothing of it was written under another config, and the part is left as it is.
        """
        self._kept[name] = part
        if name in self._found:
            part.load_state_dict(self._found[name])

    def check_disk_space(self, *, num_saves: int) -> None:
        """Compare the free space with what the run's checkpoints need; call it before the first step.

        Args:
            num_saves: how many checkpoints the run writes.

        Raises:
            DiskFullError: not one fits.
        """
        models = (model for model in self.models.values() if isinstance(model, TrainableInterface))
        size = sum(model.checkpoint_bytes(optimizer=self.save_optimizer) for model in models)
        at_once = max(1, min(num_saves, self.store.most_at_once - len(self.store.steps())))
        check_disk_space(self.store.folder, checkpoint_bytes=size, most_at_once=at_once)

    def save(self, step: int, metrics: Mapping[str, float]) -> Path:
        """Write the checkpoint of `step` steps done.

        Raises:
            NonFiniteError: a weight or the optimizer's state is NaN or infinite; nothing was written or deleted.
            CheckpointWriteError: the disk is full, or cannot be written to; what was written is removed.
        """
        self._refuse_non_finite(step)
        return self.store.write(step, lambda folder: self._fill(folder, step), metrics)

    def _refuse_non_finite(self, step: int) -> None:
        for name, model in self.models.items():
            # A model that is given by its interface's methods alone is not checked.
            found = model.find_non_finite() if isinstance(model, TrainableInterface) else None
            if found is None:
                continue
            last = self.store.latest()
            lower = f"a lower learning rate (`{name}.optimizer.kwargs.lr`)"
            ahead = (
                f"The last checkpoint with finite weights is {last}: continue from it with {lower}, --resume {last} and "
                "--allow-config-change."
                if last is not None
                else f"There is no earlier checkpoint: start again with {lower}."
            )
            raise NonFiniteError(
                f"After step {step} the tensor {found} of `{name}` has NaN or infinite values, so its checkpoint was not "
                f"written. {ahead}"
            )

    def _fill(self, folder: Path, step: int) -> None:
        for name, model in self.models.items():
            weights = folder / name / "weights"
            weights.mkdir(parents=True)
            model.save_checkpoint(weights, folder / name / "optimizer" if self.save_optimizer else None)
            self.tokenizer.save_pretrained(weights)
        state = {
            "step": step,
            "resumable": self.save_optimizer,
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "algorithm": {name: part.state_dict() for name, part in self._kept.items()},
            "config": self.config,
            "schedule_lengths": dict(self.schedule_lengths),
        }
        (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")

    def restore(self, checkpoint: Path, *, allow_config_change: bool = False, verify: bool = True) -> int:
        """Bring the run to where `checkpoint` left it.

        Args:
            checkpoint: the step folder.
            allow_config_change: as `resumable_state`.
            verify: compare the files with their digests first; a caller of `resumable_state` has done so.

        Returns:
            Steps done.

        Raises:
            CheckpointError: it is damaged, holds weights alone, or belongs to another config.
        """
        state = resumable_state(checkpoint, self.config, self.algorithm, allow_config_change=allow_config_change, verify=verify)
        for name, model in self.models.items():
            model.load_checkpoint(checkpoint / name / "weights", checkpoint / name / "optimizer")
        for name, part in self.parts.items():
            _load_part(part, name, state, checkpoint)
        self._found = state.get("algorithm", {})
        for name, part in self._kept.items():
            if name in self._found:
                part.load_state_dict(self._found[name])
        step: int = state["step"]
        return step


def resumable_state(
    checkpoint: Path,
    config: Mapping[str, Any],
    algorithm: str,
    *,
    allow_config_change: bool = False,
    verify: bool = True,
) -> dict[str, Any]:
    """The state of a checkpoint that a run of this config can continue from; it needs no part of the run.

    Args:
        checkpoint: the step folder.
        config: the resolved config.
        algorithm: the section that holds the algorithm's keys.
        allow_config_change: take it although it was written under another config.
        verify: compare all of its files with their digests.

    Raises:
        CheckpointError: it is damaged, holds weights alone, or belongs to another config.
    """
    state = read_state(checkpoint)
    if not state["resumable"]:
        raise CheckpointError(
            f"{checkpoint} holds weights alone (checkpointing.save_optimizer was false), so training cannot go on from "
            f"it. Start a new run from the weights: policy.model_name={checkpoint / 'policy' / 'weights'}"
        )
    refuse_changes(checkpoint, state["config"], config, algorithm, allow=allow_config_change)
    if verify:
        verify_checkpoint(checkpoint)
    return state


def _load_part(part: Stateful, name: str, state: Mapping[str, Any], checkpoint: Path) -> None:
    try:
        part.load_state_dict(state["parts"][name])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"state.json: `parts.{name}` cannot be restored: {type(error).__name__}: {error}"
        raise damage_error(checkpoint, [problem]) from error


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The state of a complete checkpoint; its other files are not compared with their digests.

    Raises:
        CheckpointError: it is not a complete checkpoint, or its state is damaged.
    """
    return read_checked_state(checkpoint)
