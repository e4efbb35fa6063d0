"""`key=value` sets existing keys and `++key=value` adds keys; values are typed as YAML, and errors name the override."""

import pytest


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("0.5", 0.5), ("7", 7.0), (" 3.5 ", 3.5)],
)
def test_a_value_has_the_type_that_yaml_gives_it(files, good, text, value):
    assert files.load(good, f"policy.max_grad_norm={text}").run.policy.max_grad_norm == value


def test_lists_mappings_null_and_quoted_text_can_be_given(files, good):
    run = files.load(
        good,
        "policy.generation.stop_strings=['</s>', \"a=b\"]",
        "policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 1}}",
        "policy.max_grad_norm=null",
        "logger.run_name='007'",
    ).run
    assert run.policy.generation.stop_strings == ["</s>", "a=b"]
    assert run.policy.optimizer.kwargs == {"lr": 1}
    assert run.policy.max_grad_norm is None
    assert run.logger.run_name == "007"


def test_an_override_wins_over_the_file_and_the_last_one_over_the_others(files, good):
    assert (
        files.load(good, "grpo.num_prompts_per_step=3", "grpo.num_prompts_per_step=4").run.algorithm.num_prompts_per_step == 4
    )


def test_one_item_of_a_list_can_be_set(files, good):
    text = good.replace("max_new_tokens: 64", "stop_strings: [a, b, c]")
    for key in ("policy.generation.stop_strings.1", "policy.generation.stop_strings[1]"):
        assert files.load(text, f"{key}=z").run.policy.generation.stop_strings == ["a", "z", "c"]


def test_a_key_that_only_the_model_has_needs_no_plus(files, good):
    assert files.load(good, "cluster.deadlines.train_s=5").run.cluster.deadlines.train_s == 5.0


def test_a_section_of_the_schema_needs_no_plus_even_if_the_file_does_not_have_it(files, good):
    data = files.load(good, "data.validation={dataset_name: arithmetic}").run.data
    assert data.validation.dataset_name == "arithmetic"


def test_one_keyword_of_the_default_optimizer_leaves_its_others(files, good):
    kwargs = files.load(good, "policy.optimizer.kwargs.lr=3e-4").run.policy.optimizer.kwargs
    assert kwargs == {"lr": 3e-4, "weight_decay": 0.0}


def test_plus_adds_to_a_free_mapping_and_adds_a_task(files, good):
    run = files.load(good, "++policy.optimizer.kwargs.betas=[0.9, 0.95]", "++env.math.num_workers=2").run
    assert run.policy.optimizer.kwargs["betas"] == [0.9, 0.95]
    assert run.env["math"].num_workers == 2


def test_plus_also_sets_existing_keys(files, good):
    assert files.load(good, "++grpo.num_prompts_per_step=5").run.algorithm.num_prompts_per_step == 5


def test_a_new_key_of_a_free_mapping_needs_the_plus(files, good):
    assert files.errors(good, "policy.optimizer.kwargs.betas=[0.9, 0.95]", "env.math.num_workers=2") == [
        "override #1 `policy.optimizer.kwargs.betas=[0.9, 0.95]`: policy.optimizer.kwargs.betas: "
        "policy.optimizer.kwargs.betas exists neither in the file nor in the schema: to add it, write "
        "++policy.optimizer.kwargs.betas=...",
        "override #2 `env.math.num_workers=2`: env.math.num_workers: env.math exists neither in the file nor in the "
        "schema: to add it, "
        "write ++env.math.num_workers=...",
    ]


def test_an_override_of_a_setting_of_another_library_suggests_our_key(files, good):
    [error] = files.errors(good, "policy.optimizer.kwargs.learning_rate=1e-3")
    assert "nor in the schema: did you mean policy.optimizer.kwargs.lr? To add it, write ++" in error


@pytest.mark.parametrize("key", ["data.mix.hard", "data.validation_sets.hard", "logger.loggers.mlflow"])
def test_a_new_named_section_needs_the_plus(files, good, key):
    errors = "\n".join(files.errors(good, f"{key}.enabled=true"))
    assert f"{key} exists neither in the file nor in the schema: to add it, write ++{key}.enabled=..." in errors


def test_a_plus_cannot_add_unknown_keys(files, good):
    assert files.errors(good, "++policy.modle_name=x") == [
        "override #1 `++policy.modle_name=x`: policy.modle_name: policy has no key 'modle_name'. Did you mean 'model_name'?"
    ]


def test_a_wrong_value_is_blamed_on_the_override_and_not_on_the_file(files, good):
    assert files.errors(good, "cluster.num_nodes=1", "grpo.val_batch_size=two") == [
        "override #2 `grpo.val_batch_size=two`: grpo.val_batch_size: must be a whole number, 1 or more; found 'two'."
    ]


def test_a_key_of_another_section_is_found(files, good):
    assert files.errors(good, "policy.temperature=1", "policy.lr=1") == [
        "override #1 `policy.temperature=1`: policy.temperature: policy has no key 'temperature'. Did you mean "
        "policy.generation.temperature?",
        "override #2 `policy.lr=1`: policy.lr: policy has no key 'lr'. Did you mean policy.optimizer.kwargs.lr?",
    ]


