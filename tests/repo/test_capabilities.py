"""Each capability says what it brings and needs, and one module reads it."""

import re
from pathlib import Path

from rl_core.plugins.component import Capability, Kind
from rlcore_cli.interface import interface_of

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


def test_each_capability_says_what_it_brings_and_what_it_needs():
    entries = [entry for kind in (Kind.POLICY, Kind.GENERATION) for entry in interface_of(kind).capabilities]
    assert {entry.name for entry in entries} == {*Capability}
    assert [entry.name for entry in entries if not (entry.brings.endswith(".") and entry.needs.endswith("."))] == []
