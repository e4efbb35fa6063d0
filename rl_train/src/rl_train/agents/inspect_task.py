"""The agent `inspect`: the solver and the scorers of an Inspect task run each rollout.

Imported by the interpreter that runs the agent, which has inspect-ai.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser, GenerateConfig, get_model

from rl_core.errors import ConfigError, RLCoreError
from rl_core.plugins.import_path import resolve
from rl_train.rewards.config import InspectConfig

_DISPLAY: Any = os.environ.get("INSPECT_DISPLAY", "none")
_ONE_AT_A_TIME = threading.Lock()
"""Inspect runs one evaluation per process at a time."""
_WORDS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""Texts that Inspect reads as numbers."""
_ROLES = {"system": ChatMessageSystem, "user": ChatMessageUser, "assistant": ChatMessageAssistant}


class InspectTaskError(RLCoreError):
    """The task failed, or its scorers gave no score."""


def solve(
    *,
    base_url: str,
    api_key: str,
    model: str,
    messages: Sequence[Mapping[str, Any]],
    metadata: Mapping[str, Any],
    config: Mapping[str, Any],
) -> dict[str, float] | None:
    """Run the task on a row, whose prompt is the input of its only sample.

    Returns:
        The scores by the names of the scorers (and the keys of a score that has several), without those that are not scored;
        None if none is.

    Raises:
        ConfigError: `task` does not return an Inspect task.
        InspectTaskError: The task failed, or gave no score, or one that is not a number.
    """
    settings: InspectConfig = InspectConfig.model_validate(config)
    task = resolve(settings.task, key="task")(**settings.task_args)
    if not isinstance(task, Task):
        raise ConfigError(f"{settings.task} returned a {type(task).__name__}, not a Task of inspect_ai.", key="task")
    if unknown := sorted({str(one["role"]) for one in messages} - _ROLES.keys()):
        raise InspectTaskError(f"a prompt has messages of the role {', '.join(unknown)}: use {', '.join(_ROLES)}")
    given = [_ROLES[one["role"]](content=one["content"]) for one in messages]
    target = str(metadata.get(settings.target_key, ""))
    task.dataset = MemoryDataset([Sample(input=list(given), target=target, metadata=dict(metadata))])
    endpoint = get_model(
        f"openai-api/rlcore/{model}",
        base_url=base_url,
        api_key=api_key,
        memoize=False,
        strict_tools=False,  # the endpoint has no constrained decoding
        config=GenerateConfig(max_retries=0),
    )
    with _ONE_AT_A_TIME, tempfile.TemporaryDirectory() as folder:
        [log] = evaluate(task, model=endpoint, log_dir=folder, log_level="error", display=_DISPLAY)
        if log.error is not None or not log.samples:
            raise InspectTaskError(f"the task {settings.task} failed: {log.error.message if log.error else 'it has no sample'}")
        scores = {name: score.value for name, score in (log.samples[0].scores or {}).items()}
    if not scores:
        raise InspectTaskError(f"the task {settings.task} gave no score: it needs a scorer")
    parts = [(name, value) for scorer, score in scores.items() for name, value in _parts(scorer, score)]
    numbers = {name: _number(name, value) for name, value in parts}
    return {name: number for name, number in numbers.items() if not math.isnan(number)} or None  # NaN: not scored


def _parts(scorer: str, score: Any) -> list[tuple[str, Any]]:
    """The values of a score by name."""
    if isinstance(score, Mapping):
        return [(f"{scorer}_{key}", value) for key, value in score.items()]
    return [(f"{scorer}_{n}", value) for n, value in enumerate(score)] if isinstance(score, list) else [(scorer, score)]


def _number(name: str, value: Any) -> float:
    word = _WORDS.get(value, _WORDS.get(value.lower(), value)) if isinstance(value, str) else value
    try:
        return float(word)
    except (TypeError, ValueError):
        words = ", ".join(_WORDS)
        raise InspectTaskError(f"the score {name} is {value!r:.80}: expected a number or one of {words}") from None
