"""Valid sections that are incompatible are errors with a reason and a fix."""

import pytest

WRONG_IN_GOOD = {
    ("  generation:\n    backend: hf\n    max_new_tokens: 64\n", ""): [
        "config.yaml:3:1: policy.generation is required. grpo samples from the policy. Choose a generation `backend`."
    ],
    ("env:\n  arithmetic: {}\n", ""): [
        "config.yaml:1:1: env is required. grpo trains on rewards from an environment. Add one, such as `math:`."
    ],
    ("  train: {dataset_name: arithmetic}", "  shuffle: true"): [
        "config.yaml:9:1: data.train is required. grpo needs training data. Set `dataset_name`, or `data.train_data_path`."
    ],
    ("step: 8", "step: 8\n  val_period: 5"): [
        "config.yaml:3:15: grpo.val_period: enables validation, but there is no validation data: set data.validation or "
        "data.split, or disable validation."
    ],
    ("tokens: 64", "tokens: 64\n    hf_cfg: {repetition_penalty: 1.3}"): [
        "config.yaml:9:34: policy.generation.hf_cfg.repetition_penalty: grpo cannot train on samples from changed logits: "
        "the policy scores tokens without the change, so every probability ratio would be "
        "wrong. Set it to 1.0."
    ],
    ("tokens: 64", "tokens: 1024"): [
        "config.yaml:8:21: policy.generation.max_new_tokens: 1024 leaves no tokens for a prompt: "
        "policy.max_total_sequence_length, for prompt and completion together, is 1024. Lower max_new_tokens or increase that "
        "length."
    ],
    ("  generation:", "  dynamic_batching: {enabled: true, train_mb_tokens: 512}\n  generation:"): [
        "config.yaml:6:54: policy.dynamic_batching.train_mb_tokens: 512 tokens are too few for one row of "
        "policy.max_total_sequence_length (1024): raise it to 1024, or lower the length."
    ],
    ("  backend: hf\n  model", "  backend: plain\n  sequence_packing: {enabled: true}\n  model"): [
        "config.yaml:5:31: policy.sequence_packing.enabled: true is not supported by policy. Policy backend 'plain' "
        "(rl-acme 1.0) lacks the capability 'sequence_packing'. Its capabilities: collective. Policy backends with it: ...."
    ],
    ("  backend: hf\n  model", "  backend: plain\n  dynamic_batching: {enabled: true}\n  model"): [
        "config.yaml:5:31: policy.dynamic_batching.enabled: true is not supported by policy. Policy backend 'plain' "
        "(rl-acme 1.0) lacks the capability 'dynamic_batching'. Its capabilities: collective. Policy backends with it: ...."
    ],
    ("tokens: 64", "tokens: 64\n    refit_transport: carrier_pigeon"): [
        "config.yaml:9:22: policy.generation.refit_transport: No weight transport named 'carrier_pigeon'. Installed: ...."
    ],
}


@pytest.mark.parametrize("change", WRONG_IN_GOOD, ids=[" -> ".join(change) for change in WRONG_IN_GOOD])
def test_sections_that_do_not_fit_are_refused(files, good, change):
    old, new = change
    assert files.errors(good.replace(old, new, 1)) == WRONG_IN_GOOD[change]


def test_a_backend_without_the_capability_cannot_run_in_process(files, good):
    text = good.replace("  backend: hf\n  model", "  backend: plain\n  model") + "cluster: {backend: in_process}\n"
    assert files.errors(text)[1:] == [
        "config.yaml:13:20: cluster.backend: in_process is not supported by policy. Policy backend 'plain' (rl-acme "
        "1.0) lacks the capability 'in_process'. Its capabilities: collective. Policy backends with it: ...."
    ]


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("backend: forgetful", "forgetful keeps no initial weights"),
        ("backend: hf\n  hf_cfg: {reference: false}", "policy.hf_cfg.reference is false"),
    ],
)
def test_a_loss_that_needs_a_reference_is_refused_for_a_policy_without_one(files, good, backend, reason):
    text = good.replace("backend: hf", backend, 1)
    said = f"compares the policy with a reference policy, but there is none: {reason}. Use a loss without a KL penalty"
    [error] = [error for error in files.errors(text, "loss_fn.reference_policy_kl_penalty=0.1") if "loss_fn" in error]
    assert f"loss_fn: the loss 'clipped_pg' {said} (loss_fn.reference_policy_kl_penalty: 0), or a policy with" in error
    pairs = text.replace("grpo:\n  num_prompts_per_step: 8", "dpo: {}").partition("env:")[0]
    assert any(f"loss_fn: the loss 'dpo' {said}" in error for error in files.errors(pairs))
    assert not any("loss_fn" in error for error in files.errors(text, "cluster.gpus_per_node=x"))


