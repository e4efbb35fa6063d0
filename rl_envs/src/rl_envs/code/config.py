"""Config of the environment `code`. Lightweight imports only."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_core.config.schema import EnvironmentConfig
from rl_sandbox.config import SandboxConfig


class CodeEnvironmentConfig(EnvironmentConfig):
    """`env.code`: the completion's program must pass the tests of its row."""

    reward: Literal["all_passed", "passed_share"] = "all_passed"
    """Reward of a program, and its name: `all_passed` is 1.0 if all tests pass, else 0.0; `passed_share` is the fraction of
    tests that pass."""
    max_concurrency: int = Field(default=4, ge=1)
    """Maximum number of programs that a worker runs at the same time, each in its own session."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """Where programs run, and their limits. `timeout_s` applies to all assertions of a row together and to each pair of
    `stdin_stdout`. All tests of a row together may take half of `step_timeout_s`; the tests that are left then fail."""
