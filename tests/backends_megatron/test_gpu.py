"""One Megatron rank on a GPU: the numbers of Transformers on a CPU, memory that is released, and resuming."""

from __future__ import annotations

import importlib.util

import megatron_cases as cases
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.megatron,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ADAMW = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.0}}
"""Adam divides by the gradient's size; this eps keeps rounding in tiny gradients from becoming whole steps."""
LAYERS = ["local"]
if importlib.util.find_spec("transformer_engine") is not None:
    LAYERS.append("transformer_engine")


@pytest.fixture
def policy(models):
    """A policy in this process; it is shut down afterwards, since Megatron keeps its groups for the whole process."""
    from rl_backends_megatron.policy import MegatronPolicy

    made = []

    def make(kind="llama-tied", **fields):
        made.append(MegatronPolicy(str(models / kind), optimizer=ADAMW, **fields))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def weights(policy):
    return {name: tensor.float().cpu() for name, tensor in policy.group.worker.iter_weights()}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", ["llama-tied", "qwen3"])
def test_a_gpu_scores_and_steps_as_transformers_does_on_a_cpu(policy, models, kind, packing, layers):
    made = policy(
        kind,
        precision="float32",
        max_grad_norm=None,
        megatron_cfg={"transformer_impl": layers},
        sequence_packing={"enabled": packing, "train_mb_tokens": 64, "logprob_mb_tokens": 64},
    )
    assert made.facts["device"] == "cuda:0"
    model, rows = cases.plain_model(models / kind), cases.make_rows()
    plain = torch.optim.AdamW(model.parameters(), **ADAMW["kwargs"])
    with torch.no_grad():
        expected = cases.plain_logprobs(model, rows)
    # Float32 on both; sums of another order differ in the sixth digit.
    torch.testing.assert_close(made.get_logprobs(rows)["logprobs"], expected, rtol=0, atol=2e-4)
    for step in range(3):
        rows = cases.make_rows(seed=step)
        found = made.train(rows, cases.NLL())
        plain.zero_grad()
        loss = cases.plain_loss(model, rows)
        loss.backward()
        plain.step()
        assert float(found["loss"]) == pytest.approx(float(loss), rel=1e-3)
    after, expected = weights(made), cases.checkpoint_weights(model)
    assert after.keys() == expected.keys()
    for name in after:
        # A step is at most 1e-3, so this is a twentieth of one.
        torch.testing.assert_close(after[name], expected[name].detach(), rtol=0, atol=5e-5, msg=name)


def test_optimizer_state_and_gradients_leave_the_gpu_for_a_refit_and_come_back(policy):
    made = policy(precision="bfloat16")
    trainable = made.group.worker.state
    made.train(cases.make_rows(seed=0), cases.NLL())
    made.offload_before_refit()
    assert {
        value.device.type for part in trainable.sub_optimizers for state in part.state.values() for value in state.values()
    } == {"cpu"}
    assert sum(buffer.grad_data.untyped_storage().nbytes() for buffer in trainable.models[0].buffers) == 0
    made.offload_after_refit()
    made.train(cases.make_rows(seed=1), cases.NLL())
    assert made.weight_version == 2


def test_training_is_unchanged_by_offloading_for_each_refit(policy):
    found = []
    for moves in (False, True):
        made = policy(precision="float32")
        for step in range(3):
            made.train(cases.make_rows(seed=step), cases.NLL())
            if moves:
                made.offload_before_refit()
                made.offload_after_refit()
                made.prepare_for_training()
        found.append(weights(made))
        made.shutdown()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_resume_on_a_gpu_equals_an_uninterrupted_run(policy, tmp_path):
    made = policy(precision="bfloat16")
    made.train(cases.make_rows(seed=0), cases.NLL())
    made.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    made.train(cases.make_rows(seed=1), cases.NLL())
    expected = weights(made)
    made.shutdown()
    resumed = policy(precision="bfloat16")
    resumed.load_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    resumed.train(cases.make_rows(seed=1), cases.NLL())
    found = weights(resumed)
    for name, tensor in expected.items():
        # One unit in the last place of bfloat16, because the kernels sum in different orders.
        torch.testing.assert_close(found[name], tensor, rtol=2**-7, atol=1e-6, msg=name)


def test_greedy_completions_are_those_of_transformers(policy, models):
    answer = policy("qwen3", precision="float32").generate(cases.make_prompts(), greedy=True)
    expected = cases.plain_completions(cases.plain_model(models / "qwen3"), cases.make_prompts())
    lengths = answer["unpadded_sequence_lengths"].tolist()
    assert [ids[:length] for ids, length in zip(answer["output_ids"].tolist(), lengths, strict=True)] == expected
