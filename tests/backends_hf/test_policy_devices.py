"""Devices of the components of a policy: offloading and loading, and reading from a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from rl_backends_base.host_memory import HostMemory
from rl_backends_base.optimizer import MasterWeights
from rl_backends_base.optimizer_settings import OptimizerSettings
from rl_backends_base.parallel import Parallel
from rl_backends_base.training_state import TrainingState, _empty_like_stored
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.config.schema import OptimizerConfig
from rl_core.errors import UserError

ELSEWHERE = torch.device("meta")
"""A device that every machine has in addition to its CPU; it stores no data."""


def state_after_a_step(parts, **options):
    model = torch.nn.Linear(3, 2)
    masters = MasterWeights(model, model_dtype=torch.float32)
    optimizer = torch.optim.AdamW(masters.parameters.values(), **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    settings = OptimizerSettings(optimizer, OptimizerConfig(), None)
    return TrainingState(masters=masters, settings=settings, parallel=Parallel(parts.make_context()))


@pytest.mark.parametrize(("options", "counts"), [({"fused": True}, "meta"), ({"foreach": True}, "cpu")])
def test_step_counts_are_on_the_device_that_the_optimizer_expects(parts, options, counts):
    state = state_after_a_step(parts, **options)
    state.move(ELSEWHERE, HostMemory())
    for values in state.optimizer.state.values():
        assert values["exp_avg"].device.type == values["exp_avg_sq"].device.type == "meta"
        assert values["step"].device.type == counts


@pytest.mark.parametrize("on_device", [True, False])
def test_step_counts_are_loaded_to_the_device_that_the_optimizer_expects(on_device):
    stored = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([]), [])
    room = _empty_like_stored(stored, torch.nn.Parameter(torch.empty(2, 3, device="meta")), counts_on_device=on_device)
    assert room.device.type == ("meta" if on_device else "cpu")


def test_flash_attention_in_float32_is_refused_with_what_to_set(parts):
    config = parts.make_config("never/loaded", precision="float32", hf={"attn_implementation": "flash_attention_2"})
    with pytest.raises(UserError, match="bfloat16"):
        HFPolicyWorker(parts.make_context(), config).setup()
