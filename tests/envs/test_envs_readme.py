"""The Python examples of the README run and print what their comments say."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "rl_envs" / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=["math", "arithmetic", "guess", "multiple_choice", "short_answer", "instruction_following"]
)
def test_an_example_prints_what_its_comments_say(example):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})
    promised = re.findall(r"^print\(.*\)  # (.*)$", example, re.MULTILINE)
    assert printed.getvalue().splitlines() == promised
