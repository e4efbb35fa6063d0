"""`rlcore validate --deep` checks imports, tokenizer, data and model config without reading weights or starting anything."""

import json
import re
import shutil
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml
from huggingface_hub import HfApi

from rlcore_cli.main import main

MODEL = Path(__file__).parents[2] / "examples" / "addition" / "model"


@pytest.fixture
def validate(tmp_path, monkeypatch, capsys):
    """Run the command on a config; returns exit code and output. The model has all files except weights."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+2=", "chosen": "3", "rejected": "4"}\n' * 4)

    def run(changes, *options):
        config = {
            "dpo": {"global_batch_size": 2},
            "policy": {"backend": "hf", "model_name": str(model), "max_total_sequence_length": 16, **changes.get("policy", {})},
            "data": {"train": {"dataset_name": "preference", "path": str(tmp_path / "pairs.jsonl")}},
        } | {key: value for key, value in changes.items() if key != "policy"}
        config = {key: value for key, value in config.items() if value is not None}
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        monkeypatch.setattr(sys, "argv", ["rlcore", "validate", str(path), *options])
        monkeypatch.setattr(sys, "path", list(sys.path))
        code = 0
        try:
            main()
        except SystemExit as left:
            code = left.code or 0
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_a_valid_config_passes_without_model_weights(validate):
    code, output = validate({}, "--deep")
    assert code == 0, output
    assert "run.yaml is valid" in output


def test_more_tokens_than_the_model_has_rotary_positions_for_are_a_warning(validate):
    code, output = validate({"policy": {"max_total_sequence_length": 129}}, "--deep")
    assert code == 0, output
    assert "warning: policy.max_total_sequence_length: 129 tokens" in output
    code, output = validate({"policy": {"max_total_sequence_length": 129}}, "--deep", "--json")
    [warning] = json.loads(output)["warnings"]
    assert warning.startswith("policy.max_total_sequence_length: 129 tokens")


DEEP = {
    "a template for chats that does not render": (
        {"policy": {"tokenizer": {"chat_template": "{% for %}"}}},
        "data",
    ),
    "an expression for adapters that matches no layer": (
        {"policy": {"hf_cfg": {"lora": {"target_modules": ".*nothing"}}}},
        "policy.hf_cfg.lora.target_modules: '.*nothing' as a regular expression",
    ),
    "a field that the model's config lacks": (
        {"policy": {"hf_cfg": {"config_overrides": {"num_layerz": 3}}}},
        "policy.hf_cfg.config_overrides.num_layerz: the LlamaConfig",
    ),
    "a batch that the data cannot fill": ({"dpo": {"global_batch_size": 64}}, "has 4 records, but a step uses 64"),
    "an end-of-sequence token that the model does not have": (
        {
            "policy": {"generation": {"backend": "hf", "max_new_tokens": 4, "eos_token_id": 3}},
            "dpo": None,
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2},
            "env": {"math": {"env_cls": "math"}},
            "data": {"train": {"dataset_name": "jsonl", "path": "pairs.jsonl", "input_key": "prompt", "output_key": "chosen"}},
        },
        "policy.generation.eos_token_id: eos_token_id is 3, but the end-of-sequence tokens of the model are [1]",
    ),
    "a plugin that cannot be imported": (
        {"logger": {"loggers": {"rl_train.metrics.logger.Missing": {}}}},
        "logger.loggers.rl_train.metrics.logger.Missing",
    ),
}


def test_tables_without_rows_are_errors(validate, tmp_path):
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "train.csv").write_text("prompt,chosen,rejected\n")
    (tmp_path / "pairs" / "README.md").write_text("Sums")
    code, output = validate({"data": {"train": {"dataset_name": "preference_huggingface", "path": "pairs"}}}, "--deep")
    assert code == 2
    assert "pairs cannot be loaded: it has no rows. A dataset needs at least one row" in output

    columns = dict.fromkeys(("prompt", "chosen", "rejected"), pyarrow.array([], pyarrow.string()))
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "pairs.parquet")
    code, output = validate({"data": {"train": {"dataset_name": "preference_parquet", "path": "pairs.parquet"}}}, "--deep")
    assert code == 2
    assert "data.train: " in output
    assert "pairs.parquet has no preference to train on (it is empty)" in output


@pytest.mark.parametrize("case", DEEP)
def test_errors_that_need_libraries_or_data_are_reported_at_their_key(validate, case):
    changes, says = DEEP[case]
    code, output = validate(changes, "--deep")
    assert code == 2
    assert says in output
    assert "Traceback" not in output


def test_a_misspelt_field_is_reported_once_at_its_key(validate, tmp_path):
    train = {"dataset_name": "jsonl", "path": str(tmp_path / "pairs.jsonl"), "input_key": "prompt", "output_key": "chosne"}
    code, output = validate({"dpo": None, "sft": {"global_batch_size": 2}, "data": {"train": train}}, "--deep")
    assert code == 2
    assert output.count("the field 'chosne' (`output_key`) is missing") == 1
    assert re.search(r"run\.yaml:\d+:\d+: data\.train\.output_key: ", output)
    assert "has 1 error:" in output


def test_a_later_row_that_is_bad_is_found_by_the_deep_check_only(validate, tmp_path):
    rows = tmp_path / "pairs.jsonl"
    rows.write_text(rows.read_text() + json.dumps({"prompt": "1+2=", "chosen": "3"}) + "\n")
    assert validate({})[0] == 0
    code, output = validate({}, "--deep")
    assert code == 2
    assert f"data.train.path: {rows}:5: the field 'rejected' is missing" in output
    assert re.search(r"run\.yaml:\d+:\d+: data\.train\.path: ", output)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "1+2=", "chosen": "3" * 20, "rejected": "4"}, "has 25 tokens, but 16 are allowed"),
        ('{"prompt": "1+2=", "chosen": ' + "9" * 5000 + ', "rejected": "4"}', "an integer of more than 4300 digits"),
    ],
    ids=["a row over the limit of tokens", "an integer too long for Python"],
)
def test_a_row_that_would_end_the_run_at_a_later_step_is_found_with_its_line(validate, tmp_path, row, says):
    with (tmp_path / "pairs.jsonl").open("a") as file:
        file.write((row if isinstance(row, str) else json.dumps(row)) + "\n")
    code, printed = validate({}, "--deep")
    assert code == 2
    assert "pairs.jsonl:5" in printed
    assert says in " ".join(printed.split())
    assert "Traceback" not in printed


MISSING = {
    "a name on the hub": ({"policy": {"model_name": "nobody/none-such"}}, "policy.model_name: 'nobody/none-such' is neither"),
    "a folder of several levels": (
        {"policy": {"model_name": "no/such/model"}},
        "policy.model_name: 'no/such/model' does not exist",
    ),
    "an absolute folder": ({"policy": {"model_name": "/no/model"}}, "policy.model_name: '/no/model' does not exist. "),
    "a name that no hub accepts": (
        {"policy": {"model_name": "my model!"}},
        "policy.model_name: 'my model!' is not an existing",
    ),
    "a tokenizer": (
        {"policy": {"tokenizer": {"name": "nobody/none-such"}}},
        "policy.tokenizer.name: 'nobody/none-such' is neither",
    ),
    "a chat template": (
        {"policy": {"tokenizer": {"chat_template": "none.jinja"}}},
        "chat_template: 'none.jinja' does not exist in ",
    ),
    "a data file": (
        {"data": {"train": {"dataset_name": "preference", "path": "none.jsonl"}}},
        "data.train.path: 'none.jsonl' does not exist in ",
    ),
}


@pytest.mark.parametrize("is_offline", [True, False])
@pytest.mark.parametrize("case", MISSING)
def test_each_missing_file_or_model_is_one_error_at_its_key_with_a_fix(validate, monkeypatch, case, is_offline):
    changes, says = MISSING[case]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: HfApi(endpoint="http://127.0.0.1:9"))
    code, output = validate(changes, "--deep")
    assert code == 2
    assert "has 1 error:" in output, output
    assert re.search(rf"run\.yaml:\d+:\d+: .*{re.escape(says)}", output), output
    assert re.search(r"\. (Give|Use|Set|Check) ", output)
    assert not re.search("HFValidationError|Repo id|Traceback|huggingface.co/docs|OfflineModeIsEnabled", output), output


def test_a_missing_model_that_two_sections_name_is_one_error(validate):
    teacher = {"backend": "hf", "model_name": "nobody/none-such", "max_total_sequence_length": 16}
    generation = {"backend": "hf", "max_new_tokens": 4}
    changes = {
        "dpo": None,
        "distillation": {"num_prompts_per_step": 2},
        "policy": {"model_name": "nobody/none-such", "generation": generation},
        "teacher": teacher,
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 8}},
    }
    code, output = validate(changes, "--deep")
    assert code == 2
    assert "has 1 error:" in output, output
    assert "policy.model_name: 'nobody/none-such' is neither a local path nor in the hub's cache, and " in output


@pytest.mark.parametrize("key", ["model", "data"])
def test_a_mistake_in_files_that_the_quick_checks_report_is_one_error(validate, tmp_path, key):
    (tmp_path / "bare").mkdir()
    (tmp_path / "empty.jsonl").touch()
    changes, says = {
        "model": ({"policy": {"model_name": str(tmp_path / "bare")}}, "has no config.json, so it is not a model folder."),
        "data": ({"data": {"train": {"dataset_name": "preference", "path": "empty.jsonl"}}}, "empty.jsonl is empty: "),
    }[key]
    code, output = validate(changes, "--deep")
    assert code == 2
    assert "has 1 error:" in output, output
    assert says in output


def test_a_long_check_is_reported_at_intervals_except_in_json(validate, monkeypatch):
    monkeypatch.setattr("rlcore_cli.validate._REPORT_S", 0.001)
    assert "checking classes, model files and data: " in validate({}, "--deep")[1]
    assert json.loads(validate({}, "--deep", "--json")[1])["valid"]
