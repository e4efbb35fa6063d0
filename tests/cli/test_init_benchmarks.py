"""`rlcore init` recognizes the layouts of public benchmarks, and its config runs. The contents of the rows are made up."""

import csv
import json

import pytest
import yaml
from command_line import rlcore
from readable_model import make_readable_model

from rl_core.errors import DataError
from rlcore_cli.starter.data_file import recognize

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
COLORS = ["red", "green", "blue", "white"]
ROWS = {
    "boolq": [{"question": f"is {n} even", "passage": f"There are {n} stones.", "answer": n % 2 == 0} for n in range(6)],
    "gpqa": [
        {
            "Question": f"Which color has stone {n}?",
            "Correct Answer": COLORS[n % 4],
            **{f"Incorrect Answer {k}": COLORS[(n + k) % 4] for k in (1, 2, 3)},
        }
        for n in range(6)
    ],
    "humaneval": [
        {"task_id": f"x/{n}", "prompt": "def f(x):\n", "test": "def check(f):\n    assert f(1) == 1\n", "entry_point": "f"}
        for n in range(6)
    ],
    "mbpp": [{"text": "Write f.", "code": "...", "test_list": [f"assert f({n}) == {n}"]} for n in range(6)],
    "multiple_choice": [{"question": f"Stone {n}?", "choices": COLORS, "answer": n % 4, "subject": "x"} for n in range(6)],
    "piqa": [{"goal": f"Lift {n} stones.", "sol1": "Push.", "sol2": "Pull.", "label": n % 2} for n in range(6)],
    "triviaqa": [
        {
            "question": f"Which color has stone {n}?",
            "answer": {"value": COLORS[n % 4], "aliases": [COLORS[n % 4]], "normalized_aliases": [COLORS[n % 4]]},
        }
        for n in range(6)
    ],
    "truthfulqa": [
        {"question": f"Stone {n}?", "mc1_targets": {"choices": COLORS, "labels": [1, 0, 0, 0]}, "mc2_targets": {}}
        for n in range(6)
    ],
    "winogrande": [
        {"sentence": f"Stone {n} hit the cup, as _ fell.", "option1": "stone", "option2": "cup", "answer": str(1 + n % 2)}
        for n in range(6)
    ],
}
GRADERS = dict.fromkeys(ROWS, "multiple_choice") | {"humaneval": "code", "mbpp": "code", "triviaqa": "short_answer"}
NESTED = [
    {"id": "x", "question": {"stem": "Which?", "choices": [{"text": c, "label": c[0]} for c in COLORS]}, "answerKey": "g"}
] * 3
MATH_500 = [
    {"problem": "p - q?", "solution": "...", "answer": answer, "subject": "Algebra", "level": 2, "unique_id": "x"}
    for answer in ("p - q", "(3, 4)", r"\text{Evelyn}")
]


@pytest.mark.parametrize("name", ROWS)
def test_the_rows_of_a_benchmark_are_recognized_by_their_fields(name):
    form = recognize(ROWS[name], "rows.jsonl")
    assert (form.keys, form.algorithms, form.environment) == ({"record_fn": name}, ("grpo",), GRADERS[name])


def test_other_files_of_a_benchmark_are_recognized():
    assert recognize(NESTED, "arc.jsonl").keys == {"record_fn": "multiple_choice"}
    assert recognize(MATH_500, "math500.jsonl").environment == "math"
    aime = [{"ID": "x", "Problem": "6*7?", "Solution": "It is 42.", "Answer": 42}] * 3
    form = recognize(aime, "aime.jsonl")
    assert form.keys == {"input_key": "Problem", "output_key": "Answer"}
    assert recognize([{"question": "6*7?", "answer": "#### 42"}], "gsm8k.jsonl").environment == "math"


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (
            [{"goal": "Lift.", "sol1": "Push.", "sol2": "Pull."}],
            "They are nearest to PIQA, but lack label. To use only a question",
        ),
        ([{**row, "label": -1} for row in ROWS["piqa"]], "nearest to PIQA, but the field 'label' is -1: expected 0 or 1"),
        ([{**row, "answer": ""} for row in ROWS["winogrande"]], "nearest to WinoGrande, but the field 'answer' is ''"),
        ([{**row, "Incorrect Answer 3": None} for row in ROWS["gpqa"]], "nearest to GPQA, but lack Incorrect Answer 3"),
        (
            [{**row, "answer": None} for row in ROWS["multiple_choice"]],
            "HellaSwag, but lack answerKey or answer_index or answer",
        ),
        ([{**row, "answer": 4} for row in ROWS["multiple_choice"]], "HellaSwag, but the field 'answer' is 4: expected one of"),
        (
            [{**row, "answer": None} for row in ROWS["boolq"]],
            "BoolQ, but lack answer or label. To use only a question, or with",
        ),
    ],
)
def test_rows_that_are_almost_those_of_a_benchmark_name_it_and_what_is_missing(rows, problem):
    with pytest.raises(DataError) as refused:
        recognize(rows, "rows.jsonl")
    assert problem in str(refused.value)


def test_rows_with_a_passage_and_an_answer_in_words_are_questions_with_answers():
    rows = [{"question": "Which color?", "passage": "A red stone.", "answer": "red"}] * 3
    assert recognize(rows, "rows.jsonl").keys == {"output_key": "answer"}
    assert recognize([{"question": "6*7?", "answer": "42", "label": "easy"}] * 3, "rows.jsonl").environment is None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_readable_model(tmp_path_factory.mktemp("model"), chat_template=TEMPLATE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["boolq", "gpqa", "multiple_choice", "piqa", "triviaqa", "winogrande"])
def test_a_benchmark_is_initialized_shown_and_evaluated(name, model, tmp_path):
    data = tmp_path / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    if name == "gpqa":
        data = tmp_path / "gpqa.csv"
        with data.open("w", newline="") as file:
            writer = csv.DictWriter(file, ROWS[name][0])
            writer.writeheader()
            writer.writerows(ROWS[name])
    new = tmp_path / "new"
    done = rlcore("init", data, "--validation", data, "--model", model, "--output", new)
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((new / "config.yaml").read_text())
    assert config["env"] == {GRADERS[name]: {}}
    assert config["data"]["prompt"] == {"system_prompt": 'End with a line that consists of "Answer: " and the answer only.'}
    shown = json.loads(rlcore("data", "show", new / "config.yaml", "--json").stdout)
    assert [dataset["rows"] for dataset in shown["datasets"]] == [6, 6]
    assert [(answers["unrewarded"], answers["unscored"]) for answers in shown["answers"]] == [([], 0)]
    settings = ("policy.generation.max_new_tokens=4", "cluster.backend=in_process")
    done = rlcore("eval", new / "config.yaml", "--json", tmp_path / "result.json", *settings)
    assert done.returncode == 0, done.stderr
    [mode] = json.loads((tmp_path / "result.json").read_text())["modes"]
    assert mode["all"]["num_prompts"] == 6
    assert {f"env/{GRADERS[name]}/accuracy", f"env/{GRADERS[name]}/answered_frac"} <= mode["environments"].keys()
