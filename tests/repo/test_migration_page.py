"""The tables that translate settings of other libraries name keys that exist."""

import re
from pathlib import Path

import pytest

from rl_core.config.diagnostics import dotted
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.reference import schema_index

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrate.md").read_text()
ROWS = [line.strip("| ").split(" | ")[1] for line in PAGE.splitlines() if line.startswith("| ")]
"""The second cells of all tables, also of their headings."""
KEYS = sorted({key for row in ROWS for key in re.findall(r"`([a-z_]+(?:\.[a-z_<>]+)+)(?::[^`]*)?`", row)})


@pytest.fixture(scope="module")
def known():
    sections = schema_index(Registry(discover())).sections
    fields = {dotted(field.path) for section in sections for field in section.fields()}
    return {field.replace("env.<name>", "env.<task>") for field in fields} | {dotted(each.path) for each in sections}


def test_the_rows_of_all_tables_are_read():
    assert ROWS.count("here") == PAGE.count("\n|---")
    assert len(ROWS) > 90
    assert len(KEYS) > 30


@pytest.mark.parametrize("key", KEYS)
def test_the_key_exists(known, key):
    assert key in known or key.rpartition(".kwargs")[0] + ".kwargs" in known
