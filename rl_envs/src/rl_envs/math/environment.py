"""The environment `math`: reward 1.0 if the final answer equals the expected one, which a few killable processes decide."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from queue import SimpleQueue
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.environments import Score, ScorerEnvironment, final_text
from rl_core.errors import DataError
from rl_core.interfaces.environment import Conversation
from rl_core.interfaces.records import plain_text
from rl_envs.config import MathEnvironmentConfig
from rl_envs.grading_process import Ending, GradingProcess
from rl_envs.math.asked import ANY_FORM, AskedForm, asked_form

ANSWER_KEYS = ("expected_answer", "ground_truth")
"""Metadata keys of the expected answer; the first one found is used."""
LONGEST_COMPLETION = 100_000
"""Number of characters at the end that are read for the final answer."""
_ENOUGH_ROWS = 16
"""Number of completions without a box, in the first steps, after which missing boxes are reported."""
_log = logging.getLogger("rlcore.math")


class MathEnvironment(ScorerEnvironment):
    r"""Compares final answers symbolically: `\boxed{\frac12}` is right if `0.5` is expected. See `docs/math.md`.

    Each row's metadata contains `expected_answer` (or `ground_truth`). `step` adds `grading`, the outcome of the comparison:
    `right`, `wrong`, `unevaluated`, `unreadable`, `no_answer`, `timeout`, `failed` or `not_graded` (the row fails); and
    `boxed`, whether the answer was in a box. Grading processes start at the first `step`.

    Args:
        config: `MathEnvironmentConfig`, a dict of its keys, or None for its defaults. `num_workers` is the
            number of environment workers; each has `num_processes` grading processes.
    """

    config_class = MathEnvironmentConfig
    config: MathEnvironmentConfig

    def __init__(self, config: MathEnvironmentConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._pool = GradingPool(
            num_processes=self.config.num_processes,
            timeout_s=self.config.timeout_s,
            require_box=self.config.require_box,
            allow_unevaluated=self.config.allow_unevaluated,
        )
        self._rows_without_box = 0

    def score_batch(self, message_log_batch: list[Conversation], metadata: list[Any]) -> list[Score]:
        """Compare B answers: 1.0 or 0.0.

        Raises:
            DataError: A row's metadata has no expected answer.
        """
        questions = [
            Question(
                expected=_expected_answer(row, info),
                completion=final_text(log[-1]["content"])[-LONGEST_COMPLETION:],
                form=asked_form(_question(log)),
            )
            for row, (log, info) in enumerate(zip(message_log_batch, metadata, strict=True))
        ]
        results = self._pool.grade(questions)
        self._report_missing_boxes(message_log_batch, results)
        return [
            Score(
                float(result.outcome is Outcome.RIGHT),
                answer=result.answer,
                metadata={"grading": result.outcome.value, "boxed": result.boxed},
                reply="correct" if result.outcome is Outcome.RIGHT else "incorrect",
                failure=result.failure,
            )
            for result in results
        ]

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """`accuracy`, and the fractions of the other outcomes.

        `boxed_frac` is the fraction of rows with a box. `accuracy`, `wrong_frac`, `unevaluated_frac`, `unreadable_frac`, the
        rows without an answer (1 - `answered_frac`), `timeouts` and `failures` sum to 1; the last two are reported as counts.
        """
        outcomes = [info["grading"] for info in batch["extra_env_info"]]
        metrics: dict[str, float | int] = {
            "accuracy": outcomes.count(Outcome.RIGHT) / len(outcomes),
            "boxed_frac": sum(info["boxed"] for info in batch["extra_env_info"]) / len(outcomes),
            "answered_frac": 1.0 - outcomes.count(Outcome.NO_ANSWER) / len(outcomes),
        }
        for outcome in (Outcome.WRONG, Outcome.UNEVALUATED, Outcome.UNREADABLE):
            metrics[f"{outcome.value}_frac"] = outcomes.count(outcome) / len(outcomes)
        metrics["timeouts"] = outcomes.count(Outcome.TIMEOUT)
        metrics["failures"] = outcomes.count(Outcome.FAILED)
        return batch, metrics

    def _report_missing_boxes(self, conversations: list[Conversation], results: Sequence[GradingResult]) -> None:
        """Warn once if no completion has a box and the prompts do not ask for one: every reward would be 0."""
        if not self.config.require_box or self._rows_without_box >= _ENOUGH_ROWS:
            return
        asks_for_box = any("\\boxed" in plain_text(message["content"]) for log in conversations for message in log[:-1])
        if asks_for_box or any(result.boxed for result in results):
            self._rows_without_box = _ENOUGH_ROWS
            return
        self._rows_without_box += len(results)
        if self._rows_without_box >= _ENOUGH_ROWS:
            _log.warning(
                "math: none of %d answers has a \\boxed{}, and their prompts do not ask for one, so all rewards are 0. "
                "Ask for it (data.train.prompt: generic/math), or set env.<task>.require_box: false to grade other answers.",
                self._rows_without_box,
            )

    def process_ids(self) -> list[int]:
        """Process ids of the running grading processes."""
        return self._pool.process_ids()

    def shutdown(self) -> None:
        self._pool.shutdown()


def _question(log: Conversation) -> str:
    """The user's last message before the answer; empty without one."""
    return next((plain_text(message["content"]) for message in reversed(log[:-1]) if message["role"] == "user"), "")


