"""Each capability has a documented sentence and one module that reads it."""

import re
from pathlib import Path

from rl_core.plugins.component import Capability

ROOT = Path(__file__).parents[2]
NO_READERS = ("plugin.py", "capabilities.py", "contracts.py", "check_plugin.py")
"""Registrations, the table itself, the comparison of what is declared with what is shown, and the report of what was tested."""


def readers(capability):
    """The modules that read a capability, or, for what a weight transport requires, the transport."""
    uses = re.compile(rf"Capability\.{capability.name}\b|requires: .* = \(\"{capability}\",\)")
    files = [path for path in ROOT.glob("*/src/**/*.py") if path.name not in NO_READERS and "testing" not in path.parts]
    return sorted(path.name for path in files if uses.search(path.read_text()))


def test_each_capability_is_read_in_one_module():
    assert {str(each): readers(each) for each in Capability if len(readers(each)) != 1} == {}


def test_each_capability_has_a_row_in_the_documentation():
    rows = re.findall(r"^\| `([a-z_]+)` \| (?:policy|engine|both) \| .+ \|$", (ROOT / "docs" / "hooks.md").read_text(), re.M)
    assert sorted(rows) == sorted(Capability)
