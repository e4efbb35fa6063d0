"""The environment `code`: the completion's program must pass the tests of its row."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl_core.environments import Score, ScorerEnvironment
from rl_core.environments.scorer import final_text
from rl_core.interfaces.environment import Conversation
from rl_envs.code.config import CodeEnvironmentConfig
from rl_envs.code.scoring import CodeOutcome, CodeTests, TimeLimits, read_tests, score
from rl_envs.code.testing import SuiteRunner
from rl_envs.sandboxes import open_sandbox
from rl_sandbox.interface import SandboxError

_log = logging.getLogger("rlcore.code")


class CodeEnvironment(ScorerEnvironment):
    """Runs the last code block of a completion in a sandbox and compares its results with the row's tests. See `docs/code.md`.

    Each row's metadata contains `tests` (assert lines, or functions with asserts, with `entry_point` for `check(candidate)`)
    or `stdin_stdout` (pairs of `input` and `output`), or both. `step` adds `code_outcome` (`passed`, `failed`, `error`,
    `timeout`, `killed` or `no_code`), `tests_passed` and `tests_total`. A row fails, and is not scored, if its sandbox does not
    start or is ended from outside.

    Args:
        config: `CodeEnvironmentConfig`, a dict of its keys, or None for its defaults.

    Raises:
        SandboxUnavailableError: The isolation of this machine is weaker than `sandbox.require`.
    """

    config_class = CodeEnvironmentConfig
    config: CodeEnvironmentConfig

    def __init__(self, config: CodeEnvironmentConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._sandbox = open_sandbox(self.config.sandbox)
        self._runner = SuiteRunner(self._sandbox, self.config.max_concurrency)
        # A slow program must reach its own limit, which is a result, before the timeout of the step, which is a failure.
        self._limits = TimeLimits(call=self.config.sandbox.timeout_s, row=self.config.step_timeout_s / 2)
        self._threads = ThreadPoolExecutor(self.config.max_concurrency, thread_name_prefix="code")

    def score_batch(self, message_log_batch: list[Conversation], metadata: list[Any]) -> list[Score]:
        """Run the programs of B completions at the same time.

        Returns:
            Rewards named `all_passed` (1.0 or 0.0) or `passed_share` (0.0 to 1.0); the answers are the programs.

        Raises:
            DataError: A row has no tests, they do not have the documented form, or their expected output is longer than
                `sandbox.output_kb`.
        """
        output_kb = self.config.sandbox.output_kb
        tests = [read_tests(row, info, output_kb=output_kb) for row, info in enumerate(metadata)]
        codes = [last_code_block(str(log[-1].get("content") or "")) for log in message_log_batch]
        return list(self._threads.map(self._score, codes, tests))

    def _score(self, code: str | None, tests: CodeTests) -> Score:
        try:
            result = score(self._runner, code, tests, self._limits)
        except SandboxError as error:
            _log.warning("code: a row has failed, because its sandbox does not work: %s", error)
            failure = f"the sandbox does not work: {error}"
            return Score({self.config.reward: 0.0}, answer=code, reply="not scored", failure=failure)
        rewards = {"all_passed": float(result.outcome is CodeOutcome.PASSED), "passed_share": result.passed / result.total}
        outcomes = {f"{outcome.value}_frac": result.outcome is outcome for outcome in CodeOutcome}
        accuracy = outcomes.pop(f"{CodeOutcome.PASSED.value}_frac")
        return Score(
            {self.config.reward: rewards[self.config.reward]},
            {"accuracy": accuracy, "passed_share": rewards["passed_share"], **outcomes},
            answer=code,
            metadata={"code_outcome": result.outcome.value, "tests_passed": result.passed, "tests_total": result.total},
            reply=f"{result.passed} of {result.total} tests passed",
        )

    def shutdown(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._runner.close()
        self._sandbox.close()


_FENCE = re.compile(r"^(?P<indent> {0,3})(?P<marks>`{3,}|~{3,})[ \t]*(?P<language>[\w+.-]*)[^\n`]*$", re.MULTILINE)
_PYTHON = ("python", "python3", "py")


def last_code_block(completion: str) -> str | None:
    """The program of a completion: its last fenced block of Python; None if there is none.

    If no block names Python, it is the last block that names no language; such a block after one of Python is usually the
    program's output. A block that is not closed ends with the completion: a cut-off completion is run as far as it
    goes. Blocks inside `<think>` do not count.
    """
    text, position = final_text(completion), 0
    blocks: dict[bool, str] = {}
    while (start := _FENCE.search(text, position)) is not None:
        marks, language = start["marks"], start["language"].lower()
        closing = re.compile(rf"^ {{0,3}}{re.escape(marks[0])}{{{len(marks)},}}[ \t]*$", re.MULTILINE)
        end = closing.search(text, start.end())
        if language in ("", *_PYTHON):
            content = text[start.end() : end.start() if end else len(text)]
            blocks[bool(language)] = _without_indent(content, len(start["indent"])).strip("\n")
        if end is None:
            break
        position = end.end()
    return blocks.get(True, blocks.get(False))


def _without_indent(content: str, width: int) -> str:
    """The content without as many spaces at the start of its lines as its fence has: a block in a list item is indented."""
    return re.sub(rf"^ {{1,{width}}}", "", content, flags=re.MULTILINE) if width else content
