"""Tests that run programs in a sandbox: without isolation they are skipped, or fail where CI demands it."""

import os
from contextlib import contextmanager

import pytest

from rl_sandbox.interface import SandboxUnavailableError
from rl_sandbox.local import LocalSandbox


class MissingIsolation(pytest.skip.Exception):
    """Skips a test on a machine that cannot isolate programs; `make test` ends with the number of these tests."""


@contextmanager
def isolated():
    """Skip the test if no sandbox of the required strength works here; with RLCORE_REQUIRE_SANDBOX, as in CI, fail."""
    try:
        yield
    except SandboxUnavailableError as error:
        if os.environ.get("RLCORE_REQUIRE_SANDBOX"):
            raise
        raise MissingIsolation(f"needs isolation: {error}") from error


def require_isolation():
    """For tests whose sandbox is opened elsewhere."""
    with isolated():
        LocalSandbox({}).close()
