"""The environment `code`: the completion's program must pass the tests of its row."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message
from rl_envs.code.config import CodeEnvironmentConfig
from rl_envs.code.extraction import last_code_block
from rl_envs.code.scoring import CodeOutcome, CodeScore, CodeTests, TimeLimits, read_tests, score
from rl_envs.code.testing import SuiteRunner
from rl_envs.config import read_section
from rl_envs.sandboxes import open_sandbox
from rl_envs.single_turn import ended
from rl_sandbox.interface import SandboxError

_log = logging.getLogger("rlcore.code")


class CodeEnvironment(EnvironmentInterface):
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

    def __init__(self, config: CodeEnvironmentConfig | Mapping[str, Any] | None = None) -> None:
        self.config = read_section(CodeEnvironmentConfig, config)
        self._sandbox = open_sandbox(self.config.sandbox)
        self._runner = SuiteRunner(self._sandbox, self.config.max_concurrency)
        # A slow program must reach its own limit, which is a result, before the timeout of the step, which is a failure.
        self._limits = TimeLimits(call=self.config.sandbox.timeout_s, row=self.config.step_timeout_s / 2)
        self._threads = ThreadPoolExecutor(self.config.max_concurrency, thread_name_prefix="code")

    def step(self, message_log_batch: list[list[Message]], metadata: list[Any]) -> EnvironmentReturn:
        """Score B conversations by their last message; every row ends.

        Returns:
            Rewards [B] float32, named `all_passed` (1.0 or 0.0) or `passed_share` (0.0 to 1.0); `answers` has the programs.

        Raises:
            DataError: A row has no tests, they do not have the documented form, or their expected output is longer than
                `sandbox.output_kb`.
        """
        output_kb = self.config.sandbox.output_kb
        tests = [read_tests(row, info, output_kb=output_kb) for row, info in enumerate(metadata)]
        codes = [last_code_block(str(log[-1].get("content") or "")) for log in message_log_batch]
        results = list(self._threads.map(self._score, codes, tests))
        scores = [result if isinstance(result, CodeScore) else None for result in results]
        return ended(
            {self.config.reward: [self._reward(result) for result in scores]},
            [{**info, **_facts(result)} for info, result in zip(metadata, scores, strict=True)],
            replies=[_summary(result) for result in scores],
            answers=codes,
            failures=[None if isinstance(result, CodeScore) else result for result in results],
        )

    def _score(self, code: str | None, tests: CodeTests) -> CodeScore | str:
        """The score of a program, or why its sandbox failed."""
        try:
            return score(self._runner, code, tests, self._limits)
        except SandboxError as error:
            _log.warning("code: a row has failed, because its sandbox does not work: %s", error)
            return f"the sandbox does not work: {error}"

    def _reward(self, result: CodeScore | None) -> float:
        if result is None:
            return 0.0
        if self.config.reward == "all_passed":
            return float(result.outcome is CodeOutcome.PASSED)
        return result.passed / result.total

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """`accuracy` (fraction of rows that passed all tests), `passed_share`, and the fraction of each other outcome."""
        scored = [info for info in batch.get("extra_env_info", ()) if info.get("code_outcome")]
        if not scored:
            return batch, {}
        outcomes = Counter(info["code_outcome"] for info in scored)
        share = sum(info["tests_passed"] / info["tests_total"] for info in scored) / len(scored)
        metrics: dict[str, float | int] = {"accuracy": outcomes[CodeOutcome.PASSED] / len(scored), "passed_share": share}
        for outcome in CodeOutcome:
            if outcome is not CodeOutcome.PASSED:
                metrics[f"{outcome.value}_frac"] = outcomes[outcome] / len(scored)
        return batch, metrics

    def shutdown(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._runner.close()
        self._sandbox.close()


def _summary(result: CodeScore | None) -> str:
    return "not scored" if result is None else f"{result.passed} of {result.total} tests passed"


def _facts(result: CodeScore | None) -> dict[str, Any]:
    if result is None:
        return {}
    return {"code_outcome": result.outcome.value, "tests_passed": result.passed, "tests_total": result.total}