def _expected_answer(row: int, info: Any) -> str:
    for key in ANSWER_KEYS:
        if isinstance(info, Mapping) and info.get(key) is not None:
            expected = info[key]
            if isinstance(expected, str | int | float):
                return str(expected)
            raise DataError(f"{key} of row {row} is a {type(expected).__name__}: write the answer as text, such as '1/2'.")
    keys = sorted(info) if isinstance(info, Mapping) else type(info).__name__
    raise DataError(
        f"Row {row} has no expected answer: its metadata has {keys}, but the environment needs {' or '.join(ANSWER_KEYS)}."
    )


class Outcome(StrEnum):
    """The outcome of one comparison."""

    RIGHT = "right"
    WRONG = "wrong"
    UNEVALUATED = "unevaluated"
    """The answer has unevaluated arithmetic: `3 + 2` for 5."""
    UNREADABLE = "unreadable"
    """The answer is neither a formula that can be parsed nor the expected text."""
    NO_ANSWER = "no_answer"
    """There is no box or an empty one; without `require_box`, no number or formula either."""
    TIMEOUT = "timeout"
    FAILED = "failed"
    """The comparison raised an exception or crashed its process twice (the expression is too deep or too large)."""
    NOT_GRADED = "not_graded"
    """The grading process was killed from outside or did not run. The row fails."""


_OUTCOMES = {
    None: Outcome.NO_ANSWER,
    "EQUAL": Outcome.RIGHT,
    "UNEVALUATED": Outcome.UNEVALUATED,
    "UNREADABLE": Outcome.UNREADABLE,
    "DIFFERENT": Outcome.WRONG,
}


@dataclass(frozen=True)
class Question:
    """What is graded.

    Attributes:
        expected: The expected answer.
        completion: The model's text.
        form: What the question says about the form of the answer.
    """

    expected: str
    completion: str
    form: AskedForm = ANY_FORM


@dataclass(frozen=True, kw_only=True)
class GradingResult:
    """The outcome of a comparison and the extracted answer."""

    outcome: Outcome
    answer: str | None = None
    boxed: bool = False
    """Whether the answer was in a box."""
    failure: str | None = None
    """Why the answer was not graded, for `not_graded`."""


class GradingPool:
    """A pool of grading processes, started when first needed and replaced when they end.

    Args:
        num_processes: Number of processes; each runs one comparison at a time.
        timeout_s: CPU time limit of one comparison, in seconds; when it expires, only its process is killed.
        require_box: Grade only boxed answers.
        allow_unevaluated: Accept unevaluated arithmetic.
    """

    def __init__(self, *, num_processes: int, timeout_s: float, require_box: bool, allow_unevaluated: bool = False) -> None:
        self._num_processes = num_processes
        self._request = {"require_box": require_box, "allow_unevaluated": allow_unevaluated}
        self._timeout_s = timeout_s
        self._idle: SimpleQueue[GradingProcess] | None = None
        self._processes: list[GradingProcess] = []

    def grade(self, questions: Sequence[Question]) -> list[GradingResult]:
        """Results in the order of `questions`; equal questions are graded once.

        Raises:
            WorkerDiedError: A grading process cannot be started.
        """
        distinct = list(dict.fromkeys(questions))
        if not distinct:
            return []
        idle = self._started()
        with ThreadPoolExecutor(min(self._num_processes, len(distinct)), thread_name_prefix="grade") as threads:
            results = list(threads.map(lambda question: self._grade_one(question, idle), distinct))
        result_of = dict(zip(distinct, results, strict=True))
        return [result_of[question] for question in questions]

    def process_ids(self) -> list[int]:
        """Process ids of the running processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def shutdown(self) -> None:
        """End all processes; a later `grade` starts new ones."""
        self._idle = None
        for process in self._processes:
            process.end()
        self._processes = []

    def _started(self) -> SimpleQueue[GradingProcess]:
        if self._idle is None:
            self._processes = [GradingProcess("rl_envs.math.answers") for _ in range(self._num_processes)]
            self._idle = SimpleQueue()
            for process in self._processes:
                self._idle.put(process)
        return self._idle

    def _grade_one(self, question: Question, idle: SimpleQueue[GradingProcess]) -> GradingResult:
        process = idle.get()
        request = {**asdict(question), **self._request}
        try:
            return _result(process.ask(request, timeout_s=self._timeout_s))
        finally:
            idle.put(process)


def _result(found: dict[str, Any] | Ending) -> GradingResult:
    if isinstance(found, Ending):
        if found.is_failure:
            return GradingResult(outcome=Outcome.NOT_GRADED, failure=found.explain())
        return GradingResult(outcome=Outcome.TIMEOUT if found is Ending.CPU_LIMIT else Outcome.FAILED)
    if "error" in found:
        return GradingResult(outcome=Outcome.FAILED)
    return GradingResult(outcome=_OUTCOMES[found["comparison"]], answer=found["answer"], boxed=found["boxed"])
