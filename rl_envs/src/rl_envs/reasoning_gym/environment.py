"""The environment `reasoning_gym`, which scores an answer with the scorer of its task, and the dataset of its problems."""

from __future__ import annotations

import base64
import hashlib
import logging
import pickle
import threading
from collections.abc import Mapping
from typing import Any

from rl_core.environments import Score, ScorerEnvironment, final_text
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces.records import Record
from rl_envs.completions import read_tagged
from rl_envs.config import ReasoningGymDatasetConfig, ReasoningGymEnvironmentConfig
from rl_envs.generated_dataset import GeneratedDataset
from rl_envs.grading_process import Ending, GradingProcess
from rl_envs.reasoning_gym.tasks import pickled

_log = logging.getLogger("rlcore.reasoning_gym")
_SHOWN_CHARS = 200
SCORE_KEY = "score"
"""Metadata key of the score."""


class ReasoningGymEnvironment(ScorerEnvironment):
    """Rewards an answer with 1.0 if the scorer of its task gives it the full score, else with 0.0.

    With `reward: score`, the reward is the score itself, which many scorers also give to wrong answers.

    A row's metadata contains `task`, `params` and `entry`, as `ReasoningGymDataset` writes them; `step` adds `score`, None if
    the answer made the scorer raise or exceed a limit, which counts as 0.0. Scorers run in a process with limits of CPU time
    and memory, because some evaluate the answer as a Python expression; these do not get answers that could be code. Metrics:
    `accuracy`, the fraction of answers with the full score; `score_mean`; `answered_frac`; `scorer_failed_frac`.

    Args:
        config: `ReasoningGymEnvironmentConfig`, a dict of its keys, or None for its defaults.
    """

    config_class = ReasoningGymEnvironmentConfig
    config: ReasoningGymEnvironmentConfig

    def __init__(self, config: ReasoningGymEnvironmentConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._process = GradingProcess("rl_envs.reasoning_gym.worker")
        self._failed: set[str] = set()
        """Tasks whose scorers have raised."""

    def score(self, text: str, info: Mapping[str, Any]) -> Score:
        """Score an answer.

        Raises:
            DataError: the metadata of the row has no entry of a task.
        """
        answer = read_answer(text, self.config.answer_tag)
        graded = self._grade(answer, info)
        score = None if isinstance(graded, Ending) else graded
        is_full = score is not None and score >= 1.0
        return Score(
            float(is_full) if self.config.reward == "correct" else score or 0.0,
            {
                "accuracy": is_full,
                "score_mean": score or 0.0,
                "answered_frac": answer is not None,
                "scorer_failed_frac": score is None,
            },
            answer=answer,
            metadata={SCORE_KEY: score},
            failure=graded.explain() if isinstance(graded, Ending) and graded.is_failure else None,
        )

    def shutdown(self) -> None:
        self._process.end()

    def _grade(self, answer: str | None, info: Mapping[str, Any]) -> float | Ending | None:
        """The score of an answer; None if the scorer raised, or how its process ended."""
        if not {"task", "params", "entry"} <= info.keys():
            raise DataError(
                "the metadata of `reasoning_gym` needs `task`, `params` and `entry`: use the dataset `reasoning_gym`."
            )
        if answer is None:
            return 0.0
        # The reply is JSON: answers may be hostile.
        row = pickled((info["task"], info["params"], info["entry"]))
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


def read_answer(completion: str, tag: str | None) -> str | None:
    """The text in the last pair of tags, or the whole completion if there is no tag; None if it is missing or blank."""
    answer = final_text(completion)
    if tag is not None:
        answer = read_tagged(answer, tag) or ""
    return answer.strip() or None


class ReasoningGymDataset(GeneratedDataset):
    """Questions of one task. `extra_env_info` has what its scorer needs: `task`, `params` and the `entry`.

    They are generated in a child process with a fixed hash seed, on which the problems of some tasks depend.

    Args:
        config: `ReasoningGymDatasetConfig`, a dict of its keys, or None for its defaults.

    Raises:
        ConfigError: the package is not installed, or the task or one of its settings does not exist.
    """

    config_class = ReasoningGymDatasetConfig
    config: ReasoningGymDatasetConfig

    def __init__(self, config: ReasoningGymDatasetConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._problem(None)

    def generate(self, index: int) -> Record:
        config, entry = self.config, self._problem(index)
        system = [] if config.system_prompt is None else [{"role": "system", "content": config.system_prompt}]
        return {
            "messages": [*system, {"role": "user", "content": entry["question"].strip()}],
            "extra_env_info": {
                "task": config.task,
                "params": config.params,
                "entry": entry,
                "expected_answer": None if entry["answer"] is None else str(entry["answer"]),
            },
            "task_name": config.task_name or "reasoning_gym",
        }

    def _problem(self, index: int | None) -> Any:
        """A problem of the task; without an index, only the settings are checked.

        Raises:
            ConfigError: the task cannot be created.
            DataError: it cannot generate this problem.
        """
        config = self.config
        problem = pickled((config.task, config.params, _generator_seed(config.seed), config.num_samples, index))
        with _one_at_a_time:
            reply = generation.ask({"problem": problem}, timeout_s=_GENERATION_S)
        if not isinstance(reply, Ending) and "config_error" in reply:
            raise ConfigError(reply["config_error"])
        if isinstance(reply, Ending) or "error" in reply:
            why = f"its process ended ({reply.value})" if isinstance(reply, Ending) else reply["error"]
            raise DataError(f"Reasoning Gym cannot generate problem {index} of the task {config.task!r}: {why}")
        return None if index is None else pickle.loads(base64.b64decode(reply["entry"]))


_GENERATION_S = 600.0
"""CPU time in which a task is created and generates a problem, in seconds."""
generation = GradingProcess("rl_envs.reasoning_gym.worker")
_one_at_a_time = threading.Lock()


def _generator_seed(seed: int) -> int:
    """The seed of the task's generator, 31 bits.

    Reasoning Gym generates problem i from `seed + i`. Problem i of seed 1 would be problem i + 1 of seed 0, so that validation
    data of another seed would be training data. Hashed seeds are far apart.
    """
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest()) >> 1
