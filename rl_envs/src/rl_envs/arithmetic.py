"""The environment `arithmetic`, which expects one whole number as text, and the dataset that generates its problems."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.environments import Score, ScorerEnvironment
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces.records import Record
from rl_envs.config import ArithmeticDatasetConfig, ArithmeticEnvironmentConfig
from rl_envs.generated_dataset import MAX_DRAWS, GeneratedDataset, is_reserved
from rl_envs.math.notation import last_box

_NUMBER = re.compile(r"-?[0-9]+")
_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class ArithmeticEnvironment(ScorerEnvironment):
    r"""Checks the answers to `ArithmeticDataset`.

    In the plain style, a completion is correct if it is exactly the number, ignoring surrounding white space: `046`, `+46` and
    `46 or 47` are wrong if `46` is expected. In the chat style (`in_box` in the row's metadata), the last `\boxed{}` must
    contain exactly the number. Metrics: `accuracy`, and `number_frac`, the fraction of answers that are whole numbers.

    Args:
        config: `ArithmeticEnvironmentConfig`, a dict of its keys, or None for its defaults.
    """

    config_class = ArithmeticEnvironmentConfig
    config: ArithmeticEnvironmentConfig

    def score(self, text: str, info: Mapping[str, Any]) -> Score:
        """1.0 if correct, plus `format_reward` if the answer is a whole number, correct or not.

        Raises:
            DataError: The row's metadata has no `expected_answer`.
        """
        if "expected_answer" not in info:
            raise DataError(
                f"the metadata has no 'expected_answer': found {info!r}. Records of the dataset `arithmetic` have it."
            )
        answer = read_number(text, in_box=bool(info.get("in_box")))
        is_right = answer == str(info["expected_answer"])
        return Score(
            float(is_right) + self.config.format_reward * (answer is not None),
            {"accuracy": is_right, "number_frac": answer is not None},
            answer=answer,
            reply="correct" if is_right else "incorrect",
        )


def read_number(text: str, *, in_box: bool) -> str | None:
    """The whole number that an answer (or its last box) consists of, as written; None for anything else."""
    written = last_box(text) if in_box else text
    number = _NUMBER.fullmatch(written.strip()) if written is not None else None
    return None if number is None else number.group()


class ArithmeticDataset(GeneratedDataset):
    """Sums, differences and products of whole numbers. Record i is a pure function of the seed, the split and i.

    Args:
        config: `ArithmeticDatasetConfig`, a dict of its keys, or None for its defaults.

    Raises:
        ConfigError: The split has no operand pair with this number of digits.
    """

    config_class = ArithmeticDatasetConfig
    config: ArithmeticDatasetConfig

    def generate(self, index: int) -> Record:
        problem = self.problem(index)
        messages = [{"role": "user", "content": self._question(problem)}]
        if self.config.with_response:
            messages.append({"role": "assistant", "content": self._response(problem, index)})
        return {
            "messages": messages,
            "extra_env_info": {"expected_answer": str(problem.answer), "in_box": self.config.style == "chat"},
            "task_name": self.config.task_name or "arithmetic",
        }

    def problem(self, index: int) -> Problem:
        """The problem of the record at that index, from 0."""
        config = self.config
        draw = self._random(index)
        for _ in range(MAX_DRAWS):
            left, right = self._operand(draw), self._operand(draw)
            if is_held_out(left, right) == (config.split == "validation"):
                return Problem(left=left, right=right, operation=draw.choice(config.operations))
        raise ConfigError(
            f"The {config.split} split has no pair of operands with {config.min_digits} to {config.max_digits} digits. "
            "Increase max_digits."
        )

    def _operand(self, draw: random.Random) -> int:
        digits = draw.randint(self.config.min_digits, self.config.max_digits)
        smallest = 10 ** (digits - 1) if digits > 1 else 0
        return draw.randrange(smallest, 10**digits)

    def _question(self, problem: Problem) -> str:
        if self.config.style == "plain":
            return f"{problem.left}{problem.operation}{problem.right}="
        return f"What is {problem.left} {problem.operation} {problem.right}? Put the final answer in \\boxed{{}}."

    def _response(self, problem: Problem, index: int) -> str:
        answer = problem.answer
        if self._random(index, "/carry").random() < self.config.forgotten_carries:
            answer = add_without_carrying(problem.left, problem.right)
        return str(answer) if self.config.style == "plain" else f"\\boxed{{{answer}}}"

    def _random(self, index: int, purpose: str = "") -> random.Random:
        return random.Random(f"{self.config.seed}/{self.config.split}/{index}{purpose}")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Two operands and an operation."""

    left: int
    right: int
    operation: str

    @property
    def answer(self) -> int:
        """The exact result."""
        return _OPERATIONS[self.operation](self.left, self.right)


def add_without_carrying(left: int, right: int) -> int:
    """The column-wise sum without carries, except in the leading column: 58+67 gives 115."""
    columns = max(len(str(left)), len(str(right))) - 1
    top: int = 10**columns
    units = 0
    for column in range(columns):
        units += (left // 10**column + right // 10**column) % 10 * 10**column
    return (left // top + right // top) * top + units


def is_held_out(left: int, right: int) -> bool:
    """Whether a pair belongs to validation, independent of its order, the operation and the seed.

    It depends only on a hash of the pair, so that datasets with different settings never share a question across splits, and
    `12+34` in training does not reveal `34+12` in validation.
    """
    return is_reserved(f"{min(left, right)},{max(left, right)}")
