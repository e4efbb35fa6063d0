"""Relative paths: relative to the working directory first, else to the file that contains them; names stay names."""

import pytest


@pytest.fixture
def model(files):
    """A model folder next to the config."""
    folder = files.folder / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_next_to_the_config_is_found(files, good, model):
    assert files.load(good.replace("some/model", "models/tiny")).run.policy.model_name == str(model)


def test_the_working_directory_comes_first(files, good, model, monkeypatch, tmp_path):
    here = tmp_path / "work" / "models" / "tiny"
    here.mkdir(parents=True)
    (here / "config.json").write_text("{}")
    assert files.load(good.replace("some/model", "models/tiny")).run.policy.model_name == str(here)


def test_a_path_of_an_inherited_file_is_relative_to_that_file(files, good):
    files.write("{}", "base/tokenizer.json")
    files.write("policy: {tokenizer: {name: tokenizer.json}}", "base/base.yaml")
    loaded = files.load(f"defaults: base/base.yaml\n{good}")
    assert loaded.run.policy.tokenizer.name == str(files.folder / "base" / "tokenizer.json")


def test_a_path_of_an_override_is_relative_to_the_working_directory(files, good, model):
    assert files.load(good, "policy.model_name=models/tiny").run.policy.model_name == "models/tiny"
    assert files.load(good, f"policy.model_name={model}").run.policy.model_name == str(model)


def test_a_name_that_is_not_a_file_is_kept_as_a_name(files, good):
    assert files.load(good).run.policy.model_name == "some/model"


@pytest.mark.parametrize("path", ["./model", "~/no-such-model", "/no/such/model", "weights.gguf"])
def test_a_value_that_can_only_be_a_path_must_exist(files, good, path):
    line = files.errors(good.replace("some/model", path))[0]
    searched = "" if path.startswith(("~", "/")) else f" in {files.folder.parent}/work or in "
    assert line.startswith(f"config.yaml:5:15: policy.model_name: '{path}' does not exist{searched}")
    assert line.endswith(" Give an existing path, or the name of a model on the hub.")


def test_a_missing_chat_template_is_not_said_to_be_a_name_on_the_hub(files, good):
    text = good.replace("  generation:", "  tokenizer: {chat_template: ./none.jinja}\n  generation:")
    [line] = files.errors(text)
    assert "policy.tokenizer.chat_template: './none.jinja' does not exist in " in line
    assert line.endswith(". Give an existing path.")


def test_a_data_file_must_exist(files, good):
    text = good.replace("train: {dataset_name: arithmetic}", "train_data_path: rows.jsonl")
    line = files.errors(text)[0]
    assert line.startswith("config.yaml:10:20: data.train.path: 'rows.jsonl' does not exist in ")


def test_a_template_with_line_breaks_is_not_read_as_a_file_name(files, good):
    text = good.replace("  generation:", "  tokenizer:\n    chat_template: |\n      {{ x }}\n      {{ y }}\n  generation:")
    assert files.load(text).run.policy.tokenizer.chat_template == "{{ x }}\n{{ y }}\n"
