"""Answers that should be rewarded, and answers that should not: the checks of rewards in `rlcore check env`."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.records import plain_text
from rl_core.testing.environments.checks import WRONG_ANSWERS, EnvironmentTrial, TrialRow
from rl_core.testing.promises import Found
from rl_train.diagnostics.diagnosis import Diagnosis, DiagnosisStatus
from rl_train.rewards.environment import FunctionEnvironment
from rl_train.rewards.functions import BATCH_ARGUMENTS, ROW_ARGUMENTS
from rl_train.rollouts.environment_pool import EnvironmentPool
from rl_train.rollouts.records import EXPECTED_KEYS, expected_answer
from rl_train.workbench.play import repeated_answers

ANSWER_FORMS = ("{0}", "\\boxed{{{0}}}", "<answer>{0}</answer>", "Prediction: {0}", "The answer is {0}.")
"""Forms of the expected answer; an environment may accept only one."""
_NUMBERS = ("0", "1", "-1", "2", "10", "nan", "inf", "1e999")
_WORDS = ("True", "False", "yes", "no", "A", "B", "None", "[]", "{}", ".", "Score: 10", " ".join(100 * "a"))
CONSTANTS = (*_NUMBERS, *_WORDS)
"""Answers that do not depend on the problem."""
_NEAR_MISSES: Mapping[str, Callable[[str, str], str]] = {
    "ANSWER or OTHER": lambda answer, other: f"{answer} or {other}",
    "OTHER, ANSWER": lambda answer, other: f"{other}, {answer}",
    "not ANSWER": lambda answer, other: f"not {answer}",
    "-ANSWER": lambda answer, other: f"-{answer}",
    "ANSWER plus 1": lambda answer, other: re.sub(r"-?\d{1,15}", lambda number: str(int(number.group()) + 1), answer, count=1),
}
"""Answers that are nearly right, from the expected answer and that of another row."""
_MOST = 0.5
"""Fraction of problems above which a wrong answer fails the check."""
_NOTED = 0.3
"""Mean reward of a constant answer, relative to that of expected answers, above which it is noted."""
_COINCIDENCE = 0.05
"""Mean reward of other rows' answers, above the least of them and relative to that of expected answers, that is noted."""
_SHOWN_CHARS = 30


def answer_checks(trial: EnvironmentTrial, environment: EnvironmentInterface) -> Iterator[Diagnosis]:
    """Compare the rewards of expected answers, constant answers and near misses, for the rows of each dataset."""
    by_source: defaultdict[str, list[TrialRow]] = defaultdict(list)
    for row in trial.rows:
        by_source[row.source].append(row)
    for source, rows in by_source.items():
        for result in _SourceCheck(trial, environment, rows).results():
            name = f"{result.name} of {source}" if source else result.name
            yield Diagnosis(status=result.status, name=name, found=result.found)


@dataclass(frozen=True, kw_only=True)
class _Solved:
    """A row whose expected answer gets more than a wrong one."""

    row: TrialRow
    expected: str
    reward: float


@dataclass(frozen=True, kw_only=True)
class _Paid:
    """How an answer that should not be rewarded was rewarded."""

    label: str
    paid: int
    """Number of rows on which it gets as much as the expected answer."""
    rows: int
    """Number of rows on which it is wrong and was scored."""
    rewards: Sequence[tuple[str, float]]
    """The expected answer and the reward of each of them."""

    @property
    def mean(self) -> float:
        """Mean reward on them."""
        return sum(reward for _, reward in self.rewards) / max(self.rows, 1)

    @property
    def is_on_most(self) -> bool:
        """Whether it is rewarded on most rows, and on more than one."""
        return self.paid > max(1, self.rows * _MOST)


