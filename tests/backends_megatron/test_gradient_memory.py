"""Memory of gradients, weights and master weights, which is free for an engine on the same GPU between steps."""

from __future__ import annotations

import megatron_cases as cases
import pytest
import torch

pytestmark = pytest.mark.megatron


def two_steps(folder, between, **fields):
    """The weights after two steps, with something done to the policy's worker between them."""
    from rl_backends_megatron.policy import MegatronPolicy

    optimizer = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2}}
    policy = MegatronPolicy(str(folder), optimizer=optimizer, max_grad_norm=1.0, **fields)
    try:
        for step in range(2):
            policy.train(cases.make_rows(seed=step), cases.NLL())
            if step == 0:
                between(policy.group.worker)
        return {name: tensor.clone() for name, tensor in policy.group.worker.iter_weights()}
    finally:
        policy.shutdown()


def gradient_bytes(trainable):
    return sum(buffer.grad_data.untyped_storage().nbytes() for model in trainable.models for buffer in model.buffers)


def test_gradients_that_were_given_back_have_their_memory_again_in_the_next_step(models):
    seen = []

    def give_back(worker):
        trainable = worker.state
        seen.append(gradient_bytes(trainable))
        trainable.free_gradients()
        trainable.free_gradients()
        seen.append(gradient_bytes(trainable))

    plain = two_steps(models / "llama", lambda worker: None)
    found = two_steps(models / "llama", give_back)
    assert seen[0] > 0
    assert seen[1] == 0
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def bytes_on_device(tensors):
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_and_masters_that_left_the_device_are_back_in_the_next_step(models, sharded):
    seen = []

    def offload(worker):
        chunks = worker._model.chunks
        seen.append([bytes_on_device(chunks.tensors()), bytes_on_device(chunks.master_weights())])
        for _ in range(2):
            worker._weights.offload()
            worker._masters.offload()
        seen.append([bytes_on_device(chunks.tensors()), bytes_on_device(chunks.master_weights())])

    fields = {"precision": "bfloat16", "megatron_cfg": {"use_distributed_optimizer": sharded}}
    plain = two_steps(models / "llama", lambda worker: None, **fields)
    found = two_steps(models / "llama", offload, **fields)
    (weights, masters), after = seen
    assert after == [0, 0]
    # Float32 masters of bfloat16 weights.
    assert masters == pytest.approx(2 * weights, rel=0.02)
    assert all(torch.equal(found[name], plain[name]) for name in plain)
