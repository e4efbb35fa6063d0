"""The files of the examples with a real model are those that their script writes, and hold nothing out that they teach."""

import json
import re
import subprocess
import sys
from pathlib import Path

ASSETS = Path(__file__).parents[2] / "examples" / "smollm2"


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_script_writes_the_files_of_the_repository(tmp_path):
    subprocess.run([sys.executable, ASSETS / "make_word_problems.py", tmp_path], check=True, timeout=60)
    written = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.jsonl")}
    assert written == {path.relative_to(ASSETS): path.read_text() for path in ASSETS.rglob("*.jsonl")}
    assert len(written) == 4


def test_no_held_out_problem_is_taught():
    for kind, key in (("conversations", "messages"), ("preferences", "prompt")):
        taught, held_out = (
            {json.dumps(row[key] if key == "prompt" else row[key][0]) for row in rows(ASSETS / kind / f"{split}.jsonl")}
            for split in ("train", "validation")
        )
        assert (len(taught), len(held_out), taught & held_out) == (200, 64, set())


def test_every_chosen_answer_is_right_and_no_rejected_one_equals_it():
    for row in rows(ASSETS / "preferences" / "train.jsonl") + rows(ASSETS / "preferences" / "validation.jsonl"):
        a, operation, b = row["chosen"].split(" ")[:3]
        right = int(a) + int(b) if operation == "+" else int(a) - int(b)
        assert row["chosen"].endswith(f"The answer is {right}.")
        assert row["chosen"].split(" = ")[1].startswith(f"{right},")
        assert {a, b} <= set(re.findall(r"\d+", row["prompt"]))
        assert row["rejected"] != row["chosen"]