def best_form(
    trial: EnvironmentTrial, environment: EnvironmentInterface, rows: Sequence[TrialRow], expected: Sequence[str]
) -> tuple[str, dict[int, float], list[int]]:
    """The form in which most expected answers are rewarded, the reward of each row in which one is, and unscored rows.

    Args:
        trial: The task, the weights of its rewards and the number of turns.
        environment: An instance of the environment.
        rows: B rows.
        expected: Their expected answers.
    """
    wrong = repeated_answers(environment, trial, rows, [WRONG_ANSWERS[1]] * len(rows))
    tried = []
    for form in ANSWER_FORMS:
        rewards = repeated_answers(environment, trial, rows, [form.format(answer) for answer in expected])
        scored = {
            row: (reward, other)
            for row, (reward, other) in enumerate(zip(rewards, wrong, strict=True))
            if reward is not None and other is not None
        }
        solved = {row: reward for row, (reward, other) in scored.items() if reward > other}
        tried.append((form, solved, [row for row in range(len(rows)) if row not in scored]))
    return max(tried, key=lambda each: len(each[1]))


class _SourceCheck:
    def __init__(self, trial: EnvironmentTrial, environment: EnvironmentInterface, rows: Sequence[TrialRow]) -> None:
        self._trial, self._environment, self._rows = trial, environment, rows
        self._form = ANSWER_FORMS[0]
        self._solved: list[_Solved] = []
        self._of_others: list[_Paid] = []
        """Expected answers, as answers to all other rows."""
        self._read: set[str] = set()
        """Keys of the metadata that the environment reads."""

    def results(self) -> Iterator[Diagnosis]:
        if not (yield from check_result("correct answers", self._correct_answers)):
            return
        if not self._solved:
            yield from check_result("constant answers", self._constant_answers_without_expected)
            return
        yield from check_result("constant answers", self._constant_answers)
        yield from check_result("answers of other rows", self._answers_of_others)
        yield from check_result("near misses", self._near_misses)

    def _rewards(self, rows: Sequence[TrialRow], answers: Sequence[str]) -> list[float | None]:
        return repeated_answers(self._environment, self._trial, rows, answers)

    def _correct_answers(self) -> tuple[DiagnosisStatus, str]:
        given = [(row, str(answer)) for row in self._rows if (answer := expected_answer(row.metadata)) is not None]
        if not given:
            return DiagnosisStatus.NOTE, "the rows have no expected answer, so none was tried"
        rows = [self._watched(row) for row, _ in given]
        self._form, rewards, _ = best_form(self._trial, self._environment, rows, [expected for _, expected in given])
        self._solved = [_Solved(row=given[i][0], expected=given[i][1], reward=reward) for i, reward in rewards.items()]
        self._read |= self._keys_with_effect(given) if self._is_elsewhere else _parameters(self._environment)
        if not self._read:
            self._solved = []
            if self._is_elsewhere:
                return DiagnosisStatus.NOTE, (
                    "another expected answer changes no reward, and whether the environment reads it is not checked: runs in "
                    f"{self._trial.section.python}"
                )
            return DiagnosisStatus.NOTE, "the environment does not read the metadata of its rows, so no answer is the right one"
        if self._solved:
            return DiagnosisStatus.OK, (
                f"as {self._form.format('ANSWER')!r}, {len(self._solved)} of {len(given)} expected answers got more than a "
                f"wrong one; their mean reward is {self._mean:g}{_others(given, rewards)}"
            )
        tried = ", ".join(form.format("ANSWER") for form in ANSWER_FORMS)
        problem = f"no form of the expected answer got a higher reward than {WRONG_ANSWERS[1]!r} (tried {tried})"
        if self._reads_expected:
            raise Found(f"{problem}.")
        return DiagnosisStatus.NOTE, f"{problem}; the environment reads neither {' nor '.join(EXPECTED_KEYS)}"

    @property
    def _is_elsewhere(self) -> bool:
        """Whether the environment gets copies of the metadata, so that its reads are not seen."""
        return isinstance(self._environment, EnvironmentPool)

    def _watched(self, row: TrialRow) -> TrialRow:
        if self._is_elsewhere or not isinstance(row.metadata, dict):
            return row
        return TrialRow(messages=row.messages, metadata=_Watched(row.metadata, self._read))

    def _keys_with_effect(self, given: Sequence[tuple[TrialRow, str]]) -> set[str]:
        """The keys of the expected answer, if a row is rewarded differently with that of the next row."""
        rows, answers = [row for row, _ in given], [self._form.format(expected) for _, expected in given]
        others = [
            TrialRow(
                messages=row.messages,
                metadata={**row.metadata, **{key: other.metadata[key] for key in EXPECTED_KEYS if key in other.metadata}},
            )
            for row, other in zip(rows, [*rows[1:], rows[0]], strict=True)
        ]
        return set() if self._rewards(rows, answers) == self._rewards(others, answers) else {*EXPECTED_KEYS}

    @property
    def _reads_expected(self) -> bool:
        return not self._read.isdisjoint(EXPECTED_KEYS)

    def _constant_answers(self) -> tuple[DiagnosisStatus, str]:
        expected = dict.fromkeys(each.expected for each in self._solved)
        by_answer = {
            answer: self._paid(repr(_cut(answer)), [answer] * len(self._solved))
            for answer in dict.fromkeys([*CONSTANTS, *expected])
        }
        self._of_others = [by_answer[answer] for answer in expected]
        results = [*by_answer.values()]
        results.append(self._paid("the question", [plain_text(each.row.messages[-1]["content"]) for each in self._solved]))
        most, best = max(results, key=lambda each: each.paid / max(each.rows, 1)), max(results, key=lambda each: each.mean)
        if most.is_on_most:
            problem = (
                f"the answer {most.label} is rewarded like the expected one on {most.paid} of {most.rows} problems for which "
                "it is wrong. Training would learn this answer instead of the task."
            )
            if self._reads_expected:
                raise Found(problem)
            return DiagnosisStatus.NOTE, problem
        worst = f"{most.label} is, on {most.paid} of {most.rows}," if most.paid else "none is"
        detail = (
            f"of {len(results)} answers that do not depend on the problem, if they are wrong, {worst} rewarded "
            f"like the expected one; the highest mean reward is {best.mean:g}, of {best.label}"
        )
        return DiagnosisStatus.NOTE if best.mean > _NOTED * self._mean else DiagnosisStatus.OK, detail

    @property
    def _mean(self) -> float:
        """Mean reward of the expected answers."""
        return sum(each.reward for each in self._solved) / len(self._solved)

    def _answers_of_others(self) -> tuple[DiagnosisStatus, str]:
        pairs = [(reward, expected, other.label) for other in self._of_others for expected, reward in other.rewards]
        if not pairs:
            return DiagnosisStatus.NOTE, "none was tried, because all rows have the same answer"
        (least, *_), (most, expected, answer) = min(pairs), max(pairs)
        mean = sum(reward for reward, *_ in pairs) / len(pairs)
        found = f"their mean reward is {mean:.3g}, the highest is {most:g}"
        if mean - least <= _COINCIDENCE * self._mean:
            return DiagnosisStatus.OK, found
        return DiagnosisStatus.NOTE, (
            f"{found}, of {answer} instead of {_cut(expected)!r}. A reward for what answers have in common by chance, such as "
            "a digit, also rewards guesses"
        )

    def _near_misses(self) -> tuple[DiagnosisStatus, str]:
        pairs = [(each.expected, self._other(each)) for each in self._solved]
        found = [self._paid(label, [change(*pair) for pair in pairs]) for label, change in _NEAR_MISSES.items()]
        shown = ", ".join(f"{each.label!r} {each.paid} of {each.rows}" for each in found)
        is_noted = any(each.is_on_most for each in found)
        return DiagnosisStatus.NOTE if is_noted else DiagnosisStatus.OK, f"rewarded like the expected answer ANSWER: {shown}"

    def _constant_answers_without_expected(self) -> tuple[DiagnosisStatus, str]:
        in_forms = [form.format(answer) for form in ANSWER_FORMS[1:] for answer in ("0", "1", "yes")]
        answers = {repr(_cut(answer)): [answer] * len(self._rows) for answer in (*CONSTANTS, *in_forms)}
        answers["the question"] = [plain_text(row.messages[-1]["content"]) for row in self._rows]
        means = {}
        for label, texts in answers.items():
            rewards = [reward for reward in self._rewards(self._rows, texts) if reward is not None]
            if rewards:
                means[label] = sum(rewards) / len(rewards)
        if not means:
            return DiagnosisStatus.NOTE, "no row was scored"
        best = max(means, key=lambda label: means[label])
        return DiagnosisStatus.NOTE, (
            f"of {len(means)} answers that do not depend on the problem, {best} has the highest mean reward, {means[best]:g}. "
            "If good answers do not get much more, training learns such answers"
        )

    def _paid(self, label: str, answers: Sequence[str]) -> _Paid:
        tried = zip(self._solved, map(self._form.format, answers), answers, strict=True)
        wrong = [(each, given) for each, given, answer in tried if not _is_same(answer, each.expected)]
        rewards = self._rewards([each.row for each, _ in wrong], [given for _, given in wrong]) if wrong else []
        scored = [(each, reward) for (each, _), reward in zip(wrong, rewards, strict=True) if reward is not None]
        return _Paid(
            label=label,
            paid=sum(reward >= each.reward for each, reward in scored),
            rows=len(scored),
            rewards=[(each.expected, reward) for each, reward in scored],
        )

    def _other(self, solved: _Solved) -> str:
        """The expected answer of another row, if they differ."""
        different = (each.expected for each in self._solved if not _is_same(each.expected, solved.expected))
        return next(different, WRONG_ANSWERS[1])


