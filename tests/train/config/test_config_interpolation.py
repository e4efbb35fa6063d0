"""`${...}` resolves to config values, defaults and environment variables, keeps their type, and reports unknown references."""

import pytest


def with_length(good, text):
    return good.replace("max_new_tokens: 64", f"max_new_tokens: {text}")


def test_a_written_value_keeps_its_type(files, good):
    assert files.load(with_length(good, "${grpo.num_prompts_per_step}")).run.policy.generation.max_new_tokens == 8


def test_a_default_can_be_interpolated(files, good):
    text = with_length(good, "64\n    hf_cfg: {max_model_len: '${policy.max_total_sequence_length}'}")
    assert files.load(text).run.policy.generation.hf_cfg.max_model_len == 1024


def test_an_override_reaches_what_interpolates_it(files, good):
    loaded = files.load(with_length(good, "${grpo.num_prompts_per_step}"), "grpo.num_prompts_per_step=16")
    assert loaded.run.policy.generation.max_new_tokens == 16


def test_interpolation_crosses_files(files, good):
    files.write("logger: {run_name: 'p${grpo.num_prompts_per_step}'}", "base.yaml")
    assert files.load(f"defaults: base.yaml\n{good}").run.logger.run_name == "p8"


def test_a_whole_section_can_be_interpolated(files, good):
    text = good.replace(
        "  train: {dataset_name: arithmetic}", "  train: {dataset_name: arithmetic}\n  validation: ${data.train}"
    )
    assert files.load(text).run.data.validation == files.load(text).run.data.train


def test_a_file_of_a_package_can_be_named(files, good):
    loaded = files.load(f"{good}\nlogger: {{log_dir: '${{package:rl_core/py.typed}}'}}\n")
    assert str(loaded.run.logger.log_dir).endswith("rl_core/py.typed")
    [error] = files.errors(f"{good}\nlogger: {{log_dir: '${{package:rl_core/no.file}}'}}\n")
    assert "the package 'rl_core' has no file 'no.file'" in error


def test_the_environment_can_be_read(files, good, monkeypatch):
    monkeypatch.setenv("RLCORE_TEST_TOKENS", "32")
    text = with_length(good, "${oc.env:RLCORE_TEST_TOKENS}")
    assert files.load(text).run.policy.generation.max_new_tokens == 32


def test_an_escaped_interpolation_is_text(files, good):
    loaded = files.load(good + "logger: {run_name: 'a\\${b}'}\n")
    assert loaded.run.logger.run_name == "a${b}"


WRONG = {
    "${policy.max_lenght}": "cannot be resolved: there is no key 'policy.max_lenght', in the config or among the defaults.",
    "${policy.model_nam}": "cannot be resolved: there is no key 'policy.model_nam', in the config or among the defaults. Did "
    "you mean ${policy.model_name}?",
    "${policy.generation.max_new_tokens}": "cannot be resolved: it refers back to itself.",
    "${policy}": "cannot be resolved: it refers to the section that contains it.",
    "${oc.env:RLCORE_NO_SUCH}": "cannot be resolved: Environment variable 'RLCORE_NO_SUCH' not found.",
    "${nosuch:1}": "cannot be resolved: Unsupported interpolation type nosuch.",
    "${policy": "'${policy' is not a valid interpolation: write ${section.key}, ${oc.env:NAME} or ${package:NAME/FILE}, "
    "or \\${ for a literal ${.",
    "???": "must be set (`???`): set it in a file that inherits from this one, or in an override.",
}


@pytest.mark.parametrize("text", WRONG)
def test_unresolvable_references_are_reported_once_with_their_line(files, good, text):
    assert files.errors(with_length(good, f"'{text}'")) == [
        f"config.yaml:8:21: policy.generation.max_new_tokens: {WRONG[text]}"
    ]


def test_a_cycle_is_reported_on_each_of_its_lines(files, good):
    text = with_length(good, "${grpo.num_prompts_per_step}").replace(
        "num_prompts_per_step: 8", "num_prompts_per_step: ${policy.generation.max_new_tokens}"
    )
    assert [line.partition(": ")[0] for line in files.errors(text)] == ["config.yaml:2:25", "config.yaml:8:21"]


def test_a_wrong_value_is_blamed_on_the_line_that_interpolates_it(files, good):
    assert files.errors(with_length(good, "${policy.model_name}")) == [
        "config.yaml:8:21: policy.generation.max_new_tokens: must be a whole number, 1 or more; found 'some/model'."
    ]
