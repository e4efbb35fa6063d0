"""Diagnoses that use an engine: its length limit, decoding against prefill, and both against the policy."""

import pytest
import torch

from rl_core.errors import WorkerDiedError
from rl_train.diagnostics import DiagnosisStatus, test_generation_consistency, test_max_model_len_respected
from rl_train.diagnostics.decoding import check_decode_against_prefill, check_engine_against_policy, check_length_limit

pytestmark = pytest.mark.slow

PROMISED = (test_max_model_len_respected, test_generation_consistency)
END = 1


def token_rows(prompts):
    return [row[:length] for row, length in zip(prompts["input_ids"], prompts["input_lengths"].tolist(), strict=True)]


def model_of(engine):
    engine.wait_ready()
    return engine.group.worker.model


def test_an_engine_that_keeps_its_limit(engine, prompts):
    found = check_length_limit(engine(max_model_len=32), token_rows(prompts), limit=32)
    assert found.status is DiagnosisStatus.OK
    assert found.details["longest_row"] == 32
    assert found.details["rows_cut_at_the_limit"] > 0


def test_an_engine_that_ignores_the_limit_of_the_run(engine, prompts):
    found = check_length_limit(engine(max_model_len=64), token_rows(prompts), limit=32)
    assert found.status is DiagnosisStatus.FAILED
    assert "tokens became a row of" in found.found
    assert "a prompt of 32 tokens, which leaves no space for a completion, was accepted" in found.found
    assert found.details["longest_row"] > 32


def test_an_engine_that_truncates_prompts_fails_the_length_limit(engine, prompts, monkeypatch):
    careless = engine(max_model_len=32)
    generate = careless.generate

    def cutting(data, greedy=False):
        data = data.slice(0, data.size)
        data["input_ids"], data["input_lengths"] = data["input_ids"][:, -24:], data["input_lengths"].clamp(max=24)
        return generate(data, greedy)

    monkeypatch.setattr(careless, "generate", cutting)
    found = check_length_limit(careless, token_rows(prompts), limit=32)
    assert found.status is DiagnosisStatus.FAILED
    assert "returned changed" in found.found
    assert "was accepted" in found.found


def test_a_length_limit_that_no_row_reached_is_not_reported_as_ok(engine, prompts):
    # Every token ends a row, so no row is ever cut.
    found = check_length_limit(engine(max_model_len=32, stop_token_ids=list(range(18))), token_rows(prompts), limit=32)
    assert found.status is DiagnosisStatus.WARNING
    assert "the limit was not tested" in found.found


def test_an_engine_that_dies_is_not_reported_as_rejecting_the_prompt(engine, prompts, monkeypatch):
    dying = engine(max_model_len=32)
    generate = dying.generate

    def die(data, greedy=False):
        if data.size == 1:
            raise WorkerDiedError("rank 0 is gone")
        return generate(data, greedy)

    monkeypatch.setattr(dying, "generate", die)
    with pytest.raises(WorkerDiedError):
        check_length_limit(dying, token_rows(prompts), limit=32)


def never_ending(engine):
    """Make the model almost never end an answer, so that answers are long."""
    head = model_of(engine).lm_head
    head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, torch.tensor(END), -30.0))
    return engine


def test_decoding_agrees_with_prefill_over_long_answers(engine, prompts):
    long = never_ending(engine(max_new_tokens=100, max_model_len=128))
    found = check_decode_against_prefill(long, prompts, threshold=1.001)
    assert found.status is DiagnosisStatus.OK
    assert found.details["last_position"] == 99
    assert found.details["same_token_frac"] == 1.0
    # float32 on both sides; sums of another order make some 1e-6 nats.
    assert found.details["max_abs_difference"] < 1e-4


def test_a_layer_that_is_wrong_only_in_decoding_is_found(engine, prompts):
    broken = engine()

    def spoil(module, inputs, output):
        return output if output.shape[1] > 1 else -output  # one new token a row: a decoding step

    model_of(broken).model.layers[0].mlp.register_forward_hook(spoil)
    found = check_decode_against_prefill(broken, prompts, threshold=1.05)
    assert found.status is DiagnosisStatus.FAILED
    assert found.details["multiplicative_error"] > 1.05
    assert "1.05 is allowed" in found.found


def test_single_token_answers_cannot_check_decoding(engine, prompts):
    found = check_decode_against_prefill(engine(max_new_tokens=1), prompts, threshold=1.001)
    assert found.status is DiagnosisStatus.WARNING


def test_the_policy_with_a_perturbed_tensor_fails(policy, engine, prompts, changed_model):
    def scale(tensors):
        tensors["model.norm.weight"] *= 1.3

    assert check_engine_against_policy(policy(), engine(), prompts, threshold=1.001).status is DiagnosisStatus.OK
    found = check_engine_against_policy(policy(changed_model(scale)), engine(), prompts, threshold=1.05)
    assert found.status is DiagnosisStatus.FAILED
    assert found.found.startswith("exp(mean |d|) is ")


def test_the_documented_checks_pass_on_the_quickstart_model(changed_model):
    model = changed_model()
    assert test_max_model_len_respected(model).details["limit"] == 64
    assert [found.name for found in test_generation_consistency(model, max_new_tokens=32)] == [
        "decode_against_prefill",
        "engine_against_policy",
    ]


def test_the_documented_checks_raise_if_a_model_fails(changed_model):
    with pytest.raises(AssertionError, match=r"failed: engine_against_policy|failed: decode_against_prefill"):
        # bfloat16 cannot reach the accuracy of float32.
        test_generation_consistency(changed_model(), precision="bfloat16", threshold=1.00001)


def test_pytest_does_not_collect_the_documented_checks(request):
    collected = {item.name for item in request.session.items if item.path == request.path}
    assert request.node.name in collected
    assert not {function.__name__ for function in PROMISED} & collected
