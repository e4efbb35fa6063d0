"""Documented import paths that have moved still work, with a warning that gives the new one."""

import importlib
import importlib.util
import sys

import pytest

from rl_core.old_paths import NEW_PATHS

MOVED = [
    ("rl_core.backend", "DistributedPolicy", "rl_backends_base"),
    ("rl_core.dispatch.generation", "DistributedGeneration", "rl_backends_base.distributed_generation"),
    ("rl_core.interfaces", "Tool", "rl_core.tools"),
    ("rl_core.interfaces", "ToolEnvironment", "rl_core.tools"),
    ("rl_core.interfaces.tool_runner", "ToolUnavailableError", "rl_core.tools"),
    ("rl_core.interfaces.tool_runner", "current_session", "rl_core.tools"),
    ("rl_core.interfaces.loss", "LossFunction", "rl_core.interfaces.policy"),
    ("rl_core.plugins.capabilities", "Capability", "rl_core.plugins.component"),
    ("rl_train.config.runtime_needs", "RuntimeNeeds", "rl_train.config.algorithm"),
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


@pytest.mark.parametrize(("old", "new"), NEW_PATHS.items())
def test_an_old_path_is_a_module_without_a_file(old, new):
    assert importlib.util.find_spec(new).origin is not None
    module = importlib.import_module(old)
    assert module.__spec__.origin is None
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(module, "no_such_name")  # noqa: B009


def test_a_module_that_never_existed_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rl_train.never")
