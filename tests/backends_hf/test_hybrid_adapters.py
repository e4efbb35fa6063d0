"""Adapters and quantized bases of models with recurrent layers, whose code multiplies with some weights itself."""

import re

import pytest
import torch
import transformers
from family_configs import hybrid_config

from rl_backends_hf.quantized import QuantizedLinear
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_backends_hf.transformers_internals import read_directly
from rl_core.errors import UserError

FAMILIES = ["jamba", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mamba", "falcon_h1", "lfm2", "qwen3_5_text"))]
READ = {"jamba": {"dt_proj"}, "mamba": {"x_proj", "dt_proj", "out_proj"}, "falcon_h1": {"out_proj"}}
"""Layers whose weights the code reads, found by reading it (Transformers 5.19)."""


@pytest.fixture
def start(parts, tmp_path):
    """A worker with a tiny model of a family."""

    def started(family, *, lora=None, **fields):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            config = hybrid_config(family)
            config.update({"vocab_size": 160})
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family)
        hf = {"lora": {"rank": 4, **(lora or {})}, **fields.pop("hf", {})}
        given = {"hf": hf, "optimizer": parts.SGD, "max_grad_norm": None, "max_total_sequence_length": 64, **fields}
        worker = HFPolicyWorker(parts.make_context(), parts.make_config(str(tmp_path / family), **given))
        worker.setup()
        return worker

    return started


@pytest.mark.parametrize("family", FAMILIES)
def test_each_adapter_of_all_linear_is_trained_in_the_first_step(peft, parts, start, family):
    worker = start(family)
    parts.train_steps(worker, 1)
    seconds = {name: each for name, each in worker.model.model.named_parameters() if ".lora_B." in name}
    assert seconds
    assert [name for name, each in seconds.items() if not each.any()] == []
    assert not {name.split(".")[-4] for name in seconds} & READ.get(family, set())


@pytest.mark.parametrize("family", READ)
def test_layers_whose_weights_the_code_around_them_reads_are_found(family):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hybrid_config(family))
    assert {name.rpartition(".")[2] for name in read_directly(model)} == READ[family]


def test_such_a_layer_that_is_named_is_refused_with_the_reason(peft, start):
    says = (
        "mamba.dt_proj cannot be adapted: JambaMambaMixer multiplies with its weight itself, so an adapter would have no effect"
    )
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        start("jamba", lora={"target_modules": ["in_proj", "dt_proj"]})
    assert caught.value.key == "policy.hf_cfg.lora.target_modules"


@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit"])
def test_such_a_layer_is_not_quantized(peft, parts, start, key):
    pytest.importorskip("bitsandbytes")
    worker = start("jamba", hf={key: True}, precision="bfloat16")
    packed = {name for name, module in worker.model.model.named_modules() if isinstance(module, QuantizedLinear)}
    ends = {name.removesuffix(".base_layer").rpartition(".")[2] for name in packed}
    assert "in_proj" in ends
    assert not ends & {"dt_proj", "lm_head"}
    parts.train_steps(worker, 1)


def test_the_error_of_a_mixture_whose_default_adapters_peft_would_change_lists_layers_that_it_adapts_alone(peft, start):
    with pytest.raises(UserError) as caught:
        start("qwen3_next")
    names = re.search(r"adapts alone: \[(.*?)\]", str(caught.value))[1].split(", ")
    assert {"in_proj_qkvz", "q_proj", "out_proj"} <= {*names}
    start("qwen3_next", lora={"target_modules": names})
