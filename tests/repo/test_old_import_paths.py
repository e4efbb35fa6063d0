"""Documented import paths that have moved still work, with a warning that gives the new one."""

import importlib
import sys

import pytest

MOVED = [
    ("rl_core.interfaces", "Tool", "rl_core.tools"),
    ("rl_core.interfaces", "ToolEnvironment", "rl_core.tools"),
    ("rl_core.interfaces.tool_runner", "ToolUnavailableError", "rl_core.tools"),
    ("rl_core.interfaces.tool_runner", "current_session", "rl_core.tools"),
    ("rl_train.validation", "compare_log_probabilities", "rl_train.logprob_agreement"),
    ("rl_train.runtime.trainers", "GRPOTrainer", "rl_train.trainers.trainers"),
    ("rl_train.runtime.python_data", "read_python_data", "rl_train.trainers.trainer_data"),
]


@pytest.mark.parametrize(("old", "name", "new"), MOVED)
def test_an_old_import_path_warns_and_gives_the_same_object(old, name, new, monkeypatch):
    if old != "rl_core.interfaces":
        monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"has moved to {new}"):
        found = getattr(importlib.import_module(old), name)
    assert found is getattr(importlib.import_module(new), name)
