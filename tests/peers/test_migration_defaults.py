"""The defaults that docs/migrate.md gives for a setting of TRL are those of TRL and ours."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest
import yaml

from rl_core.config.diagnostics import dotted
from rl_core.config.policy_sections import OptimizerConfig
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.reference import schema_index

PAGE = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text()
CELLS = [re.split(r" \| ", line.strip("| ")) for line in PAGE.splitlines() if line.startswith("| ")]
ROWS = {
    re.search(r"`([a-z_]+)", setting)[1]: (re.search(r"`([a-z_.<>]+)", key)[1], defaults.split("; "))
    for setting, key, defaults in (row for row in CELLS if len(row) == 3 and ";" in row[2])
}
"""Setting of TRL to our key, and the two defaults."""


@pytest.fixture(scope="module")
def theirs():
    return {field.name: field.default for field in dataclasses.fields(importlib.import_module("trl").GRPOConfig)}


@pytest.fixture(scope="module")
def ours():
    """Default by key; the first section that has the key is the default component's."""
    found = {}
    for section in schema_index(Registry(discover())).sections:
        for field in section.fields():
            found.setdefault(dotted(field.path), field.default)
    return {**found, **{f"policy.optimizer.kwargs.{name}": value for name, value in OptimizerConfig().kwargs.items()}}


def test_the_table_of_defaults_is_read():
    assert len(ROWS) > 15


@pytest.mark.parametrize("setting", ROWS)
def test_the_defaults_are_those_of_both_libraries(theirs, ours, setting):
    key, defaults = ROWS[setting]
    # YAML reads 1e-6 as a text.
    read = [float(text) if text.startswith("1e") else yaml.safe_load(text) for text in defaults]
    assert read == [theirs[setting], ours[key]]
