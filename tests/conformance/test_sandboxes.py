"""The local sandbox keeps the promises of sandboxes."""

import os

import pytest

from rl_core.testing import SandboxConformance
from rl_sandbox.interface import SandboxUnavailableError
from rl_sandbox.local import LocalSandbox


@pytest.fixture(scope="module", autouse=True)
def isolation():
    """Skip on a machine without isolation, and fail where CI demands it."""
    try:
        LocalSandbox({}).close()
    except SandboxUnavailableError as error:
        if os.environ.get("RLCORE_REQUIRE_SANDBOX"):
            raise
        pytest.skip(f"the tests of the sandbox need isolation: {error}")


class TestLocal(SandboxConformance):
    component = "local"
