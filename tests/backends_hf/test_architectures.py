"""Families of Transformers with a tiny config are trained and sampled with equal log-probabilities, or refused by name."""

import pytest
import torch
import transformers
from family_configs import tiny_config
from packaging.version import Version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import NotSupportedError, UserError, WorkerError

SUPPORTED = (
    "cohere2",
    "deepseek_v3",
    "deepseek_v32",
    "ernie4_5_moe",
    "gemma3_text",
    "gemma4_text",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "hunyuan_v1_dense",
    "jamba",
    "kimi_linear",
    "mamba",
    "minimax_m2",
    "mistral",
    "nanochat",
    "olmo3",
    "phi3",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "seed_oss",
    "smollm3",
)
NEW_IN_5_24 = ("apertus1p5_text", "beam", "flint", "internlm3", "iquestcoder", "kolibri1", "sarvam_mla", "sarvam_moe")
REFUSED = {
    "bert": "not its head applied to its backbone",
    "bart": "log-probabilities of sampled tokens differ",
    "bloom": "cannot be sampled from",
    "deepseek_v4": "cannot be sampled from",
    "llama4_text": "no linear LM head",
    "recurrent_gemma": "log-probabilities of sampled tokens differ",
    "rembert": "cannot be trained by this backend",
}


def write(family, folder):
    """A tiny model of the family; False if its config cannot be made small."""
    config = tiny_config(family)
    if config is None:
        return False
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return True


def difference(parts, folder):
    """Train one step, sample, and compare the log-probabilities of the engine's tokens with the policy's."""
    policy = HuggingFacePolicy(config=parts.make_config(folder, optimizer=parts.SGD, max_grad_norm=1e-6))
    policy.train(parts.make_rows(vocab_size=90), parts.NLL())
    prompts = parts.make_prompt_rows()
    columns = {"input_ids": prompts["input_ids"].clamp(max=89)}
    columns |= {key: prompts[key] for key in ("input_lengths", "prompt_id")}
    output = HuggingFaceGeneration(model_name=folder, max_new_tokens=8).generate(BatchedDataDict(columns))
    rows = BatchedDataDict(input_ids=output["output_ids"], input_lengths=output["unpadded_sequence_lengths"])
    scored = HuggingFacePolicy(config=parts.make_config(folder)).get_logprobs(rows)["logprobs"]
    sampled = output["logprobs"] != 0
    return float((output["logprobs"][sampled] - scored[sampled]).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("family", [*SUPPORTED, *NEW_IN_5_24])
def test_a_family_is_trained_and_sampled_with_equal_log_probabilities(parts, tmp_path, family):
    if family in NEW_IN_5_24 and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("Transformers 5.24 has it first")
    assert write(family, tmp_path)
    # Products are added in another order with a cache; a wrong position or mask shows as tenths.
    assert difference(parts, str(tmp_path)) < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", REFUSED)
def test_a_family_is_refused_by_its_class_and_the_reason(parts, tmp_path, family):
    assert write(family, tmp_path)
    with pytest.raises((UserError, WorkerError), match=rf"{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]}.*{REFUSED[family]}"):
        difference(parts, str(tmp_path))


@pytest.mark.full(
    "test_a_family_is_trained_and_sampled_with_equal_log_probabilities has 24 of them, and 8 of Transformers 5.24"
)
def test_every_family_with_a_tiny_config_is_equal_or_refused(parts, tmp_path):
    equal, refused, wrong = [], {}, {}
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            written = write(family, tmp_path / family)
        except Exception:  # it has no config of these sizes
            continue
        try:
            if written and difference(parts, str(tmp_path / family)) < 2e-4:
                equal.append(family)
            elif written:
                wrong[family] = "log-probabilities differ"
        except (NotSupportedError, WorkerError) as error:
            refused[family] = str(error)
            if "NotSupportedError" not in f"{type(error).__name__} {error}":
                wrong[family] = str(error)
    print(f"\n{len(equal)} equal: {', '.join(equal)}\n{len(refused)} refused: {', '.join(refused)}")
    assert wrong == {}
    assert len(equal) >= 111
