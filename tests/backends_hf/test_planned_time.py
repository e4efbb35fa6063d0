"""The time that `rlcore plan` predicts for the Transformers backend, by a clock that counts FLOPs or operations."""

import time

import pytest
import torch
import transformers
from policy_cases import TINY_SHAPE
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from rl_backends_hf import planned_time, torch_internals
from rl_backends_hf.config import HFConfig, HFGenerationConfig, HFPolicyConfig
from rl_backends_hf.planned_time import EngineTime, PolicyTime
from rl_core.errors import NotSupportedError


@pytest.fixture
def folder(tmp_path):
    """Writes the config of a model without its weights."""

    def write(layers):
        path = tmp_path / f"layers-{layers}"
        transformers.LlamaConfig(**{**TINY_SHAPE, "vocab_size": 160, "num_hidden_layers": layers}).save_pretrained(path)
        return str(path)

    return write


def policy_flops(monkeypatch, model, *, tokens=256, scored=256, length=32, training=True, ranks=1, **fields):
    # Only matrices are counted: torch 2.13 has no formula for attention on CPUs, 2.15 has one.
    attention = (torch_internals.flash_attention, torch_internals.flash_attention_backward)
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(attention, lambda *_, **__: 0))
    monkeypatch.setattr(time, "thread_time", lambda: counter.get_total_flops() / 1e9 + 1e-9)
    monkeypatch.setattr(planned_time, "_BUDGET_S", 1.0)
    config = HFPolicyConfig(model_name=model, **fields)
    with counter:
        return PolicyTime(config).seconds(
            tokens=tokens, scored=scored, length=length, training=training, ranks=ranks, microbatches=1
        )


def flops_of(layers, *, tokens=256, length=32, vocab=160):
    """FLOPs of the matrices of a forward pass."""
    shape = {**TINY_SHAPE, "vocab_size": vocab, "num_hidden_layers": layers}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    matrices = sum(each.numel() for name, each in model.named_parameters() if each.ndim > 1 and "embed" not in name)
    return 2 * tokens * matrices / 1e9


@pytest.mark.parametrize("layers", [1, 2, 9])
def test_passes_of_all_layers_are_extrapolated(monkeypatch, folder, layers):
    seconds = policy_flops(monkeypatch, folder(layers))
    assert seconds["score"] == pytest.approx(flops_of(layers), rel=0.15)
    assert 2.5 * seconds["score"] < seconds["train"] < 3.6 * seconds["score"]


def test_a_larger_microbatch_than_the_one_that_is_timed_takes_more_time(monkeypatch, folder):
    model = folder(3)
    small, large = (policy_flops(monkeypatch, model, tokens=tokens, scored=tokens) for tokens in (512, 8192))
    assert large["train"] == pytest.approx(16 * small["train"], rel=0.05)
    longer = policy_flops(monkeypatch, model, tokens=8192, scored=8192, length=4096)
    assert longer["train"] > 1.2 * large["train"]


def test_tokens_that_are_not_trained_need_no_head_in_training(monkeypatch, folder):
    model = folder(2)
    all_tokens, half = (policy_flops(monkeypatch, model, scored=scored) for scored in (256, 128))
    assert half["train"] < all_tokens["train"]
    assert half["score"] == pytest.approx(all_tokens["score"], rel=0.05)


def test_recomputed_layers_take_more_time_and_frozen_models_only_score(monkeypatch, folder):
    model = folder(6)
    plain, recomputed = (policy_flops(monkeypatch, model, activation_checkpointing=each) for each in (False, True))
    assert recomputed["train"] > 1.2 * plain["train"]
    assert set(policy_flops(monkeypatch, model, training=False)) == {"score"}


def test_a_critic_and_adapters_are_timed(monkeypatch, folder):
    model = folder(3)
    critic = policy_flops(monkeypatch, model, head="scalar")
    assert critic["train"] > 2 * critic["score"] > 0
    pytest.importorskip("peft")
    adapters = policy_flops(monkeypatch, model, hf_cfg=HFConfig(lora={"rank": 4}))
    assert adapters["train"] < policy_flops(monkeypatch, model)["train"]


def test_what_cannot_be_timed_is_refused_with_the_reason(monkeypatch, folder):
    model = folder(2)
    with pytest.raises(NotSupportedError, match=r"torchao\.optim\.AdamW8bit"):
        policy_flops(monkeypatch, model, optimizer={"name": "torchao.optim.AdamW8bit"})
    with pytest.raises(NotSupportedError, match="compil"):
        policy_flops(monkeypatch, model, hf_cfg=HFConfig(compile_layers=True))
    monkeypatch.setattr(planned_time, "_MAX_BYTES", 1000)
    with pytest.raises(NotSupportedError, match="too much to try"):
        policy_flops(monkeypatch, model)


class _Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def engine_operations(monkeypatch, model, *, rows=8, prompts=2, prompt=8, completion=16, **hf):
    operations = _Operations()
    monkeypatch.setattr(time, "thread_time", lambda: operations.count / 1e3)
    config = HFGenerationConfig(model_name=model, hf_cfg=hf)
    with operations:
        return EngineTime(config).seconds(rows=rows, prompts=prompts, prompt=prompt, completion=completion)


def test_sampling_takes_a_step_of_all_layers_for_each_token(monkeypatch, folder):
    few, more, most = (engine_operations(monkeypatch, folder(layers)) for layers in (2, 3, 5))
    assert few < more < most
    assert most - more == pytest.approx(2 * (more - few), rel=0.01)
    model = folder(3)
    assert engine_operations(monkeypatch, model, completion=64) > 3 * more
    assert engine_operations(monkeypatch, model, prompt=200, completion=16) > more
    assert engine_operations(monkeypatch, model, completion=1) > 0


def test_rows_beyond_the_limit_of_the_engine_are_sampled_afterwards(monkeypatch, folder):
    model = folder(3)
    together, halves = (engine_operations(monkeypatch, model, max_batch_rows=rows) for rows in (8, 4))
    assert halves == pytest.approx(2 * together, rel=0.1)
