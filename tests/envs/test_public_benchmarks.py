"""Rows with the fields of public benchmarks become records that the built-in environments grade. Their contents are made up."""

import gzip
import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from isolation import isolated

from rl_core.errors import DataError
from rl_envs.code.environment import CodeEnvironment
from rl_envs.math.environment import MathEnvironment
from rl_envs.multiple_choice import MultipleChoiceEnvironment
from rl_train.data.dataset_config import JsonlDatasetConfig
from rl_train.data.datasets import RecordDataset

ROOT = Path(__file__).parents[2]
TEXTS = ["a stone", "the sun", "a lamp", "the moon"]
HUMAN_EVAL = {
    "task_id": "Test/0",
    "prompt": 'def twice(x: int) -> int:\n    """Return two times x."""\n',
    "canonical_solution": "    return 2 * x\n",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    "entry_point": "twice",
}
MBPP = {
    "text": "Write a function to double a number.",
    "code": "...",
    "task_id": 1,
    "test_setup_code": "",
    "test_list": ["assert twice(2) == 4", "assert twice(0) == 0"],
    "challenge_test_list": [],
}
SANITIZED = {
    "source_file": "x",
    "task_id": 2,
    "prompt": "Write a function to find the root.",
    "code": "...",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(root(2), 1.4142135623730951)", "assert root(9) == 3"],
}
CHOICES = {
    "MMLU": {"question": "What shines by itself?", "subject": "astronomy", "choices": TEXTS, "answer": 1},
    "MMLU-Pro": {"question": "What shines by itself?", "options": TEXTS, "answer": "B", "answer_index": 1, "cot_content": ""},
    "ARC": {
        "id": "x",
        "question": "What shines by itself?",
        "choices": {"text": TEXTS, "label": ["A", "B", "C", "D"]},
        "answerKey": "B",
    },
    "ARC with numbers": {
        "question": "What shines by itself?",
        "choices": {"text": TEXTS, "label": ["1", "2", "3", "4"]},
        "answerKey": "2",
    },
    "OpenBookQA": {
        "question_stem": "What shines by itself?",
        "choices": {"text": TEXTS, "label": ["A", "B", "C", "D"]},
        "answerKey": "B",
    },
    "HellaSwag": {"ctx": "What shines by itself?", "activity_label": "x", "endings": TEXTS, "label": "1"},
    "the text of the choice": {"question": "What shines by itself?", "choices": TEXTS, "answer": "the sun"},
}


@pytest.fixture
def read(tmp_path):
    def record_of(row, **keys):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
        [record] = RecordDataset(JsonlDatasetConfig(path=path, **keys))
        return record

    return record_of


def rewards(environment, record, *completions):
    prompt = [message for message in record["messages"] if message["role"] != "assistant"]
    logs = [[*prompt, {"role": "assistant", "content": text}] for text in completions]
    found = environment.step(logs, [dict(record["extra_env_info"])] * len(logs)).rewards
    [values] = found.values() if isinstance(found, dict) else [found]
    return values.tolist()


@pytest.mark.parametrize("row", CHOICES.values(), ids=CHOICES)
def test_multiple_choice_questions_get_letters_in_the_layout_of_each_benchmark(read, row):
    record = read(row, record_fn="multiple_choice", system_prompt="End with 'Answer:' and a letter.")
    assert [message["content"] for message in record["messages"]] == [
        "End with 'Answer:' and a letter.",
        "What shines by itself?\n\n(A) a stone\n(B) the sun\n(C) a lamp\n(D) the moon",
    ]
    assert record["extra_env_info"] == {"expected_answer": "B", "choices": TEXTS}
    answers = ["Answer: B", "Answer: (B) the sun", "Answer: C", "Answer: the moon"]
    assert rewards(MultipleChoiceEnvironment(), record, *answers) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"answer": 4}, "the field 'answer' is 4: expected one of the 4 choices"),
        ({"answer": -1}, "the field 'answer' is -1: expected one of the 4 choices"),
        ({"answer": "E"}, "the field 'answer' is 'E': expected one of the 4 choices"),
        ({"answer": True}, "the field 'answer' is True: expected one of the 4 choices"),
        ({"choices": ["one"]}, "the field 'choices' is .*: expected a list of 2 to 26 texts"),
        ({"choices": {"text": TEXTS, "label": ["A"]}}, "the field 'choices' has 4 texts, but 1 labels"),
        ({"choices": None}, "none of the fields 'choices', 'options', 'endings' has a value"),
        ({"question": 5}, "the field 'question' is 5: expected a text"),
    ],
)
def test_a_question_without_a_right_choice_is_a_bad_row_with_its_location(read, change, problem):
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: {problem}"):
        read({**CHOICES["MMLU"], **change}, record_fn="multiple_choice")


