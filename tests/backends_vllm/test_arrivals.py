"""What the worker of a replica asks its engine's processes for each row."""

from types import SimpleNamespace

import pytest

from rl_backends_vllm.config import VllmConfig
from rl_backends_vllm.device import engine_arguments
from rl_backends_vllm.worker import VllmGenerationWorker
from rl_core.errors import WeightSyncError


class CountingEngine:
    """Counts calls to all processes; `incomplete` is the answer to whether weights are missing."""

    is_paused = False

    def __init__(self):
        self.calls, self.incomplete = [], False

    def refit(self, method, *args, **kwargs):
        self.calls.append(method)
        if method == "require_complete_weights" and self.incomplete:
            raise WeightSyncError("lm_head.weight is missing")
        return [1]


@pytest.fixture
def worker():
    made = VllmGenerationWorker(config=VllmConfig(model_name="m"))
    made._engine, made._has_weights = CountingEngine(), True
    return made


def test_complete_weights_are_checked_once_and_not_for_every_row(worker):
    for _ in range(4):
        worker._check_weights()
    assert worker._engine.calls == ["require_complete_weights"]


@pytest.mark.parametrize("arrive", [lambda made: made.update_weights_from_collective(), lambda made: made.update_weights({})])
def test_weights_are_checked_again_after_a_refit_and_incomplete_ones_for_every_row(worker, arrive):
    worker._starts_itself = False
    worker._check_weights()
    arrive(worker)
    worker._engine.incomplete = True
    for _ in range(2):
        with pytest.raises(WeightSyncError, match="is missing"):
            worker._check_weights()


@pytest.mark.parametrize(("rows", "on_cpu", "on_gpu"), [(None, 256, None), (8, 8, 8)])
def test_the_number_of_rows_is_left_to_vllm_on_a_gpu(rows, on_cpu, on_gpu):
    config = VllmConfig(model_name="m", vllm_cfg={"max_num_seqs": rows, "max_model_len": 32}).vllm_cfg
    model = SimpleNamespace(num_hidden_layers=1, num_attention_heads=2, hidden_size=128)
    model.get_text_config = lambda decoder: model
    assert engine_arguments(config, device="cpu", hf_config=model)["max_num_seqs"] == on_cpu
    assert engine_arguments(config, device="cuda", hf_config=model)["max_num_seqs"] == on_gpu
