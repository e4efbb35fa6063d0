"""Every import path that the page on NeMo RL maps to exists."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "nemo_rl_names.md").read_text()
TABLE = PAGE.partition("## Import paths")[2].partition("## Differences")[0]
PATHS = dict(re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|$", TABLE, flags=re.MULTILINE))


def test_every_row_of_the_table_is_read():
    assert len(PATHS) == TABLE.count("\n| `") > 30


@pytest.mark.parametrize(("theirs", "ours"), PATHS.items())
def test_the_import_path_exists_and_keeps_the_name(theirs, ours):
    module, _, name = ours.rpartition(".")
    assert hasattr(importlib.import_module(module), name)
    assert theirs.rpartition(".")[2] == name
