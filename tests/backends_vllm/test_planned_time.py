"""The time that `rlcore plan` predicts for an engine of vLLM on CPUs."""

import pytest
import transformers
from tiny_models import make_model

from rl_backends_vllm import planned as planned_module
from rl_backends_vllm.config import VllmConfig
from rl_backends_vllm.planned import EngineTime
from rl_core.config.section import Devices
from rl_core.errors import NotSupportedError

MEASURED = {"prompt_token": 0.5, "prompt_token_layer": 0.25, "step": 7.0, "step_layer": 3.0}
DEVICES = Devices(use_gpus=False, have_bfloat16=False, trains=True)


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """Predicts with `MEASURED` for a Llama of five layers; the arguments of the measurement are in `given`."""
    sizes = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 2}
    transformers.LlamaConfig(**sizes).save_pretrained(tmp_path)
    given = {}

    def measured(config, **sizes):
        given.update(sizes)
        return MEASURED

    monkeypatch.setattr(planned_module, "_measured_elsewhere", measured)

    def predict(*, rows=8, prompts=2, prompt=200, completion=10, **vllm_cfg):
        config = VllmConfig(model_name=str(tmp_path), vllm_cfg={"max_model_len": 512, "precision": "float32", **vllm_cfg})
        planner = EngineTime(config.for_devices(DEVICES))
        return planner.seconds(rows=rows, prompts=prompts, prompt=prompt, completion=completion)

    predict.given = given
    return predict


def test_missing_layers_whole_blocks_of_prompts_and_waves_are_counted(planned):
    step, token = 7.0 + 3 * 3.0, 0.5 + 3 * 0.25
    assert planned() == pytest.approx(10 * step + token * (2 * 128 + 8 * 72))
    assert planned.given == {"rows": 8, "prompt": 200, "cached": 205}
    assert planned(enable_prefix_caching=False) == pytest.approx(10 * step + token * 8 * 200)
    assert planned(max_num_seqs=3) == pytest.approx(3 * 10 * step + token * (2 * 128 + 8 * 72))
    assert planned.given["rows"] == 3


def test_what_cannot_be_timed_is_refused_with_the_reason(monkeypatch, planned):
    for setting, reason in ({"tensor_parallel_size": 2}, "several processes"), ({"enforce_eager": False}, "compiling"):
        with pytest.raises(NotSupportedError, match=reason):
            planned(**setting)
    monkeypatch.undo()
    config = VllmConfig(model_name="nowhere", python="/no/such/python")
    with pytest.raises(NotSupportedError, match="did not start"):
        planned_module._measured_elsewhere(config, rows=1, prompt=1, cached=1)


@pytest.mark.slow
def test_a_small_engine_is_timed_in_its_own_process(tmp_path):
    model = make_model(tmp_path, "llama-tied", num_hidden_layers=3)
    config = VllmConfig(model_name=model, vllm_cfg={"precision": "float32"}).for_devices(DEVICES)
    measured = planned_module._measured_elsewhere(config, rows=4, prompt=8, cached=300)
    assert set(measured) == set(MEASURED)
    assert 0 < measured["step_layer"] < measured["step"] < 1
