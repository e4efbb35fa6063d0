"""A full GPU is reported with what was on it and the key to change."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from simulated_gpu import SimulatedGpu

from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.errors import RLCoreError

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}}


@pytest.mark.parametrize(
    ("fields", "training", "key"),
    [
        ({}, True, "Lower `train_micro_batch_size` in the section of this model or set `activation_checkpointing: true`"),
        (
            {"activation_checkpointing": True, **PACKED},
            True,
            "Lower `sequence_packing.train_mb_tokens` in the section of this model;",
        ),
        (PACKED, False, "Lower `sequence_packing.logprob_mb_tokens` in the section of this model;"),
    ],
)
def test_a_full_gpu_is_reported_with_what_was_on_it_and_the_key_to_change(parts, model_folder, fields, training, key):
    with SimulatedGpu().active() as gpu:
        context = dataclasses.replace(parts.make_context(), device="cuda")
        optimizer = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3}}
        config = parts.make_config(model_folder("llama-tied"), precision="bfloat16", optimizer=optimizer, **fields)
        worker, rows = HFPolicyWorker(context, config), parts.make_rows()
        worker.setup()
        worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
        gpu.total = torch.cuda.memory_allocated() + 16_000
        with pytest.raises(RLCoreError) as raised:
            worker.train(rows, parts.NLL(), counts=parts.counts_of(rows)) if training else worker.get_logprobs(rows)
    message = str(raised.value)
    assert key in message
    assert "On it were, in GiB: weights 0.00, float32 master weights 0.00, " in message
    assert "optimizer state 0.00, activations and others 0.00" in message
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
