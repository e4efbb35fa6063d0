"""Digests of user code: what counts as a change, and which files take part."""

import importlib
import textwrap

import pytest

from rl_train.checkpoints.inputs import source_digests

REWARD = '''
"""Rewards."""

import json, os
from reward_parts.numbers import first

LIMIT = 3


def score(completion, answer):
    """One for the right answer."""
    # the first number
    return 1.0 if first(completion) == (answer + LIMIT) else 0.0


class Other:
    """Something else."""

    size = 1
'''


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Writes a project whose folder is searched for modules."""
    monkeypatch.syspath_prepend(tmp_path)
    files = {
        "my_reward.py": REWARD,
        "reward_parts/__init__.py": "",
        "reward_parts/numbers.py": "from . import digits\n\n\ndef first(text):\n    return digits.find(text)\n",
        "reward_parts/digits.py": "def find(text):\n    return int(text)\n",
        "unused.py": "x = 1\n",
    }

    def write(**changes):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(changes.get(path.stem, text)))
        importlib.invalidate_caches()
        return source_digests("my_reward.score")

    return write


def changed(before, after):
    return sorted(name for name in {**before, **after} if before.get(name) != after.get(name))


def test_a_function_is_digested_with_its_file_and_what_that_imports_from_its_folder(project):
    assert sorted(project()) == [
        "Other in my_reward.py",
        "find in reward_parts/digits.py",
        "first in reward_parts/numbers.py",
        "my_reward.py",
        "my_reward.score",
        "reward_parts/numbers.py",
        "score in my_reward.py",
    ]


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("1.0 if", "-1.0 if", ["score in my_reward.py"]),
        ("== (answer + LIMIT)", "== answer + LIMIT", []),
        ("answer + LIMIT", "answer * LIMIT", ["score in my_reward.py"]),
        ("LIMIT = 3", "LIMIT = 4", ["my_reward.py"]),
        ("# the first number", "# the last number", []),
        ("One for the right answer.", "One.", []),
        ('    """Something else."""\n', "", []),
        ("import json, os\n", "import os\nimport json\n\n\n", []),
        ("import json, os\n", "import json\n", ["my_reward.py"]),
        ("size = 1", "size = 2", ["Other in my_reward.py"]),
        ("(answer + LIMIT)", "(answer + (LIMIT - 1) * 2)", ["score in my_reward.py"]),
    ],
)
def test_changes_are_named_and_comments_docstrings_and_formatting_are_none(project, old, new, names):
    assert old in REWARD
    assert changed(project(), project(my_reward=REWARD.replace(old, new))) == names


def test_two_trees_with_the_same_nodes_in_another_structure_differ(project):
    first = project(digits="def find(text):\n    return (1 - 2) - 3\n")
    second = project(digits="def find(text):\n    return 1 - (2 - 3)\n")
    assert changed(first, second) == ["find in reward_parts/digits.py"]


def test_a_change_of_a_module_that_is_not_imported_is_none(project):
    assert changed(project(), project(unused="x = 2\n")) == []


def test_code_of_another_python_version_is_compared_as_text(project):
    first = project(digits="def find(text):\n    print text\n")
    assert changed(first, project(digits="def find(text):\n    print  text\n")) == ["reward_parts/digits.py"]


@pytest.mark.parametrize(
    "text",
    [
        "json.loads",
        "torch.optim.AdamW",
        "rl_train.rewards.functions.combine",
        "no_such_module.f",
        "a text",
        "0.5",
        "x.jsonl",
        "",
    ],
)
def test_installed_packages_and_other_texts_have_no_digests(project, text):
    project()
    assert source_digests(text) == {}
