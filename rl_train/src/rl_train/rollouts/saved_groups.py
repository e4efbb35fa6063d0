"""Finished groups of rollouts in a checkpoint, so that a resumed run trains on them instead of sampling them again.

`groups.json` has everything but the tensors: each is replaced by its position in `groups.safetensors`, which has one tensor for
each dtype, in which all tensors of that dtype follow each other. Log-probabilities are therefore exact.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rl_train.rollouts.trajectory import Trajectory

_JSON, _TENSORS = "groups.json", "groups.safetensors"
_TENSOR = "$tensor"
_log = logging.getLogger("rlcore")


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """A group whose rollouts have ended and that is in no batch yet."""

    ordinal: int
    """The prompt's number."""
    began: int
    """The step of the weights with which it began."""
    accepted: bool
    """Whether it was counted and selected; otherwise, the next batch does it."""
    rows: list[Trajectory]
    """Its G rollouts."""


def save_groups(folder: Path, groups: Sequence[FinishedGroup], limits: Mapping[str, Any]) -> None:
    """Write groups to a folder; nothing without any.

    A group whose metadata are not JSON is left out with a warning: a resumed run samples it again.

    Args:
        folder: created if necessary.
        groups: the groups.
        limits: what the schedule that began the groups depends on.
    """
    tensors, saved = _Tensors(), []
    for group in groups:
        try:
            content = [{each.name: tensors.put(getattr(row, each.name)) for each in fields(row)} for row in group.rows]
            is_exact = json.loads(json.dumps(content)) == content
        except (TypeError, ValueError):
            is_exact = False
        if is_exact:
            saved.append({"ordinal": group.ordinal, "began": group.began, "accepted": group.accepted, "rows": content})
    if len(saved) < len(groups):
        _log.warning(
            "%d of %d finished groups are not in the checkpoint, because their metadata are not JSON values; a resumed run "
            "samples them again.",
            len(groups) - len(saved),
            len(groups),
        )
    if saved:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _JSON).write_text(json.dumps({"limits": dict(limits), "groups": saved}), encoding="utf-8")
        save_file(tensors.joined(), folder / _TENSORS)


def load_groups(folder: Path, limits: Mapping[str, Any]) -> list[FinishedGroup]:
    """The groups in a folder; none if it has none, or if they were saved with other limits, so that they may be too many.

    Args:
        folder: of `save_groups`.
        limits: those of the resumed run.
    """
    if not (folder / _JSON).is_file():
        return []
    content = json.loads((folder / _JSON).read_text(encoding="utf-8"))
    if content["limits"] != dict(limits):
        _log.info("the finished groups of the checkpoint are sampled again, because the settings of rollouts have changed")
        return []
    tensors = load_file(folder / _TENSORS)
    return [
        FinishedGroup(
            ordinal=group["ordinal"],
            began=group["began"],
            accepted=group["accepted"],
            rows=[Trajectory(**_restored(row, tensors)) for row in group["rows"]],
        )
        for group in content["groups"]
    ]


@dataclass
class _Tensors:
    """Tensors [n] joined by dtype."""

    _parts: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)

    def put(self, value: Any) -> Any:
        """The value, in which each tensor is replaced by `{"$tensor": [dtype, start, stop]}`."""
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            start = self._sizes.get(dtype, 0)
            self._sizes[dtype] = start + value.numel()
            self._parts.setdefault(dtype, []).append(value)
            return {_TENSOR: [dtype, start, self._sizes[dtype]]}
        if isinstance(value, Mapping):
            return {key: self.put(each) for key, each in value.items()}
        return [self.put(each) for each in value] if isinstance(value, list) else value

    def joined(self) -> dict[str, torch.Tensor]:
        return {dtype: torch.cat(parts) for dtype, parts in self._parts.items()}


def _restored(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            dtype, start, stop = value[_TENSOR]
            return tensors[dtype][start:stop].clone()
        return {key: _restored(each, tensors) for key, each in value.items()}
    return [_restored(each, tensors) for each in value] if isinstance(value, list) else value
