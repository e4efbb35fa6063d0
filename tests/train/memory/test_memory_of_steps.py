"""GPU memory of a step: what shares a GPU is there one after the other, and what should have left has left."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
from counting_workers import ALGORITHMS, record
from memory_ledger import GPU, Layout, Model

from rl_backends_base.distributed_generation import DistributedGeneration
from rl_backends_base.distributed_policy import DistributedPolicy
from rl_core.errors import RLCoreError
from rl_train.run import Run
from rl_train.weight_sync.device_memory import DeviceMemory

VALIDATION = {"dataset_name": "arithmetic", "num_samples": 4, "split": "validation"}
LLAMA = Model(
    manifest={
        "model.embed_tokens.weight": ((128256, 4096), "bfloat16"),
        **{f"model.layers.{layer}.weights": ((53248, 4096), "bfloat16") for layer in range(32)},
        "lm_head.weight": ((128256, 4096), "bfloat16"),
    },
    hidden=4096,
    layers=32,
    vocab=128256,
    kv_token_bytes=131072,
)
"""The sizes of Llama-3.1-8B."""
SMALL = Model(
    manifest={
        "model.embed_tokens.weight": ((151936, 896), "bfloat16"),
        **{f"model.layers.{layer}.weights": ((16643, 896), "bfloat16") for layer in range(24)},
    },
    hidden=896,
    layers=24,
    vocab=151936,
    kv_token_bytes=12288,
)
"""About the sizes of Qwen2.5-0.5B."""
SHARE = int(0.6 * GPU)
"""Bytes of vLLM on each GPU while it samples."""
HF = Layout(model=LLAMA, gpus=8, fsdp2=True)
MEGATRON = Layout(model=LLAMA, gpus=8, policy="megatron", tensor=2)
BACKENDS = {"hf": HF, "megatron": MEGATRON}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_model_has_the_gpu_alone_while_it_is_used(backend, algorithm, tmp_path):
    ledger = record(BACKENDS[backend], algorithm, tmp_path)
    assert ledger.violations == []
    assert ledger.peak("rollout") == ledger.peak("rollout", "engine") == SHARE
    parameters = LLAMA.parameters
    # hf: float32 weights and gradients and two moments, in 8 shards. megatron: bfloat16 weights and float32 gradients in 2
    # shards; float32 weights and two moments of each shard are divided over 4 data-parallel ranks.
    state = 16 * parameters // 8 if backend == "hf" else 6 * parameters // 2 + 12 * parameters // 2 // 4
    for phase, owner in {"train": "policy", **({"train_value": "critic"} if algorithm == "ppo" else {})}.items():
        assert ledger.peak(phase) == ledger.peak(phase, owner)
        tensors = {kind: size for (_, kind), size in ledger.peaks[phase].items()}
        assert sum(tensors.values()) - tensors["activations"] - tensors.get("gathered", 0) == pytest.approx(state, abs=8)
    assert max(ledger.peak(phase) for phase in ledger.peaks) == SHARE


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_sleeps_keeps_its_weights_over_several_draws_of_a_step(level, tmp_path):
    dynamic = {"use_dynamic_sampling": True, "dynamic_sampling_max_gen_batches": 3, "val_period": 0, "max_num_steps": 1}
    changes = {"grpo": dynamic, "policy": {"generation": {"vllm_cfg": {"sleep_level": level}}}}
    # The rewards of all rollouts are equal, so that the third draw is the last one.
    with pytest.raises(RLCoreError, match="sampled 6 groups and could use none"):
        record(HF, "grpo", tmp_path, changes)


def test_two_validations_and_a_rollout_need_one_refit(tmp_path):
    changes = {"grpo": {"max_num_steps": 1}, "data": {"validation_sets": {"second": VALIDATION}}}
    ledger = record(HF, "grpo", tmp_path, {**changes, "checkpointing": {"enabled": False}})
    assert ledger.violations == []
    # The refit of the step, and that of both validations after it.
    assert [call for call in ledger.calls if call == ("policy", "prepare_weights_for_ipc")] == 2 * [
        ("policy", "prepare_weights_for_ipc")
    ]


@pytest.mark.parametrize("level", [1, 2])
def test_a_policy_that_takes_no_step_leaves_the_gpu_again(level, tmp_path):
    ppo = {"critic_warmup_steps": 1, "val_period": 0}
    changes = {"ppo": ppo, "policy": {"generation": {"vllm_cfg": {"sleep_level": level}}}}
    assert record(HF, "ppo", tmp_path, changes).violations == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_policy_and_an_engine_that_never_sleeps_stay_on_the_gpu(algorithm, tmp_path):
    changes = {"policy": {"generation": {"vllm_cfg": {"sleep_level": 0}}}}
    ledger = record(Layout(model=SMALL), algorithm, tmp_path, changes)
    offloads = [call for call in ledger.calls if call[0] == "policy" and call[1].startswith("offload")]
    if algorithm == "grpo":
        assert offloads == []
        # bfloat16 weights, float32 master weights and two moments.
        assert ledger.peak("rollout") == SHARE + 14 * SMALL.parameters
    else:  # one at a time of the policy and the critic or teacher
        assert offloads
        assert not [found for found in ledger.violations if "policy" in found and ("critic" in found or "teacher" in found)]
    assert all(ledger.peak(phase, "engine") == SHARE for phase in ("rollout", "train"))
    assert max(ledger.peak(phase) for phase in ledger.peaks) < GPU


@pytest.mark.parametrize("dies_in", ["update_weights", "generate", "get_weight_version"])
def test_an_engine_that_is_restarted_finds_its_share_of_the_gpu(dies_in, tmp_path):
    changes = {"grpo": {"val_period": 0}, "policy": {"generation": {"max_restarts": 1}}}
    ledger = record(HF, "grpo", tmp_path, changes, deaths={dies_in: 2})
    assert ledger.deaths == {}
    assert [method for owner, method in ledger.calls if (owner, method) == ("engine", "setup")] == 2 * ["setup"]
    assert ledger.violations == []


def test_the_engine_of_hf_leaves_its_weights_out_of_the_gpu_while_the_policy_uses_it(tmp_path):
    layout = Layout(model=LLAMA, gpus=8, fsdp2=True, engine="hf", rows=64)
    ledger = record(layout, "grpo", tmp_path, {"policy": {"generation": {"refit_transport": "shared_memory"}}})
    assert ledger.violations == []
    assert ledger.peak("train", "engine") == 0


def test_weights_that_the_engine_shares_with_the_policy_stay_on_the_gpu_once(tmp_path):
    ledger = record(Layout(model=LLAMA, engine="hf", rows=64), "grpo", tmp_path, {"grpo": {"val_period": 0}})
    assert ledger.shares_weights
    assert ledger.violations == []
    weights = 2 * LLAMA.parameters
    assert ledger.peaks["rollout"]["policy", "weights"] == weights
    assert ledger.peak("rollout") == weights + ledger.peaks["rollout"]["engine", "cache"]


SITES = (
    (DistributedPolicy, "offload_before_refit"),
    (DistributedPolicy, "offload_after_refit"),
    (DistributedGeneration, "finish_generation"),
    (Run, "free_memory_for"),
    (DeviceMemory, "free_for_model"),
    (DeviceMemory, "free_for_refit"),
    (DeviceMemory, "free_for_engine"),
)


class Sites:
    """The places in the code that call a method of `SITES`; one of them can be left out."""

    def __init__(self, left_out=None):
        self.found, self.left_out = set(), left_out

    def watched(self, method):
        def call(*args, **kwargs):
            frame = sys._getframe(1)
            site = (Path(frame.f_code.co_filename).name, frame.f_lineno, method.__name__)
            self.found.add(site)
            return None if site == self.left_out else method(*args, **kwargs)

        return call

    def record(self, *arguments, **options):
        with ExitStack() as stack:
            for owner, name in SITES:
                stack.enter_context(mock.patch.object(owner, name, self.watched(getattr(owner, name))))
            return record(*arguments, **options)


RUNS = (
    ("grpo", {}, {}),
    ("ppo", {"ppo": {"ppo_epochs": 2}}, {}),
    (
        "distillation",
        {"loss_fn": {"topk": None, "divergence": "reverse_kl"}, "policy": {"generation": {"val_temperature": 1.0}}},
        {},
    ),
    ("grpo", {"policy": {"generation": {"max_restarts": 1}}}, {"update_weights": 2}),
)
"""Algorithm, changes of the config, and deaths of the engine, which is awake when it has been restarted."""


@pytest.mark.full("each call is left out once; test_each_model_has_the_gpu_alone_while_it_is_used has the same checks")
def test_leaving_out_any_call_that_frees_memory_is_a_violation(tmp_path):
    every, missed = Sites(), set()
    folders = (tmp_path / str(number) for number in count())
    for algorithm, changes, deaths in RUNS:
        (folder := next(folders)).mkdir()
        assert every.record(HF, algorithm, folder, changes, deaths).violations == []
    for site in sorted(every.found):
        for algorithm, changes, deaths in RUNS:
            (folder := next(folders)).mkdir()
            try:
                violations = Sites(left_out=site).record(HF, algorithm, folder, changes, deaths).violations
            except (RLCoreError, MemoryError):
                break
            if violations:
                break
        else:
            missed.add(site)
    assert missed == set()
