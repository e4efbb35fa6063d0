"""Our datasets keep the promises of datasets."""

from pathlib import Path
from typing import ClassVar

import pytest

from rl_train.testing import DatasetConformance

ROWS = Path(__file__).parent / "rows"


class TestArithmetic(DatasetConformance):
    component = "arithmetic"


@pytest.mark.slow
class TestGuess(DatasetConformance):
    component = "guess"


@pytest.mark.slow
class TestSlidingPuzzle(DatasetConformance):
    component = "sliding_puzzle"


@pytest.mark.slow
class TestReasoningGym(DatasetConformance):
    component = "reasoning_gym"
    config: ClassVar = {"task": "ransom_note"}  # whose problems depend on the hash seed


@pytest.mark.slow
class TestTextGame(DatasetConformance):
    component = "text_game"
    config: ClassVar = {"question": "Say up or down."}


class TestJsonLines(DatasetConformance):
    component = "jsonl"
    config: ClassVar = {"path": str(ROWS / "sums.jsonl")}
    bad_rows: ClassVar = {"wrong_sums.jsonl:2": {"path": str(ROWS / "wrong_sums.jsonl")}}


class TestPreferences(DatasetConformance):
    component = "preference"
    config: ClassVar = {"path": str(ROWS / "pairs.jsonl")}
    bad_rows: ClassVar = {"sums.jsonl:1": {"path": str(ROWS / "sums.jsonl")}}


@pytest.mark.slow
class TestUnpairedPreferences(DatasetConformance):
    component = "preference"
    config: ClassVar = {"path": str(ROWS / "labelled.jsonl"), "label_key": "label"}
    bad_rows: ClassVar = {"pairs.jsonl:1": {"path": str(ROWS / "pairs.jsonl")}}


@pytest.mark.slow
class TestSplitPairs(DatasetConformance):
    component = "preference"
    config: ClassVar = {"path": str(ROWS / "pairs.jsonl"), "split_pairs": True}
