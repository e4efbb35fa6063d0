"""`rlcore init` and `rlcore data show`: from a data file to a config that is valid, checked and trains."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_line import rlcore

from rlcore_cli.starter.config_values import Starter, comments, config_values
from rlcore_cli.starter.data_file import has_system_messages, recognize

MODEL = Path(__file__).parents[2] / "examples" / "addition" / "model"
SUMS = [(a, a + 7, 2 * a + 7) for a in range(10, 60)]
FORMATS = {
    "numbers": [{"question": f"{a}+{b}=", "expected_answer": str(c)} for a, b, c in SUMS],
    "texts": [{"problem": f"{a}+{b}=", "answer": "odd" if c % 2 else "even"} for a, b, c in SUMS],
    "prompts": [{"prompt": f"{a}+{b}="} for a, b, c in SUMS],
    "responses": [{"prompt": f"{a}+{b}=", "completion": str(c)} for a, b, c in SUMS],
    "messages": [
        {"messages": [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(c)}]} for a, b, c in SUMS
    ],
    "chats": [
        {"conversations": [{"from": "human", "value": f"{a}+{b}="}, {"from": "gpt", "value": str(c)}]} for a, b, c in SUMS
    ],
    "alpaca": [{"instruction": f"{a}+{b}=", "input": "", "output": str(c)} for a, b, c in SUMS],
    "gsm8k": [{"question": f"{a}+{b}=", "answer": f"It is {c}.\n#### {c}"} for a, b, c in SUMS],
    "verl": [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "reward_model": {"style": "rule", "ground_truth": str(c)},
            "extra_info": {"index": a},
        }
        for a, b, c in SUMS
    ],
    "pairs": [{"prompt": f"{a}+{b}=", "chosen": str(c), "rejected": str(c - 1)} for a, b, c in SUMS],
    "labels": [{"prompt": f"{a}+{b}=", "completion": str(c - a % 2), "label": a % 2 == 0} for a, b, c in SUMS],
}
ALGORITHMS = {
    "numbers": "grpo",
    "texts": "grpo",
    "prompts": "grpo",
    "responses": "sft",
    "messages": "sft",
    "chats": "sft",
    "alpaca": "sft",
    "gsm8k": "grpo",
    "verl": "grpo",
    "pairs": "dpo",
    "labels": "kto",
}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def _one_module_of_rewards():
    """Each test imports the `rewards.py` in its folder."""
    sys.modules.pop("rewards", None)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with the files that `init` wrote, for each format."""
    folder = tmp_path_factory.mktemp("init")
    for name, rows in FORMATS.items():
        done = rlcore("init", write(folder / f"{name}.jsonl", rows), "--model", MODEL, "--output", folder / name)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_a_generated_config_passes_validate_deep(prepared, name):
    config = prepared / name / "config.yaml"
    assert ALGORITHMS[name] in yaml.safe_load(config.read_text())
    done = rlcore("validate", config, "--deep")
    assert done.returncode == 0, done.stderr


