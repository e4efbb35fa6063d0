"""The local sandbox keeps the promises of sandboxes."""

import pytest
from isolation import require_isolation

from rl_core.testing import SandboxConformance


@pytest.fixture(scope="module", autouse=True)
def isolation():
    require_isolation()


class TestLocal(SandboxConformance):
    component = "local"
