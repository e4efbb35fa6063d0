"""The environment `code`: the completion's program must pass the tests of its row."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl_core.environments import Score, ScorerEnvironment
from rl_core.interfaces.environment import Conversation
from rl_envs.code.config import CodeEnvironmentConfig
from rl_envs.code.extraction import last_code_block
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
