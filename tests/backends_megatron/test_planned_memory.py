"""The memory that `rlcore plan` predicts for Megatron, compared with the tensors of a worker, and its rules for layouts."""

import megatron_cases as cases
import pytest
import torch
import torch.distributed as dist

from rl_backends_megatron.config import MegatronPolicyConfig
from rl_core.config.section import Devices
from rl_core.errors import UserError

pytestmark = pytest.mark.megatron
ROWS, LENGTH = 4, 24


def planned(model, *, ranks=1, train=(ROWS, LENGTH), several=False, reference=False, megatron=None, **fields):
    from rl_backends_megatron.planned_memory import PolicyMemory

    config = MegatronPolicyConfig(model_name=str(model), megatron_cfg=megatron or {}, **fields)
    resolved = config.for_devices(Devices(use_gpus=False, have_bfloat16=False, trains=True))
    score = (ROWS, LENGTH)
    return PolicyMemory(resolved).by_phase(
        ranks=ranks, train=train, several=several, score=score, reference=reference, on_gpu=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("megatron", [{}, {"lora": {"rank": 8}}])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_gradients_and_optimizer_state_are_those_of_a_worker_after_a_step(models, policy, precision, megatron):
    held = planned(models / "llama", precision=precision, reference=bool(megatron), megatron=megatron)["held"]
    made = policy("llama", precision=precision, **megatron)
    made.train(cases.make_rows(), cases.NLL())
    found = {}
    for kind, tensors in made.group.worker.tensors_by_kind().items():
        found[kind] = sum(tensor.nbytes for tensor in tensors if tensor.ndim > 0)
    buffers = sum(tensor.nbytes for module in made.group.worker._model.chunks.modules for tensor in module.buffers())
    found["weights"] -= buffers
    # Megatron aligns its gradient buffers to 64 values.
    assert held.pop("gradients") == pytest.approx(found.pop("gradients"), rel=0.02)
    assert held == {kind: size for kind, size in found.items() if size}


@pytest.mark.slow
def test_adapters_need_no_copy_for_a_reference_and_little_optimizer_state(models):
    whole, adapted = (planned(models / "llama", reference=True, megatron=megatron) for megatron in ({}, {"lora": {"rank": 2}}))
    assert "reference weights" in whole["held"]
    assert adapted["held"]["weights"] < 1.1 * whole["held"]["weights"]
    assert adapted["held"]["optimizer state"] < 0.2 * whole["held"]["optimizer state"]
    assert 0.5 * whole["train"]["activations"] < adapted["train"]["activations"] < 1.5 * whole["train"]["activations"]


@pytest.mark.slow
def test_tensor_parallel_ranks_share_matrices_and_activations_within_them(models):
    whole, half = (planned(models / "llama", ranks=size, megatron={"tensor_model_parallel_size": size}) for size in (1, 2))
    for phase, part in (("held", "weights"), ("train", "activations")):
        assert 0.5 * whole[phase][part] < half[phase][part] < 0.75 * whole[phase][part]
    assert half["train"]["logits and temporary tensors"] < whole["train"]["logits and temporary tensors"]


@pytest.mark.slow
def test_stages_share_layers_and_the_first_holds_a_microbatch_for_each_stage(models):
    layouts = ({}, {"pipeline_model_parallel_size": 2})
    whole, stage = (planned(models / "llama", ranks=2, several=True, megatron=megatron) for megatron in layouts)
    assert stage["held"]["weights"] < whole["held"]["weights"]
    alone = planned(models / "llama", ranks=2, megatron=layouts[1])["train"]["activations"]
    assert stage["train"]["activations"] == 2 * alone


@pytest.mark.slow
def test_layers_that_are_recomputed_need_less_memory(models):
    plain, recomputed = (planned(models / "llama", activation_checkpointing=on)["train"] for on in (False, True))
    assert recomputed["activations"] < 0.75 * plain["activations"]


@pytest.mark.slow
def test_the_distributed_optimizer_shards_masters_and_moments_over_equal_ranks(models):
    fields = {"ranks": 4, "precision": "bfloat16"}
    whole, shared = (
        planned(models / "llama", megatron={"use_distributed_optimizer": on, "tensor_model_parallel_size": 2}, **fields)["held"]
        for on in (False, True)
    )
    for part in ("optimizer state", "float32 master weights"):
        assert shared.pop(part) == whole.pop(part) // 2
    assert shared == whole


@pytest.mark.slow
def test_a_frozen_model_has_weights_only_and_a_reference_policy_is_a_second_copy(models):
    frozen = planned(models / "llama", train=None, frozen=True)
    assert set(frozen) == {"held", "score"}
    assert set(frozen["held"]) == {"weights"}
    held = planned(models / "llama", reference=True)["held"]
    assert held["reference weights"] == held["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "gemma", "qwen3-value"])
def test_other_families_and_value_models_are_planned(models, kind):
    head = "scalar" if kind.endswith("-value") else "tokens"
    assert planned(models / kind, head=head)["train"]["activations"] > 0


def test_planning_leaves_no_process_group_and_needs_a_process_without_one(models):
    state = torch.get_rng_state()
    planned(models / "llama", train=None)
    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), state)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="process without a torch"):
            planned(models / "llama", train=None)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
