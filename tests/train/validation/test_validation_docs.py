"""The examples in docs/validation.md work."""

import re
from pathlib import Path

import pytest

from rl_train.logprob_agreement import MIN_RANGE_TOKENS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "validation.md").read_text()


@pytest.mark.slow
def test_the_calls_that_are_shown_work(monkeypatch):
    monkeypatch.chdir(ROOT)
    [block] = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    names = {}
    exec(block, names)
    assert names["agreement"].failures(1.001) == []
    names["policy"].shutdown()
    names["generator"].shutdown()


def test_the_page_states_the_minimum_tokens_of_a_checked_range():
    assert f"at least\n{MIN_RANGE_TOKENS} of them" in PAGE