def test_a_misspelt_answer_column_is_reported(tmp_path):
    rows = write(tmp_path / "rows.jsonl", [{"question": "1+1=", "anser": "2"}] * 4)
    done = rlcore("init", rows, "--model", MODEL, "--output", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert "Answers: none, because no field is named expected_answer, answer," in done.stdout
    assert "(fields: question, anser)" in done.stdout


def test_rows_that_are_too_few_to_be_split_are_reported(tmp_path):
    rows = write(tmp_path / "rows.jsonl", FORMATS["responses"][:30])
    done = rlcore("init", rows, "--model", MODEL, "--output", tmp_path / "alone")
    assert "Validation: none, because fewer than 40 rows are not split" in done.stdout
    assert "split" not in (tmp_path / "alone" / "config.yaml").read_text()
    both = rlcore("init", rows, "--model", MODEL, "--validation", rows, "--output", tmp_path / "both")
    assert "Validation: none" not in both.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task"), [("numbers", "math"), ("texts", "task"), ("prompts", "task"), ("gsm8k", "math")])
def test_a_generated_environment_passes_check_env(prepared, name, task):
    done = rlcore("check", "env", task, "--config", prepared / name / "config.yaml")
    assert done.returncode == 0, done.stdout
    assert "failed" not in done.stdout


@pytest.mark.parametrize("name", ["texts", "prompts"])
def test_the_test_of_a_generated_reward_function_passes_and_can_fail(prepared, name, tmp_path):
    source = (prepared / name / "rewards.py").read_text()
    (tmp_path / "test_rewards.py").write_text((prepared / name / "test_rewards.py").read_text())
    for text, passes in (
        (source, True),
        (source.replace("return float(", "return 1.0 or (").replace("return 0.0", "return 1.0"), False),
    ):
        (tmp_path / "rewards.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_rewards.py"]
        plain = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is passes, done.stdout


def test_a_config_for_texts_trains_and_reports_the_reward(prepared, tmp_path):
    overrides = [
        "grpo.max_num_steps=1",
        "cluster.backend=in_process",
        f"logger.log_dir={tmp_path}",
        "checkpointing.enabled=false",
    ]
    done = rlcore("train", prepared / "texts" / "config.yaml", "policy.generation.max_new_tokens=4", *overrides)
    assert done.returncode == 0, done.stderr
    [metrics] = tmp_path.glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert any("reward/mean" in step for step in steps)


def test_lengths_follow_from_the_tokens_of_the_rows_and_the_positions_of_the_model(prepared):
    numbers = yaml.safe_load((prepared / "numbers" / "config.yaml").read_text())["policy"]
    chats = yaml.safe_load((prepared / "chats" / "config.yaml").read_text())["policy"]
    positions = json.loads((MODEL / "config.json").read_text())["max_position_embeddings"]
    assert numbers["max_total_sequence_length"] <= positions
    assert numbers["generation"]["max_new_tokens"] == 16
    comment = "longer completions are cut off; 2 x the longest answer (3 tokens), because no prompt asks to reason"
    assert f"# {comment}\n" in (prepared / "numbers" / "config.yaml").read_text()
    assert chats["max_total_sequence_length"] == 16


@pytest.mark.parametrize(
    ("changed", "tokens", "said"),
    [
        ({}, 16, "2 x the longest answer (3 tokens), because no prompt asks to reason"),
        (
            {"has_template": True},
            272,
            "256 for reasoning + 2 x the longest answer (3 tokens); lower it if the model answers at once",
        ),
        ({"grader": "math", "longest_answer": 100}, 464, "256 for reasoning + 2 x the longest answer (100 tokens)"),
        (
            {"grader": "math", "reads_requests": False},
            16,
            "2 x the longest answer (3 tokens), because no prompt asks to reason",
        ),
        ({"longest_answer": 0}, 256, "a default, because the data has no answers"),
        ({"has_template": True, "positions": 128}, 119, "all that the model's 128 positions leave, less than 272: 256 for"),
    ],
)
def test_completions_have_room_for_reasoning_unless_nothing_asks_for_it(changed, tokens, said):
    given = {
        "algorithm": "grpo",
        "model": "m",
        "form": recognize(FORMATS["texts"], "texts.jsonl"),
        "grader": None,
    }
    source = {"train": {"dataset_name": "jsonl", "path": "texts.jsonl"}, "validation": None, "rows": 50, "run_name": "texts"}
    measured = {"has_template": False, "is_small": True, "longest_row": 8, "longest_answer": 3, "positions": None}
    starter = Starter(**given | source | measured | changed)
    assert config_values(starter)["policy"]["generation"]["max_new_tokens"] == tokens
    assert f"longer completions are cut off; {said}" in comments(starter)["policy.generation.max_new_tokens"]


def test_verl_rows_have_their_answers_and_pass_the_rest_to_the_environment(prepared):
    train = yaml.safe_load((prepared / "verl" / "config.yaml").read_text())["data"]["train"]
    assert Path(train.pop("path")).name == "verl.jsonl"
    keys = {"input_key": "prompt", "output_key": "reward_model.ground_truth", "env_keys": ["data_source", "extra_info"]}
    assert train == {"dataset_name": "jsonl", **keys}
    structured = [{**row, "reward_model": {"ground_truth": {"target": ["a"]}}} for row in FORMATS["verl"]]
    form = recognize(structured, "rows.jsonl")
    assert form.answer_key is None
    assert form.keys["env_keys"] == ["data_source", "extra_info", "reward_model.ground_truth"]


@pytest.mark.parametrize("key", ["question", "prompt"])
def test_no_prompt_is_added_to_rows_that_ask_for_a_box(tmp_path, key):
    asked = "{}+1= Put the answer in \\boxed{{}}."
    rows = [{key: asked.format(a), "answer": str(a + 1)} for a, _, _ in SUMS]
    rows = rows if key == "question" else [{**row, key: [{"role": "user", "content": row[key]}]} for row in rows]
    done = rlcore("init", write(tmp_path / "boxes.jsonl", rows), "--model", MODEL, "--output", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((tmp_path / "new" / "config.yaml").read_text())
    assert "prompt" not in config["data"]
    assert config["env"] == {"math": {}}
    assert "overlong_filtering" not in config["grpo"]


@pytest.mark.parametrize("label", [True, "false", 1])
def test_answers_with_a_label_of_any_form_are_recognized(label):
    form = recognize([{"prompt": "1+1=", "completion": "2", "label": label}] * 3, "feedback.jsonl")
    assert (form.algorithms, form.keys) == (("kto",), {"label_key": "label"})


def test_a_label_with_another_name_is_read_if_an_option_names_it(tmp_path):
    rows = [{"query": "1+1=", "response": "2", "answer": "true"}, {"query": "2+2=", "response": "5", "answer": "false"}] * 2
    path, new = write(tmp_path / "feedback.jsonl", rows), tmp_path / "new"
    refused = rlcore("init", path, "--model", MODEL, "--output", new)
    assert refused.returncode == 2
    assert "which is true or false. If answer says whether response is good: --question" in refused.stderr
    advice = re.search(r"--question query --response response --label answer", refused.stderr)
    done = rlcore("init", path, "--model", MODEL, "--output", new, *advice[0].split())
    assert done.returncode == 0, done.stderr
    read = yaml.safe_load((new / "config.yaml").read_text())["data"]["train"]
    keys = {"prompt_key": "query", "completion_key": "response", "label_key": "answer"}
    assert {name: read[name] for name in ("dataset_name", *keys)} == {"dataset_name": "preference", **keys}
    wrong = rlcore("init", path, "--model", MODEL, "--question", "query", "--label", "answer")
    assert "Answers with a label need --question, --response and --label, without --answer." in wrong.stderr


def test_pairs_are_split_into_labelled_answers_for_kto(tmp_path):
    rows = write(tmp_path / "pairs.jsonl", FORMATS["pairs"])
    done = rlcore("init", rows, "--model", MODEL, "--algorithm", "kto", "--output", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    config = tmp_path / "new" / "config.yaml"
    data = yaml.safe_load(config.read_text())["data"]["train"]
    assert (data["dataset_name"], data["split_pairs"]) == ("preference", True)
    assert rlcore("validate", config, "--deep").returncode == 0


def test_data_show_counts_and_shows_the_labels(prepared):
    shown = rlcore("data", "show", prepared / "labels" / "config.yaml", "--rows", "2").stdout
    assert re.search(r"^train: \d+ labelled answers$", shown, flags=re.MULTILINE)
    assert re.search(r"^  desirable: \d+ of \d+ \(\d", shown, flags=re.MULTILINE)
    assert "    label: desirable" in shown
    facts = json.loads(rlcore("data", "show", prepared / "labels" / "config.yaml", "--json").stdout)["datasets"][0]
    assert 0 < facts["desirable"] < facts["rows"]
    assert facts["kind"] == "unpaired"


def test_the_format_is_that_of_most_rows_whatever_the_types_of_the_others():
    rows = [{"question": f"{a}+{b}=", "answer": [c, str(c)][a % 2]} for a, b, c in SUMS]
    rows += [{"question": 5, "answer": 6}, {"question": "1+1=", "answer": None}, {"question": "1+1=", "answer": [2]}]
    assert recognize(rows, "rows.jsonl").answer_key == "answer"
    assert recognize([*FORMATS["pairs"], {"prompt": "1", "chosen": None}, {}], "rows.jsonl").algorithms == ("dpo", "rm", "kto")


def test_a_dirty_preference_export_lists_all_bad_rows_and_is_used_without_them(tmp_path):
    bad = {2: {"rejected": None}, 5: {"chosen": ""}, 9: {"chosen": 5}, 11: {"rejected": None}, 17: {"prompt": None}}
    rows = [json.dumps(row | bad.get(number, {})) for number, row in enumerate(FORMATS["pairs"], start=1)]
    path = tmp_path / "export.jsonl"
    path.write_text("\n".join([*rows[:30], "{", *rows[30:]]))
    command = ("init", path, "--model", MODEL, "--output", tmp_path / "new")
    refused = rlcore(*command)
    assert refused.returncode == 2
    assert "5 of 51 rows cannot be used:\n" in refused.stderr
    assert f"  {path}:2, 11: the field 'rejected' is missing" in refused.stderr
    assert all(f"  {path}:{line}: " in refused.stderr for line in (9, 17, 31))
    assert "With `--skip-bad-rows`, `rlcore init` continues without them" in refused.stderr
    assert "--chat-template" not in refused.stderr
    done = rlcore(*command, "--skip-bad-rows")
    assert done.returncode == 0, done.stderr
    assert f"{path}: 45 rows, each a prompt with a chosen" in done.stdout
    assert yaml.safe_load((tmp_path / "new" / "config.yaml").read_text())["data"]["train"]["on_bad_row"] == "skip"
    shown = rlcore("data", "show", tmp_path / "new" / "config.yaml", "--json")
    assert sum(dataset["rows"] for dataset in json.loads(shown.stdout)["datasets"]) == 45


def test_a_table_with_semicolons_is_read_and_its_wrong_lines_are_listed(tmp_path):
    lines = ["question;answer", *(f"{a}+{b}=;{c}" for a, b, c in SUMS), "", "1;2;3", "4"]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    command = ("init", tmp_path / "table.csv", "--model", MODEL, "--output", tmp_path / "new")
    refused = rlcore(*command)
    assert refused.returncode == 2
    assert "table.csv:53: 3 values, but the file has 2 columns (question, answer)" in refused.stderr
    assert "table.csv:54: 1 values, but the file has 2 columns (question, answer)" in refused.stderr
    (tmp_path / "held_out.csv").write_text("question,answer\n1+1=,2\n1,2,3\n")
    done = rlcore(*command, "--skip-bad-rows", "--validation", tmp_path / "held_out.csv")
    assert done.returncode == 0, done.stderr
    assert f"table.csv: {len(SUMS)} rows, each a question" in done.stdout
    assert f"table.csv:53; {tmp_path}/held_out.csv:3: 3 values" in done.stdout
    assert "table.csv:54: 1 values" in done.stdout
    written = (tmp_path / "new" / "table.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written] == [{"question": f"{a}+{b}=", "answer": str(c)} for a, b, c in SUMS]


def test_another_chat_template_can_be_chosen_for_rows_with_tools(tmp_path):
    tools = [{"type": "function", "function": {"name": "+", "parameters": {"type": "object", "properties": {}}}}]
    rows = [{**row, "tools": tools} for row in FORMATS["messages"]]
    path = write(tmp_path / "tools.jsonl", rows)
    command = ("init", path, "--model", MODEL, "--output", tmp_path / "new")
    refused = rlcore(*command)
    assert refused.returncode == 2
    assert "the chat template leaves out the functions" in refused.stderr
    assert "`--chat-template FILE` uses another chat template" in refused.stderr
    template = tmp_path / "tools.jinja"
    loop = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    template.write_text("{{ tools | tojson if tools }}" + loop)
    done = rlcore(*command, "--chat-template", template)
    assert done.returncode == 0, done.stderr
    config = tmp_path / "new" / "config.yaml"
    assert yaml.safe_load(config.read_text())["policy"]["tokenizer"] == {"chat_template": str(template)}
    assert rlcore("validate", config, "--deep").returncode == 0


@pytest.mark.parametrize("name", ["table.csv", "table.tsv", "array.json"])
def test_files_that_no_dataset_reads_are_converted_to_json_lines(tmp_path, name):
    separator = "\t" if name.endswith("tsv") else ","
    table = "".join(f"{a}+{b}={separator}00{c}\n" for a, b, c in SUMS)
    rows = [{"question": f"{a}+{b}=", "answer": f"00{c}"} for a, b, c in SUMS]
    (tmp_path / name).write_text(json.dumps(rows) if name.endswith("json") else f"question{separator}answer\n{table}")
    done = rlcore("init", tmp_path / name, "--model", MODEL, "--output", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    converted = tmp_path / "new" / f"{Path(name).stem}.jsonl"
    assert [json.loads(line) for line in converted.read_text().splitlines()] == rows
    assert rlcore("validate", tmp_path / "new" / "config.yaml", "--deep").returncode == 0


def test_parquet_files_are_read_in_place(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(FORMATS["responses"]), tmp_path / "rows.parquet")
    done = rlcore("init", tmp_path / "rows.parquet", "--model", MODEL, "--output", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    train = yaml.safe_load((tmp_path / "new" / "config.yaml").read_text())["data"]["train"]
    assert train["dataset_name"] == "parquet"
    assert train["path"] == str(tmp_path / "rows.parquet")
    assert rlcore("validate", tmp_path / "new" / "config.yaml", "--deep").returncode == 0


def test_rows_of_no_known_format_are_refused_with_their_fields(tmp_path):
    path = write(tmp_path / "odd.jsonl", [{"Frage": "1+1=", "Antwort": 2}, {"Frage": "1+2="}])
    done = rlcore("init", path, "--model", MODEL, "--output", tmp_path / "new")
    assert done.returncode == 2
    assert "Frage: str" in done.stderr
    assert "Antwort: int, missing in 1 of 2 rows" in done.stderr
    assert "--question" in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["sums.jsonl", "sums.json"])
def test_a_prompt_that_leaves_no_room_for_a_completion_is_named(tmp_path, name):
    rows = [*FORMATS["numbers"], {"question": "+".join(["11"] * 200) + "=", "expected_answer": "2200"}]
    path = tmp_path / name
    path.write_text(json.dumps(rows)) if path.suffix == ".json" else write(path, rows)
    done = rlcore("init", path, "--model", MODEL, "--output", tmp_path / "new")
    assert done.returncode == 2
    location = f"{path}:51" if path.suffix == ".jsonl" else f"{path}, row 51"
    assert f"error: {location} has 600 tokens and {MODEL} reads 128, which leaves no room" in done.stderr
    assert "Token indices" not in done.stderr
    assert not (tmp_path / "new").exists()


def test_empty_answers_are_reported_and_do_not_change_the_environment(tmp_path):
    rows = [*FORMATS["numbers"], {"question": "1+1=", "expected_answer": ""}]
    path = write(tmp_path / "sums.jsonl", rows)
    done = rlcore("init", path, "--model", MODEL, "--output", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert f"Empty expected answers: 1 of the measured rows, the first is {path}:51;" in done.stdout
    config = tmp_path / "new" / "config.yaml"
    assert "math" in yaml.safe_load(config.read_text())["env"]
    shown = rlcore("data", "show", config, "--graded", 0).stdout
    assert re.search(rf"empty expected answers: 1 of \d+ \(\d\.\d %\); remove these rows: {path}:51\n", shown)


def test_rows_of_a_table_are_located_by_their_lines(tmp_path):
    rows = [f"{a}+{b}=,{c}" for a, b, c in SUMS]
    lines = ["question,answer", "1,2,3", *rows, "", "1+1=,", f"{'+'.join('1' * 20)}=,20"]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    options = ("--model", MODEL, "--output", tmp_path / "new", "--skip-bad-rows")
    done = rlcore("init", tmp_path / "table.csv", *options)
    assert done.returncode == 0, done.stderr
    assert f"Empty expected answers: 1 of the measured rows, the first is {tmp_path}/table.csv:54; remove" in done.stdout
    assert f"Longest row: {tmp_path}/table.csv:55 has " in done.stdout


def test_no_system_prompt_is_added_to_rows_that_have_one(tmp_path):
    system = {"role": "system", "content": "1+1=2"}
    rows = [{"messages": [system, *row["messages"]], "answer": row["messages"][1]["content"]} for row in FORMATS["messages"]]
    form = recognize(rows, "chats.jsonl")
    assert has_system_messages(rows, form)
    assert not has_system_messages(FORMATS["messages"], recognize(FORMATS["messages"], "chats.jsonl"))
    done = rlcore("init", write(tmp_path / "chats.jsonl", rows), "--model", MODEL, "--output", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((tmp_path / "new" / "config.yaml").read_text())
    assert "Prompt: as in the rows, because they have system messages" in done.stdout
    assert "prompt" not in config["data"]
    assert config["env"]["math"] == {"require_box": False}
    assert config["grpo"]["overlong_filtering"] is True
    done = rlcore("init", tmp_path / "chats.jsonl", "--algorithm", "sft", "--model", MODEL, "--output", tmp_path / "sft")
    assert done.returncode == 0, done.stderr


def test_a_row_that_is_much_longer_than_all_others_is_reported(tmp_path):
    long = {"question": f"{'+'.join('1' * 20)}=", "expected_answer": "20"}
    path = write(tmp_path / "sums.jsonl", [*FORMATS["numbers"], long])
    done = rlcore("init", path, "--model", MODEL, "--output", tmp_path / "new")
    assert f"Longest row: {path}:51 has 40 tokens, the next longest " in done.stdout
    usual = rlcore(
        "init", write(tmp_path / "usual.jsonl", FORMATS["numbers"]), "--model", MODEL, "--output", tmp_path / "usual"
    )
    assert "Longest row" not in usual.stdout


def test_fields_can_be_named(tmp_path):
    path = write(tmp_path / "odd.jsonl", [{"Frage": f"{a}+{b}=", "Antwort": c} for a, b, c in SUMS])
    done = rlcore("init", path, "--question", "Frage", "--answer", "Antwort", "--model", MODEL, "--output", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert rlcore("validate", tmp_path / "new" / "config.yaml", "--deep").returncode == 0
    wrong = rlcore("init", path, "--question", "Frage", "--answer", "Antwrt", "--model", MODEL, "--output", tmp_path / "other")
    assert wrong.returncode == 2
    assert "no row has a field 'Antwrt'; row 1 has ['Antwort', 'Frage']" in wrong.stderr


def test_fields_of_preference_pairs_can_be_named(tmp_path):
    path = write(tmp_path / "odd.jsonl", [{"q": f"{a}+{b}=", "good": str(c), "bad": str(c + 1)} for a, b, c in SUMS])
    named = ("init", path, "--model", MODEL, "--chosen", "good")
    done = rlcore(*named, "--rejected", "bad", "--question", "q", "--output", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert "Algorithm: dpo" in done.stdout
    train = yaml.safe_load((tmp_path / "new" / "config.yaml").read_text())["data"]["train"]
    assert (train["prompt_key"], train["chosen_key"], train["rejected_key"]) == ("q", "good", "bad")
    assert rlcore("validate", tmp_path / "new" / "config.yaml", "--deep").returncode == 0
    for options, reason in {
        ("--rejected", "bed", "--question", "q"): "no row has a field 'bed'; row 1 has ['bad', 'good', 'q']",
        ("--question", "q"): "need --chosen and --rejected",
        ("--rejected", "bad"): "with the prompt in a field that --question names",
    }.items():
        wrong = rlcore(*named, *options, "--output", tmp_path / "other")
        assert wrong.returncode == 2
        assert reason in wrong.stderr


@pytest.mark.parametrize(("output", "name"), [("capitals", "capitals"), (".", "train")])
def test_a_run_is_named_after_the_new_folder_or_the_data_file(tmp_path, monkeypatch, output, name):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.jsonl", FORMATS["messages"][:1])
    done = rlcore("init", "train.jsonl", "--model", MODEL, "--output", output)
    assert done.stdout.startswith("train.jsonl: 1 row, each a conversation\n")
    assert "Algorithm: sft\n" in done.stdout
    assert yaml.safe_load((tmp_path / output / "config.yaml").read_text())["logger"] == {"run_name": name}


def test_an_existing_config_is_reported_before_the_model_is_read(tmp_path):
    path = write(tmp_path / "numbers.jsonl", FORMATS["numbers"])
    (tmp_path / "config.yaml").touch()
    done = rlcore("init", path, "--model", MODEL, "--output", tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path}/config.yaml. Choose another folder" in done.stderr
    assert "measuring the rows" not in done.stderr


def test_existing_files_are_never_overwritten(tmp_path):
    path = write(tmp_path / "texts.jsonl", FORMATS["texts"])
    (tmp_path / "rewards.py").write_text("mine = 1\n")
    done = rlcore("init", path, "--model", MODEL, "--output", tmp_path)
    assert done.returncode == 2
    assert "rewards.py" in done.stderr
    assert (tmp_path / "rewards.py").read_text() == "mine = 1\n"
    assert not (tmp_path / "config.yaml").exists()


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("empty.jsonl", "", "has no rows"),
        ("broken.jsonl", '{"question": 1', "broken.jsonl:1"),
        ("broken.json", "[{}", "invalid JSON"),
        ("ragged.csv", "question,answer\n1\n", "ragged.csv:2"),
        ("numbers.json", "[1, 2]", "element 1 is a int"),
    ],
)
def test_unreadable_files_are_refused_with_their_location(tmp_path, name, text, reason):
    (tmp_path / name).write_text(text)
    done = rlcore("init", tmp_path / name, "--model", MODEL, "--output", tmp_path / "new")
    assert done.returncode == 2
    assert reason in done.stderr


def test_fields_with_unknown_names_lead_to_a_command_with_these_names(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("id,my text,label\n1,a long question,A\n2,another,B\n3,a third,A\n")
    done = rlcore("init", path, "--model", MODEL, "--output", tmp_path / "new")
    assert done.returncode == 2
    assert f"rlcore init {path} --question 'my text' --answer label" in done.stderr


def test_an_algorithm_that_does_not_fit_the_rows_is_refused(tmp_path):
    path = write(tmp_path / "pairs.jsonl", FORMATS["pairs"])
    done = rlcore("init", path, "--algorithm", "grpo", "--model", MODEL, "--output", tmp_path / "new")
    assert done.returncode == 2
    assert "dpo or rm or kto" in done.stderr
    assert "docs/algorithms/index.md" in done.stderr


def test_data_show_measures_lengths_finds_duplicates_and_answers_that_cannot_be_graded(tmp_path):
    rows = [*FORMATS["numbers"], FORMATS["numbers"][0], {"question": "how many?", "expected_answer": "\\boxed{"}]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "validation.jsonl", [*FORMATS["numbers"][:3], {"question": "90+9=", "expected_answer": "99"}])
    assert rlcore(
        "init", tmp_path / "train.jsonl", "--validation", tmp_path / "validation.jsonl", "--model", MODEL, "--output", tmp_path
    ).returncode in (0, 2)
    shorter = ("policy.max_total_sequence_length=7", "policy.generation.max_new_tokens=1")
    done = rlcore("data", "show", tmp_path / "config.yaml", "--json", *shorter)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    train, validation = shown["datasets"]
    assert (train["rows"], train["repeated"]) == (52, 1)
    assert (validation["rows"], validation["shared_with_training"]) == (4, 3)
    assert train["too_long"] == sum(length > 6 for length in train["lengths"]) > 0
    lines = [f"{tmp_path / 'train.jsonl'}:{row + 1}" for row, length in enumerate(train["lengths"]) if length > 6]
    assert train["locations"]["too_long"] == lines[:3]
    assert shown["answers"][0]["unrewarded"] == ["\\boxed{"]
    text = rlcore("data", "show", tmp_path / "config.yaml", "--graded", 8).stdout
    assert f"same prompt as an earlier row: 1 of 52 (1.9 %): {tmp_path / 'train.jsonl'}:51\n" in text
    checked = [f"{tmp_path / 'validation.jsonl'}:{line}" for line in (1, 2, 3)]
    assert f"same prompt as a training row: 3 of 4 (75.0 %): {', '.join(checked)}\n" in text
    assert "; 8 of 52 rows, --graded N for more\n" in text


def test_data_show_groups_equal_answers_and_counts_rows_that_are_not_scored(tmp_path):
    rows = [{"question": f"{n}+1=", "expected_answer": answer} for n, answer in enumerate(["A", "c", "B ", "c", "?", "A"])]
    path = write(tmp_path / "labels.jsonl", rows)
    done = rlcore("init", path, "--own-reward", "--model", MODEL, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    unwritable = "with text that the model's tokenizer cannot represent, so the model cannot write them"
    assert f"Answers {unwritable}: 6, the first is {path}:1\n" in done.stdout
    reward = "None if expected_answer == '?' else float(expected_answer in 'AB' and completion == expected_answer)"
    (tmp_path / "rewards.py").write_text(f"def reward(completion, expected_answer):\n    return {reward}\n")
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    config["env"]["task"]["reward_fn"] = "rewards.reward"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    text = rlcore("data", "show", tmp_path / "config.yaml", "--rows", 6).stdout
    assert "    expected: 'B '\n" in text
    assert f"answers with <unk>, which the model cannot write: 6 of 6 (100.0 %): {path}:1, {path}:2, {path}:3\n" in text
    assert "no more than a wrong one: 3 of 6 (50.0 %), not scored: 1 (as 'ANSWER')\n" in text
    assert f"  'c' 2 rows, first {path}:2\n  'B ' 1 row, first {path}:3\n" in text
    checked = rlcore("check", "env", "task", "--config", tmp_path / "config.yaml").stdout
    assert "2 of 6 expected answers got more than a wrong one; their mean reward is 1; the others: 'c', 'B ', '?'" in checked
    assert "`rlcore data show --graded N` lists them with their rows" in checked


def test_all_empty_responses_of_supervised_data_are_refused(tmp_path):
    empty = {"question": "1+1=", "expected_answer": ""}
    path = write(tmp_path / "sums.jsonl", [*FORMATS["numbers"], empty, FORMATS["numbers"][0], empty])
    done = rlcore("init", path, "--algorithm", "sft", "--model", MODEL, "--output", tmp_path / "new")
    assert done.returncode == 2
    assert f"{path}:51, 53: the response is empty, so that only its end would be trained" in done.stderr


def test_data_show_counts_text_that_the_tokenizer_cannot_represent(prepared):
    # The model's tokenizer has no letters: the template is text, the rows are sums.
    template = "data.prompt.prompt_config=generic/math"
    command = ("data", "show", prepared / "numbers" / "config.yaml", "--graded", 0)
    shown = {
        "numbers": json.loads(rlcore(*command, "--json", template).stdout)["datasets"][0],
        "messages": json.loads(rlcore(*command, "--json").stdout)["datasets"][0],
    }
    assert shown["numbers"]["unknown_token"] == "<unk>"
    first = shown["numbers"]["samples"][0]
    assert shown["numbers"]["unknown"][first["index"]] == first["text"].count("<unk>") > 0
    assert not any(shown["messages"]["unknown"])
    in_each_row = shown["numbers"]["unknown_in_prompt"]
    assert set(shown["numbers"]["unknown"]) == {in_each_row}
    text = rlcore(*command, template).stdout
    assert f"    {in_each_row} of them in each row come from the prompt that the config adds" in text
    assert "the others" not in text
    rows = len(shown["numbers"]["unknown"])
    assert f"rows with <unk>: {rows} of {rows} (100.0 %), {sum(shown['numbers']['unknown'])} tokens." in text


def test_unknown_text_of_the_data_is_not_blamed_on_the_prompt(tmp_path):
    write(tmp_path / "words.jsonl", [{"question": "one+1=", "expected_answer": "2"}] * 4)
    assert rlcore("init", tmp_path / "words.jsonl", "--model", MODEL, "--output", tmp_path).returncode == 0
    text = rlcore("data", "show", tmp_path / "config.yaml", "--graded", 0).stdout
    assert "rows with <unk>: 4 of 4 (100.0 %), 12 tokens." in text
    assert "It comes from the data or the chat template." in text
    assert "data.prompt" not in text


def test_no_prompt_is_written_that_the_tokenizer_cannot_represent(prepared, tmp_path):
    for name in ("numbers", "texts", "gsm8k"):
        config = yaml.safe_load((prepared / name / "config.yaml").read_text())
        assert "prompt" not in config["data"]
        assert name == "texts" or config["env"]["math"] == {"require_box": False}
    path = write(tmp_path / "numbers.jsonl", FORMATS["numbers"])
    done = rlcore("init", path, "--model", MODEL, "--output", tmp_path / "new")
    assert "Prompt: none, because the model's tokenizer has no tokens for its words" in done.stdout


def test_data_show_marks_the_tokens_that_are_trained(prepared):
    done = rlcore("data", "show", prepared / "messages" / "config.yaml", "--rows", "1")
    assert done.returncode == 0, done.stderr
    row = re.search(r"\| (\d+)\+(\d+)=(\d+)<eos>", done.stdout)
    assert f"trained: '{row[3]}<eos>'" in done.stdout


def test_options_name_nested_fields(tmp_path):
    rows = write(tmp_path / "rows.jsonl", [{"task": {"ask": f"{a}+{b}=", "key": {"sum": c}}} for a, b, c in SUMS])
    done = rlcore(
        *("init", rows, "--model", MODEL, "--output", tmp_path / "new", "--question", "task.ask", "--answer", "task.key.sum")
    )
    assert done.returncode == 0, done.stderr
    train = yaml.safe_load((tmp_path / "new" / "config.yaml").read_text())["data"]["train"]
    assert (train["input_key"], train["output_key"]) == ("task.ask", "task.key.sum")
    assert rlcore("validate", tmp_path / "new" / "config.yaml", "--deep").returncode == 0
