"""Attention computes what a model's config describes (caps, sinks, windows), or the model is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from family_configs import SINKS, SIZES, tiny_config
from packaging.version import Version
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_backends_hf.config import HFModelConfig
from rl_backends_hf.model import auto_class, load_model, model_without_weights
from rl_core.backend import exact_attention
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import NotSupportedError, UserError, WorkerError


def plain(folder, **fields):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **fields).eval()


@pytest.fixture
def sdpa_of_gemma2(monkeypatch):
    """As before Transformers 5.21, which refuses to load it with SDPA whether or not its logits are capped."""
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)


def test_caps_of_attention_logits_are_computed_by_policy_and_engine(parts, model_folder):
    folder, rows = model_folder("gemma2-capped"), parts.make_rows()
    with torch.no_grad():
        expected = parts.plain_logprobs(plain(folder), rows)
        without_cap = parts.plain_logprobs(plain(folder, attn_logit_softcapping=None), rows)
    assert (expected - without_cap).abs().max() > 0.1, "the test would not see a missing cap"
    policy = HuggingFacePolicy(config=parts.make_config(folder))
    torch.testing.assert_close(policy.get_logprobs(rows)["logprobs"], expected, rtol=0, atol=1e-5)
    reference = policy.get_reference_policy_logprobs(rows)["reference_logprobs"]
    torch.testing.assert_close(reference, expected, rtol=0, atol=1e-5)
    prompts = parts.make_prompt_rows()
    columns = {"input_ids": prompts["input_ids"], "input_lengths": prompts["input_lengths"], "prompt_id": prompts["prompt_id"]}
    output = HuggingFaceGeneration(model_name=folder, max_new_tokens=8).generate(BatchedDataDict(columns))
    scored = policy.get_logprobs(
        BatchedDataDict(input_ids=output["output_ids"], input_lengths=output["unpadded_sequence_lengths"])
    )["logprobs"]
    sampled = output["logprobs"] != 0
    torch.testing.assert_close(output["logprobs"][sampled], scored[sampled], rtol=0, atol=1e-4)


@pytest.mark.usefixtures("sdpa_of_gemma2")
def test_an_attention_that_ignores_the_cap_is_refused(model_folder):
    options = HFModelConfig(attn_implementation="sdpa")
    for load in (
        lambda: load_model(model_folder("gemma2-capped"), options=options, dtype=torch.float32),
        lambda: model_without_weights(model_folder("gemma2-capped"), options=options),
    ):
        with pytest.raises(UserError, match="ignores `attn_logit_softcapping`"):
            load()
    assert load_model(model_folder("gemma2"), options=options, dtype=torch.float32).config._attn_implementation == "sdpa"


def test_a_class_without_sdpa_is_loaded_with_eager_attention(model_folder, monkeypatch, tmp_path):
    transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, **SINKS)).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), options=HFModelConfig(), dtype=torch.float32)
    assert model.config._attn_implementation == "eager"
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", False)  # as since Transformers 5.21
    model = load_model(model_folder("gemma2"), options=HFModelConfig(), dtype=torch.float32)
    assert model.config._attn_implementation == "eager"


@pytest.mark.usefixtures("sdpa_of_gemma2")
def test_a_cap_that_reaches_sdpa_in_another_way_is_refused(parts, model_folder):
    policy = HuggingFacePolicy(config=parts.make_config(model_folder("gemma2")))
    policy.wait_ready()
    for layer in policy.group.worker.model.model.model.layers:
        layer.self_attn.attn_logit_softcapping = 1.0
    with pytest.raises((NotSupportedError, WorkerError), match="passes `softcap`, which SDPA ignores"):
        policy.get_logprobs(parts.make_rows())


def test_a_state_outside_of_the_cache_and_grouped_norms_are_refused_with_the_family(tmp_path):
    recurrent = transformers.RecurrentGemmaConfig(**SIZES, lru_width=32, attention_window_size=4)
    transformers.RecurrentGemmaForCausalLM(recurrent).save_pretrained(tmp_path / "recurrent")
    refusal = r"RecurrentGemmaForCausalLM(: log-probabilities of sampled tokens differ| cannot be sampled from)"
    with pytest.raises(WorkerError, match=refusal):  # from Transformers 5.24, its code fails with this cache
        HuggingFaceGeneration(model_name=str(tmp_path / "recurrent"), max_new_tokens=2).wait_ready()
    sizes = {"num_heads": 4, "head_dim": 16, "expand": 2, "state_size": 8, "hidden_size": 32, "num_hidden_layers": 2}
    for groups in (1, 2):
        config = transformers.Mamba2Config(**sizes, vocab_size=96, n_groups=groups)
        transformers.Mamba2ForCausalLM(config).save_pretrained(tmp_path / str(groups))
    load_model(str(tmp_path / "1"), options=HFModelConfig(), dtype=torch.float32)
    if Version(transformers.__version__) >= Version("5.24"):  # it normalizes each group on its own
        load_model(str(tmp_path / "2"), options=HFModelConfig(), dtype=torch.float32)
        return
    with pytest.raises(NotSupportedError, match=r"is a Mamba 2 with 2 groups"):
        load_model(str(tmp_path / "2"), options=HFModelConfig(), dtype=torch.float32)


@pytest.mark.full("test_caps_of_attention_logits_are_computed_by_policy_and_engine, and sinks, compare two families")
def test_the_default_attention_of_every_family_equals_its_eager_attention():
    ids = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(0))
    compared, different = [], {}
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = tiny_config(family)
            if config is None:
                continue
            attention = exact_attention(config, auto_class(config, "tokens")[1])
            eager, default = (
                AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=name).eval()
                for name in ("eager", attention)
            )
            default.load_state_dict(eager.state_dict())
            with torch.no_grad():
                one, other = (model(ids).logits.float().log_softmax(-1) for model in (eager, default))
        except Exception:  # the family cannot be built from these sizes, or has another forward pass
            continue
        compared.append(family)
        if not (one - other).abs().max() < 2e-3:
            different[family] = float((one - other).abs().max())
    assert different == {}
    assert len(compared) >= 100
    assert {"gemma2", "gemma3_text", "gpt_oss", "vaultgemma", "mistral", "qwen2", "cohere2", "olmo3"} <= {*compared}
