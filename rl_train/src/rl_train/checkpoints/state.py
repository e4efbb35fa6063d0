"""Saves and restores the state of a run: models, step, data position and config."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rl_core.errors import CheckpointError, NonFiniteError
from rl_core.interfaces.policy import TrainableInterface
from rl_train.checkpoints.disk_space import check_disk_space
from rl_train.checkpoints.inputs import ComparedConfig
from rl_train.checkpoints.manifest import damage_error, read_state, verify_checkpoint
from rl_train.checkpoints.published_files import carry_over_config, carry_over_tokenizer
from rl_train.checkpoints.store import CheckpointStore
from rl_train.training_checks.gradients import check_equal_ranks


class Stateful(Protocol):
    """An object with state that a resume must restore, as JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class HasFiles(Protocol):
    """An object that also has state in files of the checkpoint."""

    def save_files(self, folder: Path) -> None: ...

    def load_files(self, folder: Path, *, config_changed: bool = False) -> None: ...


@dataclass(kw_only=True)
class Checkpoints:
    """Saves and restores a run.

    Attributes:
        store: the step folders.
        models: the trained models, by the name of their folders: `policy` and companion models.
        parts: other objects with state, by name.
        config: the config and what it refers to, saved with the weights.
        save_optimizer: whether checkpoints can be resumed.
        tokenizer: saved with the weights, so that the folder is a complete model.
        model_names: names of the published models that are trained, by the keys of `models`.
        schedule_lengths: optimizer steps of the learning-rate schedules that follow the length of the run, by model.
        free_memory_for: called with each model before it is saved or loaded, see `Run.free_memory_for`.
        restored: the state of the checkpoint that was restored; empty if there is none.
    """

    store: CheckpointStore
    models: Mapping[str, TrainableInterface]
    parts: Mapping[str, Stateful]
    config: ComparedConfig
    save_optimizer: bool
    tokenizer: Any
    model_names: Mapping[str, str] = field(default_factory=dict)
    schedule_lengths: Mapping[str, int] = field(default_factory=dict)
    free_memory_for: Callable[[object], None] = lambda _: None
    restored: Mapping[str, Any] = field(default_factory=dict, init=False)
    _algorithm_state: dict[str, Stateful] = field(default_factory=dict, init=False)

    def keep(self, name: str, component: Stateful) -> None:
        """Save additional state of the algorithm in each checkpoint, and restore it if a checkpoint was restored.

        It is unchanged if the checkpoint does not contain it, because that was written with another config.
        """
        self._algorithm_state[name] = component
        if name in (found := self.restored.get("algorithm", {})):
            component.load_state_dict(found[name])

    def check_disk_space(self, *, num_saves: int) -> None:
        """Compare the free space with the size of the run's checkpoints; call it before the first step.

        Args:
            num_saves: number of checkpoints that the run writes.

        Raises:
            DiskFullError: there is no space for one checkpoint.
        """
        models = (model for model in self.models.values() if isinstance(model, TrainableInterface))
        size = sum(model.checkpoint_bytes(optimizer=self.save_optimizer) for model in models)
        at_once = max(1, min(num_saves, self.store.most_at_once - len(self.store.steps())))
        check_disk_space(self.store.folder, checkpoint_bytes=size, most_at_once=at_once)

    def try_save(self) -> None:
        """Write what a checkpoint has apart from weights and optimizer states, and remove it; call it before the first step.

        Raises:
            CheckpointWriteError: it cannot be written.
        """
        self.store.try_write(lambda folder: self._fill(folder, 0, is_trial=True))

    def save(self, step: int, metrics: Mapping[str, float]) -> Path:
        """Write the checkpoint of `step` steps done.

        Raises:
            NonFiniteError: a weight or optimizer state is NaN or infinite; nothing was written or deleted.
            BrokenPromiseError: ranks that hold the same weights differ; nothing was written or deleted.
            CheckpointWriteError: the disk is full, or cannot be written to; what was written is removed.
        """
        self._check_finite(step)
        self._check_ranks(step)
        return self.store.write(step, lambda folder: self._fill(folder, step), metrics)

    def _check_finite(self, step: int) -> None:
        for name, model in self.models.items():
            # A model that only has the methods of its interface is not checked.
            tensor_name = model.find_non_finite() if isinstance(model, TrainableInterface) else None
            if tensor_name is None:
                continue
            last = self.store.latest()
            lower = f"a lower learning rate (`{name}.optimizer.kwargs.lr`)"
            advice = (
                f"The last checkpoint with finite weights is {last}: continue from it with {lower}, --resume {last} and "
                "--allow-config-change."
                if last is not None
                else f"There is no earlier checkpoint: start again with {lower}."
            )
            raise NonFiniteError(
                f"After step {step} the tensor {tensor_name} of `{name}` has NaN or infinite values, so its checkpoint was not "
                f"written. {advice}"
            )

    def _check_ranks(self, step: int) -> None:
        for name, model in self.models.items():
            if isinstance(model, TrainableInterface):
                check_equal_ranks(model.weight_samples(whole=True), f"After step {step}", f"`{name}`")

    def _fill(self, folder: Path, step: int, *, is_trial: bool = False) -> None:
        for name, model in self.models.items():
            weights = folder / name / "weights"
            weights.mkdir(parents=True)
            if not is_trial:
                self.free_memory_for(model)
                model.save_checkpoint(weights, folder / name / "optimizer" if self.save_optimizer else None)
            elif isinstance(model, TrainableInterface):
                model.try_save(weights)
            if name in self.model_names:
                carry_over_config(weights, model=self.model_names[name])
            carry_over_tokenizer(self.tokenizer, weights)
        state = {
            "step": step,
            "resumable": self.save_optimizer,
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "algorithm": {name: part.state_dict() for name, part in self._algorithm_state.items()},
            "config": self.config.values,
            "inputs": dict(self.config.inputs),
            "schedule_lengths": dict(self.schedule_lengths),
        }
        (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        for name, part in self.parts.items():
            if isinstance(part, HasFiles):
                part.save_files(folder / name)

    def changes(self) -> str:
        """One line per change of the config, or of what it refers to, since the restored checkpoint was written."""
        return self.config.described_changes(self.restored)

    def restore(self, checkpoint: Path, *, allow_config_change: bool = False, verify: bool = True) -> int:
        """Restore the run from `checkpoint`.

        Args:
            checkpoint: the step folder.
            allow_config_change: as `resumable_state`.
            verify: first compare the files with their digests; not needed after `resumable_state`.

        Returns:
            Steps done.

        Raises:
            CheckpointError: it is damaged, only has weights, or belongs to another config.
        """
        state = resumable_state(checkpoint, self.config, allow_config_change=allow_config_change, verify=verify)
        for name, model in self.models.items():
            self.free_memory_for(model)
            model.load_checkpoint(checkpoint / name / "weights", checkpoint / name / "optimizer")
        changed = bool(self.config.described_changes(state))
        for name, part in self.parts.items():
            _load_part(part, name, state, checkpoint)
            if isinstance(part, HasFiles):
                part.load_files(checkpoint / name, config_changed=changed)
        self.restored = state
        for name, part in self._algorithm_state.items():
            self.keep(name, part)
        return int(state["step"])


def resumable_state(
    checkpoint: Path, config: ComparedConfig, *, allow_config_change: bool = False, verify: bool = True
) -> dict[str, Any]:
    """The state of a checkpoint that a run with this config can resume; does not need the run itself.

    Args:
        checkpoint: the step folder.
        config: the config of the run.
        allow_config_change: accept a checkpoint that was written with another config.
        verify: compare all of its files with their digests.

    Raises:
        CheckpointError: it is damaged, only has weights, or belongs to another config.
    """
    state = read_state(checkpoint)
    if not state["resumable"]:
        raise CheckpointError(
            f"{checkpoint} only has weights (checkpointing.save_optimizer was false), so it cannot be resumed. "
            f"Start a new run from the weights: policy.model_name={checkpoint / 'policy' / 'weights'}"
        )
    config.refuse_changes(checkpoint, state, allow=allow_config_change)
    if verify:
        verify_checkpoint(checkpoint)
    return state


def _load_part(part: Stateful, name: str, state: Mapping[str, Any], checkpoint: Path) -> None:
    try:
        part.load_state_dict(state["parts"][name])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"state.json: `parts.{name}` cannot be restored: {type(error).__name__}: {error}"
        raise damage_error(checkpoint, [problem]) from error
