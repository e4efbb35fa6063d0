"""The sections `value` and `teacher`: their meaning, and errors with their line."""

import pytest

COMPANIONS = """\
critical: {}
policy: {backend: hf, model_name: some/model}
value: {backend: valuer, model_name: some/critic}
teacher: {backend: hf, model_name: some/teacher}
"""


def test_value_models_default_to_a_scalar_head_and_teachers_to_an_lm_head(files):
    loaded = files.load(COMPANIONS)
    assert (loaded.run.policy.head, loaded.run.value.head, loaded.run.teacher.head) == ("tokens", "scalar", "tokens")
    assert (loaded.run.policy.frozen, loaded.run.value.frozen, loaded.run.teacher.frozen) == (False, False, True)
    assert loaded.components["value"].name == "valuer"
    assert files.load(loaded.to_yaml()).run == loaded.run


def test_the_head_of_the_policy_follows_from_the_algorithm(files):
    assert files.load("scoring: {}\npolicy: {backend: valuer, model_name: some/model}").run.policy.head == "scalar"


def test_a_run_without_value_and_teacher_sections_has_no_such_models(files, good):
    run = files.load(good).run
    assert (run.value, run.teacher) == (None, None)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "value: {backend: valuer, model_name: some/critic}\n",
            "",
            "value is required. critical needs a value model",
        ),
        ("some/critic}", "some/critic, head: tokens}", "value.head: must be 'scalar'"),
        ("some/critic}", "some/critic, frozen: true}", "value.frozen: must be false"),
        ("some/teacher}", "some/teacher, frozen: false}", "teacher.frozen: must be true"),
        ("some/model}", "some/model, frozen: true}", "policy.frozen: critical trains the policy"),
        ("some/critic}", "some/critic, precision: bfloat16}", "value.precision: valuer computes in float32."),
        ("backend: valuer", "backend: plain", "value.head: scalar is not supported by value"),
        ("value: {backend: valuer, model_name: some/critic}", "value: {}", "value.backend is required. Installed: "),
        ("some/critic}", "some/critic, lr: 1}", "value has no key 'lr'"),
        (
            "some/critic}",
            "some/critic, max_total_sequence_length: 8}",
            "8 tokens are too few for the policy's rows of up to 1024",
        ),
        (
            "some/teacher}",
            "some/teacher, generation: {backend: hf}}",
            "teacher.generation: a teacher does not sample; only the policy does",
        ),
        (
            "some/teacher}",
            "some/teacher, sequence_packing: {enabled: true, train_mb_tokens: 8}}",
            "8 tokens are too few for one",
        ),
        ("some/model}", "some/model, head: scalar}", "policy.head: head is 'scalar', but critical trains"),
        ("critical: {}", "critical: {}\ncluster: {backend: in_process}", "in_process is not supported by value"),
    ],
)
def test_invalid_value_and_teacher_sections_are_reported_with_their_line(files, old, new, says):
    assert old in COMPANIONS
    assert says in "\n".join(files.errors(COMPANIONS.replace(old, new)))


@pytest.mark.parametrize("companion", ["value", "teacher"])
def test_an_unused_value_or_teacher_section_is_an_error(files, good, companion):
    [error] = files.errors(f"{companion}: {{backend: valuer, model_name: some/critic}}\n" + good)
    assert error.startswith("config.yaml:1:")
    assert f"{companion}: grpo does not use a {companion}" in error
