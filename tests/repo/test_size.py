"""The source does not grow without a reason: a budget of lines and statements, and no small modules with one reader.

Raising a number of sizes.json needs a commit that names the feature it buys. `python tests/repo/sizes.py --write` writes the
numbers of today; run it after a change that makes them smaller, too.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import sizes

TOO_LONG = "with it, or with all of these, its reader would have more than 500 lines"
SMALL = {
    "rl_backends_base.config": "a section imports no torch; sections of plugins derive from it",
    "rl_backends_vllm.executors": "derives from classes of vLLM, which its reader imports late",
    "rl_core.testing.adapters": TOO_LONG,
    "rl_core.testing.pytest_plugin": "pytest loads it by name",
    "rl_envs.code.harness": "the programs that run in a sandbox, as source",
    "rl_sandbox.interpreter": "isolation is reviewed page by page",
    "rl_serve.grading": TOO_LONG,
    "rl_train.validate": "a step stays on one page",
}
"""Modules with one reader and few lines, and why each is not a section of its reader."""


def test_no_distribution_exceeds_its_budget():
    budget = json.loads(sizes.BUDGET.read_text())
    today = {(group, unit): number for group, row in sizes.counts().items() for unit, number in row.items()}
    larger = {key: number for key, number in today.items() if number > budget[key[0]][key[1]]}
    assert larger == {}, "name the feature in the commit, and run python tests/repo/sizes.py --write"


def test_a_module_has_a_second_reader_or_80_lines_of_code():
    found = sizes.small_modules()
    assert {name: reader for name, reader in found.items() if name not in SMALL} == {}, "make them sections of their readers"
    assert SMALL.keys() - found.keys() == set(), "remove them from the list"


def test_comments_docstrings_and_blank_lines_are_not_code():
    text = '"""A module."""\n\nX = 1\n"""A constant.\n\nMore."""\n# A comment.\nif X:\n    Y = "acme.config:Section"\n'
    module = sizes.module_of(text)
    assert (module.lines, module.statements, module.code) == (9, 3, 3)
    assert module.targets == {"acme.config"}