def test_a_transport_that_one_side_does_not_support_is_refused(files, good):
    text = good.replace("  backend: hf\n  model", "  backend: plain\n  model")
    assert files.errors(text, "policy.generation.refit_transport=shared_memory") == [
        "override #1 `policy.generation.refit_transport=shared_memory`: policy.generation.refit_transport: the policy backend "
        "'plain' does not support 'shared_memory'. It supports: collective."
    ]


def test_a_transport_of_a_plugin_works_with_every_pair_of_backends_that_have_what_it_requires(files, good):
    run = files.load(good, "policy.generation.refit_transport=acme_files").run
    assert run.policy.generation.refit_transport == "acme_files"
    plain = good.replace("  backend: hf\n  model", "  backend: plain\n  model")
    assert files.errors(plain, "policy.generation.refit_transport=acme_files") == [
        "override #1 `policy.generation.refit_transport=acme_files`: policy.generation.refit_transport: the policy backend "
        "'plain' does not support 'acme_files'. It supports: collective."
    ]


def test_a_transport_that_requires_an_unknown_capability_is_refused_without_blaming_a_backend(files, good, monkeypatch):
    monkeypatch.syspath_prepend(files.folder)
    (files.folder / "misspelt_transport.py").write_text('class Misspelt:\n    requires = ("dsk",)\n')
    [error] = files.errors(good, "policy.generation.refit_transport=misspelt_transport.Misspelt")
    assert "the weight transport 'misspelt_transport.Misspelt' `requires` 'dsk', but there is no capability 'dsk'" in error
    assert "Did you mean 'disk'?" in error
    assert "backend" not in error


def test_a_transport_of_a_plugin_is_tried_by_default_after_ours(files, good):
    filing = good.replace("  backend: hf\n  model", "  backend: filing\n  model")
    assert files.load(filing).run.policy.backend == "filing"  # none of those that are tried first writes files


def test_an_algorithm_of_a_plugin_may_require_its_own_capability(files, good):
    demanding = good.replace("grpo:\n  num_prompts_per_step: 8", "demanding:")
    assert files.errors(demanding) == [
        "config.yaml:3:12: policy.backend: demanding requires the capability 'acme:gradients', but the policy backend 'hf' and "
        "the generation backend 'hf' do not have it. Choose backends that declare it, or another algorithm."
    ]
    filing = demanding.replace("  backend: hf\n  model", "  backend: filing\n  model")
    assert files.load(filing).run.algorithm_name == "demanding"


def test_two_ranks_of_a_policy_that_does_not_declare_support_for_them_are_refused(files, good):
    plain = good.replace("  backend: hf\n  model", "  backend: plain\n  model") + "cluster: {workers_per_node: 2}\n"
    assert files.errors(plain) == [
        "config.yaml:13:10: cluster: a run with 2 ranks is not supported by policy. Policy backend 'plain' (rl-acme 1.0) lacks "
        "the capability 'multiple_ranks'. Its capabilities: collective. Policy backends with it: ...."
    ]
    assert files.load(good + "cluster: {workers_per_node: 2}\n").run.cluster.workers_per_node == 2


def test_the_built_in_backend_has_every_capability_a_config_can_require(files, good):
    run = files.load(good, "cluster.backend=in_process", "policy.sequence_packing.enabled=true").run
    assert run.policy.sequence_packing.enabled
    assert files.load(good, "policy.dynamic_batching.enabled=true").run.policy.dynamic_batching.enabled
    assert files.load(good, "policy.generation.refit_transport=collective").run.policy.generation.refit_transport


