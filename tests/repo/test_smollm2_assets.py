"""Data files of the SmolLM2 examples equal the output of their scripts, and held-out data is not in the training data."""

import json
import re
import subprocess
import sys
from pathlib import Path

ASSETS = Path(__file__).parents[2] / "examples" / "smollm2"


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_scripts_write_the_files_of_the_repository(tmp_path):
    for script in ("make_word_problems.py", "make_sums.py"):
        subprocess.run([sys.executable, ASSETS / script, tmp_path], check=True, timeout=240)
    written = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.jsonl")}
    assert written == {path.relative_to(ASSETS): path.read_text() for path in ASSETS.rglob("*.jsonl")}
    assert len(written) == 6


def test_no_held_out_problem_is_in_the_training_data():
    for kind, key in (("conversations", "messages"), ("preferences", "prompt")):
        trained, held_out = (
            {json.dumps(row[key] if key == "prompt" else row[key][0]) for row in rows(ASSETS / kind / f"{split}.jsonl")}
            for split in ("train", "validation")
        )
        assert (len(trained), len(held_out), trained & held_out) == (200, 64, set())


def test_no_held_out_sum_is_in_the_training_data_in_either_order_or_the_worked_example():
    pairs = {}
    for split in ("train", "validation"):
        asked = [row["messages"] for row in rows(ASSETS / "sums" / f"{split}.jsonl")]
        numbers = [tuple(map(int, re.findall(r"\d+", messages[-1]["content"]))) for messages in asked]
        expected = [int(row["expected_answer"]) for row in rows(ASSETS / "sums" / f"{split}.jsonl")]
        assert [sum(pair) for pair in numbers] == expected
        assert {messages[2]["content"] for messages in asked} == {r"2 + 5 = \boxed{7}"}
        pairs[split] = {tuple(sorted(pair)) for pair in numbers}
        assert len(numbers) == {"train": 110, "validation": 32}[split]
    assert not pairs["train"] & pairs["validation"]
    assert (2, 5) not in pairs["train"] | pairs["validation"]


def test_every_chosen_answer_is_correct_and_differs_from_the_rejected_one():
    for row in rows(ASSETS / "preferences" / "train.jsonl") + rows(ASSETS / "preferences" / "validation.jsonl"):
        a, operation, b = row["chosen"].split(" ")[:3]
        right = int(a) + int(b) if operation == "+" else int(a) - int(b)
        assert row["chosen"].endswith(f"The answer is {right}.")
        assert row["chosen"].split(" = ")[1].startswith(f"{right},")
        assert {a, b} <= set(re.findall(r"\d+", row["prompt"]))
        assert row["rejected"] != row["chosen"]
