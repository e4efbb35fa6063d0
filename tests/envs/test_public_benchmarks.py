"""Rows with the fields of public benchmarks become records that the built-in environments grade. Their contents are made up."""

import gzip
import json
import math
import re
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from isolation import isolated

from rl_core.errors import DataError
from rl_envs.code.environment import CodeEnvironment
from rl_envs.math.environment import MathEnvironment
from rl_envs.multiple_choice import MultipleChoiceEnvironment, ShortAnswerEnvironment
from rl_train.data.dataset_config import JsonlDatasetConfig
from rl_train.data.datasets import RecordDataset
from rl_train.data.records import load_record_function

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
    "files of ARC and CommonsenseQA": {
        "id": "x",
        "question": {
            "stem": "What shines by itself?",
            "choices": [{"text": text, "label": label} for text, label in zip(TEXTS, "ABCD", strict=True)],
        },
        "answerKey": "B",
    },
}
GPQA = {
    "Question": "What shines by itself?",
    "Correct Answer": "the sun\n",
    **{f"Incorrect Answer {number}": text for number, text in enumerate(["a stone", "a lamp", "the moon"], start=1)},
    "Record ID": "x",
}
TRUTHFULQA = {
    "question": "What shines by itself?",
    "mc1_targets": {"choices": ["the sun", "a stone", "the moon"], "labels": [1, 0, 0]},
    "mc2_targets": {"choices": ["the sun", "a star", "the moon"], "labels": [1, 1, 0]},
}
TRIVIAQA = {
    "question": "What shines by itself?",
    "question_id": "x",
    "answer": {
        "aliases": ["Sun", "The Sun", "Sol (star)"],
        "normalized_aliases": ["sun", "sol star"],
        "normalized_value": "sun",
        "type": "WikipediaEntity",
        "value": "The Sun",
    },
}
BOOLQ = {"question": "does the sun shine", "title": "Sun", "passage": "The sun is a star. It shines."}
TWO_CHOICES = {
    "PIQA": ("piqa", {"goal": "Open a door.", "sol1": "Kick it.", "sol2": "Turn the knob.", "label": 1}, "B"),
    "PIQA, labels as texts": ("piqa", {"goal": "Open a door.", "sol1": "Turn it.", "sol2": "Kick.", "label": "0"}, "A"),
    "WinoGrande": (
        "winogrande",
        {"sentence": "The cup did not fit the box, as _ was big.", "option1": "box", "option2": "cup", "answer": "2"},
        "B",
    ),
    "BoolQ": ("boolq", {**BOOLQ, "answer": True}, "A"),
    "BoolQ of SuperGLUE": ("boolq", {**BOOLQ, "idx": 3, "label": 0}, "B"),
    "BoolQ as CSV": ("boolq", {**BOOLQ, "answer": "False"}, "B"),
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


@pytest.mark.parametrize(("name", "row", "right"), TWO_CHOICES.values(), ids=TWO_CHOICES)
def test_questions_with_two_choices_have_the_letter_of_the_right_one(read, name, row, right):
    record = read(row, record_fn=name)
    asked = record["messages"][-1]["content"]
    shown = {
        "piqa": ("goal", "sol1", "sol2"),
        "winogrande": ("sentence", "option1", "option2"),
        "boolq": ("passage", "question"),
    }
    assert [row[field] in asked for field in shown[name]] == [True] * len(shown[name])
    assert [line for line in asked.splitlines() if line.startswith("(")] == [
        f"({letter}) {text}" for letter, text in zip("AB", record["extra_env_info"]["choices"], strict=True)
    ]
    text = record["extra_env_info"]["choices"]["AB".index(right)]
    wrong = "BA"["AB".index(right)]
    assert rewards(MultipleChoiceEnvironment(), record, right, f"Answer: {text}", wrong) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(("name", "row"), [("gpqa", GPQA), ("truthfulqa", TRUTHFULQA)])
def test_choices_of_which_the_first_is_always_right_are_shuffled_by_a_hash_of_the_row(read, name, row):
    key = "Question" if name == "gpqa" else "question"
    letters, orders = Counter(), set()
    for number in range(200):
        record = load_record_function(name)({**row, key: f"{number}?"})
        info = record["extra_env_info"]
        right = "ABCD".index(info["expected_answer"])
        assert info["choices"][right] == "the sun"
        assert sorted(info["choices"]) == sorted({"the sun", "a stone", "the moon", *(["a lamp"] if name == "gpqa" else [])})
        letters[info["expected_answer"]] += 1
        orders.add(tuple(info["choices"]))
    # Of 200 uniform draws from four letters, 50 are expected of each, with a standard deviation of 6.1.
    assert min(letters.values()) >= 30
    assert len(letters) == len(info["choices"])
    assert len(orders) == math.factorial(len(info["choices"]))
    record = read(row, record_fn=name)
    assert record["extra_env_info"] == load_record_function(name)(dict(reversed(row.items())))["extra_env_info"]
    letter = record["extra_env_info"]["expected_answer"]
    assert rewards(MultipleChoiceEnvironment(), record, letter, "the sun", "the moon") == [1.0, 1.0, 0.0]


def test_an_answer_of_triviaqa_may_be_any_of_its_aliases(read):
    record = read(TRIVIAQA, record_fn="triviaqa")
    assert record["extra_env_info"] == {"expected_answer": "The Sun", "aliases": ["sun", "sol star"]}
    answers = ["Answer: the sun.", "It is Sol (star).", r"\boxed{Sol, star}", "sun", "The moon", "Sun or moon", ""]
    assert rewards(ShortAnswerEnvironment(), record, *answers) == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        ("gpqa", {**GPQA, "Incorrect Answer 3": None}, "the field 'Incorrect Answer 3' is None: expected a text"),
        ("piqa", {**TWO_CHOICES["PIQA"][1], "label": -1}, "the field 'label' is -1: expected 0 or 1"),
        ("winogrande", {**TWO_CHOICES["WinoGrande"][1], "answer": ""}, "the field 'answer' is '': expected 1 or 2"),
        ("boolq", {**BOOLQ, "label": -1}, "the field 'label' is -1: expected true or 1 or false or 0"),
        ("truthfulqa", {**TRUTHFULQA, "mc1_targets": TRUTHFULQA["mc2_targets"]}, "expected `choices` and `labels` with a"),
        ("triviaqa", {**TRIVIAQA, "answer": {"value": "<unk>", "normalized_aliases": []}}, "expected `value` and"),
        ("piqa", GPQA, "the field 'goal' is None.* It has the fields of gpqa: set `record_fn: gpqa`"),
        ("multiple_choice", TWO_CHOICES["WinoGrande"][1], "none of the fields 'question', .* set `record_fn: winogrande`"),
        (None, TRIVIAQA, "set `record_fn: triviaqa`"),
    ],
)
def test_a_row_that_a_layout_cannot_read_names_the_field_or_the_right_layout(read, name, row, problem):
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{problem}"):
        read(row, record_fn=name)


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
        ({"Problem": "6*7?", "Answer": 42}, {"input_key": "Problem", "output_key": "Answer"}, r"\boxed{42}", r"\boxed{41}"),
    ],
    ids=["GSM8K", "MATH-500", "AIME"],
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