FILTERS = ("policy.generation.top_p=0.95", "policy.generation.top_k=20", "policy.generation.min_p=0.05")


def test_filters_are_accepted_if_engine_and_policy_support_sets_of_kept_tokens(files, good):
    assert not files.load(good).run.needs_sampled_sets
    for override in FILTERS:
        assert files.load(good, override).run.needs_sampled_sets


@pytest.mark.parametrize("override", FILTERS)
def test_filters_are_refused_for_a_policy_that_scores_tokens_among_all(files, good, override):
    [error] = files.errors(good.replace("  backend: hf\n  model", "  backend: plain\n  model"), override)
    neutral = {"top_p": "1.0", "top_k": "null", "min_p": "0.0"}[override.partition("=")[0].rpartition(".")[2]]
    assert error.startswith(
        f"override #1 `{override}`: {override.partition('=')[0]}: grpo cannot train on filtered samples here: "
    )
    assert "the policy backend 'plain' does not normalize over the tokens that were sampled from" in error
    assert "lacks the capability 'scores_sampled_sets'" in error
    assert error.endswith(f" Set it to {neutral}; temperature is accounted for.")


def test_filters_are_refused_for_an_engine_that_does_not_return_the_kept_tokens(files, good):
    text = good.replace("  generation:\n    backend: hf", "  generation:\n    backend: remote\n    refits: true")
    [error] = [each for each in files.errors(text, FILTERS[0]) if "grpo cannot train on filtered samples" in each]
    assert "the generation backend 'remote' does not return the tokens that it sampled from" in error
    assert "lacks the capability 'sampled_sets'" in error


def test_filters_are_refused_in_distillation(files, good):
    text = good.replace("grpo:\n  num_prompts_per_step: 8", "distillation: {num_prompts_per_step: 8}")
    text = text.replace("data:", "teacher: {backend: hf, model_name: teacher}\ndata:")
    assert any(
        "distillation cannot train on filtered samples here: it compares the whole distributions of policy and teacher" in error
        for error in files.errors(text, FILTERS[0])
    )


def test_an_algorithm_that_corrects_for_it_may_sample_with_top_p(files, good):
    text = good.replace("grpo:\n  num_prompts_per_step: 8", "filtered:")
    assert files.load(text, "policy.generation.top_p=0.9").run.policy.generation.top_p == 0.9


def test_an_algorithm_that_does_not_train_on_samples_may_sample_with_top_p(files, good):
    text = good.replace("grpo:\n  num_prompts_per_step: 8", "sft: {val_accuracy: true}")
    assert files.load(text, "policy.generation.top_k=5").run.policy.generation.top_k == 5
    penalty = files.load(text, "policy.generation.hf_cfg.repetition_penalty=1.3").run.policy.generation.logit_changes()
    assert penalty == {("hf_cfg", "repetition_penalty"): 1.0}


def test_the_canary_may_be_off_for_an_engine_that_digests_what_it_computes_with(files, good):
    assert files.load(good, "policy.generation.refit_canary=false").run.policy.generation.refit_canary is False


def test_an_algorithm_that_corrects_for_top_p_may_not_sample_with_a_repetition_penalty(files, good):
    text = good.replace("grpo:\n  num_prompts_per_step: 8", "filtered:")
    [error] = files.errors(text, "policy.generation.hf_cfg.repetition_penalty=1.3")
    assert "policy.generation.hf_cfg.repetition_penalty: filtered cannot train on samples from changed logits" in error


def test_an_algorithm_without_samples_needs_neither_generation_nor_environment(files):
    text = "sft:\npolicy: {backend: hf, model_name: m}\ndata: {train: {dataset_name: arithmetic}}\n"
    assert files.load(text).run.policy.generation is None


def test_an_algorithm_without_training_data_needs_none(files):
    assert files.load("untrained:\npolicy: {backend: hf, model_name: m}\n").run.data.train is None
