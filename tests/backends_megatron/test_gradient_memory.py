"""Gradient memory, which is only needed during a step and is otherwise free for an engine on the same GPU."""

from __future__ import annotations

import megatron_cases as cases
import pytest
import torch

pytestmark = pytest.mark.megatron


def two_steps(folder, between):
    """The weights after two steps, with something done to the policy's trainable between them."""
    from rl_backends_megatron.policy import MegatronPolicy

    optimizer = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2}}
    policy = MegatronPolicy(str(folder), optimizer=optimizer, max_grad_norm=1.0)
    try:
        for step in range(2):
            policy.train(cases.make_rows(seed=step), cases.NLL())
            if step == 0:
                between(policy.group.worker._trainable)
        return {name: tensor.clone() for name, tensor in policy.group.worker.iter_weights()}
    finally:
        policy.shutdown()


def gradient_bytes(trainable):
    return sum(buffer.grad_data.untyped_storage().nbytes() for model in trainable.models for buffer in model.buffers)


def test_gradients_that_were_given_back_have_their_memory_again_in_the_next_step(models):
    seen = []

    def give_back(trainable):
        seen.append(gradient_bytes(trainable))
        trainable.free_gradients()
        trainable.free_gradients()
        seen.append(gradient_bytes(trainable))

    plain = two_steps(models / "llama", lambda trainable: None)
    found = two_steps(models / "llama", give_back)
    assert seen[0] > 0
    assert seen[1] == 0
    assert all(torch.equal(found[name], plain[name]) for name in plain)
