"""Importing the distribution, its config or its plugin loads nothing heavy, and all exported names exist."""

from __future__ import annotations

import subprocess
import sys

import rl_envs


def test_name_config_and_plugin_import_nothing_heavy():
    code = (
        "import sys, rl_envs, rl_envs.config, rl_envs.plugin;"
        "print(sorted({'torch', 'ray', 'numpy', 'transformers', 'sympy', 'math_verify'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_grading_process_does_not_import_torch():
    code = "import sys, rl_envs.math.answers; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_only_the_grading_process_imports_sympy():
    code = "import sys, rl_envs.arithmetic, rl_envs.math.environment; print('sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_all_exported_names_exist():
    assert [getattr(rl_envs, name).__name__ for name in rl_envs.__all__] == rl_envs.__all__


def test_every_registered_component_loads_with_its_config():
    from rl_envs.plugin import rlcore_datasets, rlcore_environments

    required = {
        "gymnasium": {"id": "FrozenLake-v1"},
        "textarena": {"id": "GuessTheNumber-v0"},
        "skyrl_gym": {"id": "gsm8k"},
        "openenv": {"url": "http://localhost:8000"},
        "nemo_gym": {"url": "http://localhost:8000"},
        "text_game": {"question": "Play."},
    }
    for component in [*rlcore_environments(), *rlcore_datasets()]:
        if component.name in ("reward_model", "judge"):
            # They need a model or a server, which their own tests have.
            assert component.load().__name__ in ("RewardModelEnvironment", "JudgeEnvironment")
            continue
        if component.name == "code":
            # It starts a sandbox, which not every machine can.
            assert component.load().__name__ == "CodeEnvironment"
            continue
        config = component.load_config()(**required.get(component.name, {}))
        assert component.load()(config).config == config