MALFORMED = {
    "policy.precision": "Overrides have the form key=value without spaces, such as policy.precision=bfloat16.",
    "other.yaml": "Overrides have the form key=value without spaces, such as policy.precision=bfloat16. To layer "
    "several config files, give the first ones with --config, or use `defaults:` in the last.",
    "+policy.precision=float32": "The prefix `+` is not supported: use `++key=value` to add a key, or `key=value` to set one.",
    "policy..precision=float32": "The key before `=` has an empty component: write it like policy.precision=bfloat16, without "
    "spaces.",
    "=3": "The key before `=` has an empty component: write it like policy.precision=bfloat16, without spaces.",
    "policy.precision=": "There is no value after `=`: use null for no value, '' for an empty string.",
    "logger.run_name=#1": "There is no value after `=`: text that starts with `#` must be quoted.",
    "defaults=base.yaml": "`defaults` is read before overrides are applied: set it in a file.",
    "logger.run_name=[a": "Invalid YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'.",
    "policy.model_name.x=3": "policy.model_name.x: policy.model_name is 'some/model' (config.yaml:5:15), which has no keys.",
    "policy.generation={backend: hf, backend: hf}": "backend: This key is already set at override #1 "
    "`policy.generation={backend: hf, backend: hf}`: remove one of the two.",
}


@pytest.mark.parametrize("override", MALFORMED)
def test_a_malformed_override_is_an_error_that_shows_the_syntax(files, good, override):
    assert files.errors(good, override) == [f"override #1 `{override}`: {MALFORMED[override]}"]


def test_a_position_beyond_a_list_is_refused(files, good):
    text = good.replace("max_new_tokens: 64", "stop_strings: [a, b]")
    assert files.errors(text, "policy.generation.stop_strings.2=c") == [
        "override #1 `policy.generation.stop_strings.2=c`: policy.generation.stop_strings.2: policy.generation.stop_strings is "
        "a list of 2: valid indices are 0 to 1."
    ]


@pytest.mark.parametrize("key", ["data.train.operations.0", "data.train.operations[0]", "++data.train.operations.0"])
@pytest.mark.parametrize("written", ["", ", operations: null"])
def test_an_item_of_a_list_that_the_file_does_not_set_is_refused(files, good, key, written):
    text = good.replace("arithmetic}", f"arithmetic{written}}}")
    override = f"{key}=-"
    assert files.errors(text, override) == [
        f"override #1 `{override}`: data.train.operations: no file sets this list, so it has no item 0: set the whole list, "
        f"{'++' * key.startswith('++')}data.train.operations=[...]. Its default is ['+']."
    ]


def test_brackets_do_not_create_a_list_in_a_section_with_free_keys(files, good):
    override = "++policy.optimizer.kwargs.betas[0]=0.9"
    assert files.errors(good, override) == [
        f"override #1 `{override}`: policy.optimizer.kwargs.betas: no file sets this list, so it has no item 0: set the whole "
        "list, ++policy.optimizer.kwargs.betas=[...]."
    ]


def test_several_items_of_a_missing_list_are_one_error_each(files, good):
    errors = files.errors(good, "data.train.operations.0=-", "data.train.operations.1=+")
    assert [line.split("`")[1] for line in errors] == ["data.train.operations.0=-", "data.train.operations.1=+"]


def test_a_list_set_by_an_earlier_override_has_items(files, good):
    run = files.load(good, "data.train.operations=['-', '*']", "data.train.operations.1=+").run
    assert run.data.train.operations == ["-", "+"]


def test_a_number_is_still_a_key_of_a_mapping(files, good):
    assert "7" in files.load(good, "++env.7.name=math").run.env


def test_a_null_section_can_be_opened(files, good):
    text = good.replace("  generation:", "  scheduler: null\n  generation:")
    assert files.load(text, "policy.scheduler.name=linear").run.policy.scheduler.name == "linear"


def test_overrides_reach_the_choice_of_the_backend(files, good):
    errors = files.errors(good, "policy.backend=megatron")
    assert errors == [
        "override #1 `policy.backend=megatron`: policy.backend: Policy backend 'megatron' is not installed: "
        "rl-backends-megatron is not published; in a checkout of the repository, pip install ./rl_backends_megatron."
    ]


def test_errors_of_overrides_come_last_and_in_their_order(files, good):
    overrides = [f"cluster.no{n}=1" for n in range(1, 13)]
    errors = files.errors(good.replace("num_prompts_per_step: 8", "num_prompts_per_step: 0"), *overrides)
    assert errors[0].startswith("config.yaml:2:25: ")
    assert [line.split("`")[1] for line in errors[1:]] == overrides


def test_a_key_of_the_file_may_contain_dots(files, good):
    task = good.replace("arithmetic: {}", "games.Sums: {name: arithmetic}")
    run = files.load(task, "env.games.Sums.num_workers=2", "++env.games.Sums.step_timeout_s=5").run
    assert (run.env["games.Sums"].num_workers, run.env["games.Sums"].step_timeout_s) == (2, 5)
    assert list(files.load(task, "env.games.Sums=null", "++env.sums={name: arithmetic}").run.env) == ["sums"]
