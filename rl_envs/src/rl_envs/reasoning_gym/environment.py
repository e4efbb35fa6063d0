"""The environment `reasoning_gym`: scores an answer with the scorer of its task."""

from __future__ import annotations

import base64
import logging
import pickle
from collections.abc import Mapping
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message
from rl_envs.completions import final_text
from rl_envs.config import read_section
from rl_envs.grading_process import Ending, GradingProcess
from rl_envs.reasoning_gym.config import ReasoningGymEnvironmentConfig
from rl_envs.single_turn import ended

_log = logging.getLogger("rlcore.reasoning_gym")
_SHOWN_CHARS = 200
SCORE_KEY = "score"
"""Metadata key of the score."""


class ReasoningGymEnvironment(EnvironmentInterface):
    """Rewards an answer with 1.0 if the scorer of its task gives it the full score, else with 0.0.

    With `reward: score`, the reward is the score itself, which many scorers also give to wrong answers.

    A row's metadata contains `task`, `params` and `entry`, as `ReasoningGymDataset` writes them; `step` adds `score`, None if
    the answer made the scorer raise or exceed a limit, which counts as 0.0. Scorers run in a process with limits of CPU time
    and memory, because some evaluate the answer as a Python expression; these do not get answers that could be code.

    Args:
        config: `ReasoningGymEnvironmentConfig`, a dict of its keys, or None for its defaults.
    """

    def __init__(self, config: ReasoningGymEnvironmentConfig | Mapping[str, Any] | None = None) -> None:
        self.config = read_section(ReasoningGymEnvironmentConfig, config)
        self._process = GradingProcess("rl_envs.reasoning_gym.worker")
        self._failed: set[str] = set()
        """Tasks whose scorers have raised."""

    def step(self, message_log_batch: list[list[Message]], metadata: list[Any]) -> EnvironmentReturn:
        """Score B answers.

        Raises:
            DataError: the metadata of a row has no entry of a task.
        """
        answers = [read_answer(str(log[-1]["content"]), self.config.answer_tag) for log in message_log_batch]
        results = [self._score(answer, info) for answer, info in zip(answers, metadata, strict=True)]
        scores = [None if isinstance(each, Ending) else each for each in results]
        return ended(
            [self._reward(score) for score in scores],
            [{**info, SCORE_KEY: score} for info, score in zip(metadata, scores, strict=True)],
            answers=answers,
            failures=[each.explain() if isinstance(each, Ending) and each.is_failure else None for each in results],
        )

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """`accuracy`: fraction of answers with the full score; `score_mean`; `answered_frac`; `scorer_failed_frac`."""
        scores = [info[SCORE_KEY] for info in batch["extra_env_info"]]
        rows = len(scores)
        return batch, {
            "accuracy": sum(map(_is_full, scores)) / rows,
            "score_mean": sum(score or 0.0 for score in scores) / rows,
            "answered_frac": sum(answer is not None for answer in batch["answers"]) / rows,
            "scorer_failed_frac": sum(score is None for score in scores) / rows,
        }

    def _reward(self, score: float | None) -> float:
        return float(_is_full(score)) if self.config.reward == "correct" else score or 0.0

    def shutdown(self) -> None:
        self._process.end()

    def _score(self, answer: str | None, info: Any) -> float | Ending | None:
        """The score of an answer; None if the scorer raised, or how its process ended."""
        if not isinstance(info, Mapping) or not {"task", "params", "entry"} <= info.keys():
            raise DataError(
                "The metadata of a row of `reasoning_gym` needs `task`, `params` and `entry`: use the dataset `reasoning_gym`."
            )
        if answer is None:
            return 0.0
        # Pickled, because JSON would change tuples and keys that are numbers. The reply is JSON: answers may be hostile.
        row = base64.b64encode(pickle.dumps((info["task"], info["params"], info["entry"]))).decode("ascii")
        request = {"row": row, "answer": answer, "expected_answer": info.get("expected_answer")}
        reply = self._process.ask(request, timeout_s=self.config.timeout_s)
        if isinstance(reply, Ending):
            return reply
        if "config_error" in reply:
            raise ConfigError(reply["config_error"])
        if "error" in reply:
            self._warn(info["task"], reply["error"], answer)
        score: float | None = reply.get("score")
        return score

    def _warn(self, task: str, error: str, answer: str) -> None:
        """Log the first failure of a task's scorer."""
        if task not in self._failed:
            self._failed.add(task)
            _log.warning(
                "reasoning_gym: the scorer of %s raised %s for the answer %r; it counts as 0.0. Later failures of this task "
                "are only counted (`scorer_failed_frac`).",
                task,
                error,
                answer[:_SHOWN_CHARS],
            )


def _is_full(score: float | None) -> bool:
    return score is not None and score >= 1.0


def read_answer(completion: str, tag: str | None) -> str | None:
    """The text in the last pair of tags, or the whole completion if there is no tag; None if it is missing or blank."""
    completion = final_text(completion)
    if tag is not None:
        opening, closing = f"<{tag}>", f"</{tag}>"
        before = completion.rpartition(closing)[0].rpartition(opening)  # a search for pairs could take quadratic time
        completion = before[2].partition(closing)[0] if before[1] else ""
    return completion.strip() or None
