"""The time that `rlcore plan` predicts for Megatron, by a clock that counts FLOPs."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from rl_backends_megatron.config import MegatronPolicyConfig
from rl_core.config.section import Devices
from rl_core.errors import NotSupportedError

pytestmark = pytest.mark.megatron


@pytest.fixture
def flops(monkeypatch, models):
    """Returns predictions in GFLOPs instead of seconds."""
    from rl_backends_megatron import planned_time

    def predict(
        kind="llama", *, tokens=64, scored=64, length=16, training=True, ranks=1, microbatches=1, megatron=None, **fields
    ):
        counter = FlopCounterMode(display=False)
        monkeypatch.setattr(planned_time, "_clock", lambda: counter.get_total_flops() / 1e9)
        monkeypatch.setattr(planned_time, "_REPEATS", 1)
        config = MegatronPolicyConfig(model_name=str(models / kind), megatron_cfg=megatron or {}, **fields)
        planner = planned_time.PolicyTime(config.for_devices(Devices(use_gpus=False, have_bfloat16=False, trains=True)))
        with counter:
            return planner.seconds(
                tokens=tokens, scored=scored, length=length, training=training, ranks=ranks, microbatches=microbatches
            )

    return predict


def test_passes_take_the_flops_of_all_matrices(flops, models):
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(models / "llama"))
    matrices = sum(each.numel() for name, each in model.named_parameters() if each.ndim > 1 and "embed" not in name)
    seconds = flops()
    assert seconds["score"] == pytest.approx(2 * 64 * matrices / 1e9, rel=0.15)
    assert 2.5 * seconds["score"] < seconds["train"] < 3.6 * seconds["score"]
    assert flops(tokens=1024, scored=1024)["train"] == pytest.approx(16 * seconds["train"], rel=0.1)
    assert set(flops(training=False)) == {"score"}


def test_ranks_share_matrices_layers_and_rows(flops):
    alone = flops(ranks=2, microbatches=4)["train"]
    assert 0.45 * alone < flops(ranks=2, megatron={"tensor_model_parallel_size": 2})["train"] < 0.6 * alone
    stages = {"pipeline_model_parallel_size": 2}
    few, many = (flops(ranks=2, microbatches=count, megatron=stages)["train"] for count in (1, 100))
    assert few == pytest.approx(2 / 1.01 * many)
    assert many < 0.9 * alone
    assert flops(ranks=2, megatron={"context_parallel_size": 2})["train"] == pytest.approx(alone / 2, rel=0.1)


def test_recomputed_layers_and_critics_are_timed(flops):
    plain, recomputed = (flops(activation_checkpointing=on)["train"] for on in (False, True))
    assert recomputed > 1.15 * plain
    assert flops("qwen3-value", head="scalar")["train"] > 0


def test_what_cannot_be_timed_is_refused_with_the_reason(monkeypatch, flops):
    from rl_backends_megatron import planned_time

    with pytest.raises(NotSupportedError, match="mixture"):
        flops("mixtral")
    monkeypatch.setattr(planned_time, "_MAX_BYTES", 1000)
    with pytest.raises(NotSupportedError, match="too much to try"):
        flops()
    assert not dist.is_initialized()