@pytest.mark.parametrize(
    ("row", "keys", "right", "wrong"),
    [
        ({"question": "6*7?", "answer": "6*7=42\n#### 42"}, {"record_fn": "gsm8k"}, r"\boxed{42}", r"\boxed{41}"),
        (
            {"problem": "Half?", "answer": r"\frac{1}{2}"},
            {"input_key": "problem", "output_key": "answer"},
            r"\boxed{0.5}",
            "0.5",
        ),
    ],
    ids=["GSM8K", "MATH-500"],
)
def test_numbers_and_formulas_are_graded_as_mathematics(read, row, keys, right, wrong):
    environment = MathEnvironment()
    assert rewards(environment, read(row, **keys), right, wrong) == [1.0, 0.0]
    environment.shutdown()


@pytest.mark.parametrize(
    ("name", "row", "shown", "right"),
    [
        ("humaneval", HUMAN_EVAL, "```python\n" + HUMAN_EVAL["prompt"].rstrip() + "\n```", "def twice(x):\n    return x + x"),
        ("mbpp", MBPP, "assert twice(2) == 4\nassert twice(0) == 0", "def twice(x):\n    return x + x"),
        ("mbpp", SANITIZED, "find the root.", "def root(x):\n    return x ** 0.5"),
    ],
    ids=["HumanEval", "MBPP", "sanitized MBPP"],
)
def test_programs_are_graded_by_the_tests_of_the_row(read, name, row, shown, right):
    record = read(row, record_fn=name)
    assert shown in record["messages"][-1]["content"]
    with isolated():
        environment = CodeEnvironment({"sandbox": {"timeout_s": 20.0}})
    wrong = right.replace("return x", "return 1 + x")
    assert rewards(environment, record, f"```python\n{right}\n```", f"```python\n{wrong}\n```") == [1.0, 0.0]
    environment.shutdown()


@pytest.mark.parametrize(("name", "row"), [("humaneval", HUMAN_EVAL), ("mbpp", MBPP)])
def test_an_error_about_a_row_of_a_known_layout_names_its_function(read, name, row):
    with pytest.raises(DataError, match=f"set `record_fn: {name}`"):
        read(row)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: "):
        read({"other": 1}, record_fn=name)


def test_the_validation_sets_of_the_documentation_are_valid_with_such_files(rlcore, tmp_path):
    page = (ROOT / "docs/evaluation.md").read_text().partition("### Public benchmarks")[2]
    [block] = re.findall(r"```yaml\n(.*?)```", page.partition("### Several")[0], re.DOTALL)
    for name, row in (("gsm8k", {"question": "6*7?", "answer": "#### 42"}), ("mmlu", CHOICES["MMLU"])):
        (tmp_path / name).mkdir()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / name / "test.parquet")
    (tmp_path / "math500.jsonl").write_text(json.dumps({"problem": "6*7?", "answer": "42"}))
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(HUMAN_EVAL).encode()))
    (tmp_path / "sets.yaml").write_text(block)
    (tmp_path / "run.yaml").write_text(
        "grpo: {max_num_steps: 1, val_period: 1}\ncluster: {backend: in_process}\nenv: {arithmetic: {}}\n"
        f"policy: {{backend: hf, model_name: {ROOT / 'examples/addition/model'}, generation: {{backend: hf}}}}\n"
        "data: {train: {dataset_name: arithmetic, num_samples: 8}}\n"
    )
    code, printed = rlcore("validate", "--config", "run.yaml", "--config", "sets.yaml", folder=tmp_path)
    assert code == 0, printed
    assert "validation_sets.mmlu parquet" in printed
    config = (tmp_path / "sets.yaml").read_text().replace("record_fn: humaneval", "record_fn: mbpp")
    (tmp_path / "sets.yaml").write_text(config)
    code, printed = rlcore("validate", "--config", "run.yaml", "--config", "sets.yaml", folder=tmp_path)
    assert (code, "HumanEval.jsonl.gz:1" in printed) == (2, True), printed