class _Watched(dict[str, Any]):
    """Metadata that records which of its keys are read."""

    def __init__(self, values: Mapping[str, Any], read: set[str]) -> None:
        super().__init__(values)
        self._read = read

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def __or__(self, other: Any) -> _Watched:  # type: ignore[override]
        return _Watched({**self, **other}, self._read)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watched:
        return _Watched(copy.deepcopy(dict(self), memo), self._read)


def _parameters(environment: EnvironmentInterface) -> set[str]:
    """Fields of a row that reward functions have parameters for; empty if the environment has no functions."""
    functions = environment.functions if isinstance(environment, FunctionEnvironment) else []
    named = {name for function in functions for name in function.accepted or function.required}
    return named - {*ROW_ARGUMENTS, *BATCH_ARGUMENTS}


def _is_same(one: str, other: str) -> bool:
    """Whether two answers are equal, ignoring case, white space at the ends and how a number is written."""
    try:
        return float(one) == float(other)
    except ValueError:
        return one.strip().casefold() == other.strip().casefold()


def _others(given: Sequence[tuple[TrialRow, str]], rewards: Mapping[int, float]) -> str:
    """Examples of the answers without a reward."""
    others = list(dict.fromkeys(repr(_cut(answer)) for row, (_, answer) in enumerate(given) if row not in rewards))
    dots = ", ..." if others[3:] else ""
    where = " (`rlcore data show --graded N` lists them with their rows)"
    return f"; the others: {', '.join(others[:3])}{dots}{where}" if others else ""


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def check_result(
    name: str, check: Callable[[], str | tuple[DiagnosisStatus, str]], *, passed: DiagnosisStatus = DiagnosisStatus.OK
) -> Generator[Diagnosis, None, bool]:
    """Yields the result of a check, and returns whether it passed; an exception is a failure.

    Args:
        name: name of the check.
        check: returns what it found, or a status and what it found.
        passed: status of a check that returns none.
    """
    try:
        found = check()
    except Found as error:
        yield Diagnosis(status=DiagnosisStatus.FAILED, name=name, found=str(error))
        return False
    except (Exception, SystemExit) as error:  # of the environment, which may raise anything
        yield Diagnosis(status=DiagnosisStatus.FAILED, name=name, found=f"{type(error).__name__}: {error}")
        return False
    status, detail = (passed, found) if isinstance(found, str) else found
    yield Diagnosis(status=status, name=name, found=detail)
    return True
