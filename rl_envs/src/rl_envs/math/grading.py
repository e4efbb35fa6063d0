"""Grades answers in a few processes that can be killed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from queue import SimpleQueue
from typing import Any

from rl_envs.grading_process import Ending, GradingProcess
from rl_envs.math.asked_form import ANY_FORM, AskedForm

_MODULE = "rl_envs.math.worker"


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
            self._processes = [GradingProcess(_MODULE) for _ in range(self._num_processes)]
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
