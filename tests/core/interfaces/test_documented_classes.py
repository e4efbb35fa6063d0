"""Custom policies and generation backends in the form of NeMo RL's documentation, and the keys of its generation config."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_backends_hf.config import HFGenerationConfig
from rl_backends_vllm.config import VllmConfig
from rl_core.config.validator import section_from_keywords
from rl_core.data import BatchedDataDict
from rl_core.errors import ConfigError, NotSupportedError
from rl_core.interfaces import (
    GenerationInterface,
    LogprobOutputSpec,
    LogprobsSpec,
    LossFunction,
    PolicyInterface,
    TrainingDatumSpec,
)

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"
GENERATION = {"max_new_tokens": 512, "temperature": 0.7, "top_p": 0.9, "top_k": 50, "do_sample": True, "pad_token_id": 0}


def load_custom_model(path: str):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


class CustomPolicy(PolicyInterface):
    """Custom policy implementation."""

    def __init__(self, model_path: str):
        self.model = load_custom_model(model_path)

    def generate(self, data: BatchedDataDict["GenerationDatumSpec"], greedy: bool):  # noqa: F821
        input_ids = data["input_ids"]
        outputs = self.model.generate(
            input_ids,
            max_new_tokens=data.get("max_new_tokens", 100),
            do_sample=not greedy,
            temperature=data.get("temperature", 0.7),
        )
        return BatchedDataDict(
            {
                "output_ids": outputs,
                "generation_lengths": torch.tensor([len(o) - len(i) for o, i in zip(outputs, input_ids, strict=True)]),
                "unpadded_sequence_lengths": torch.tensor([len(o) for o in outputs]),
            }
        )

    def get_logprobs(self, data: BatchedDataDict["GenerationDatumSpec"]):  # noqa: F821
        input_ids = data["input_ids"]
        with torch.no_grad():
            outputs = self.model(input_ids)
            logprobs = torch.log_softmax(outputs.logits, dim=-1)
        return BatchedDataDict({"logprobs": logprobs})

    def train(self, data: BatchedDataDict["TrainingDatumSpec"], loss_fn: LossFunction):
        loss = loss_fn(self.model, data)
        return {"loss": loss.item()}


class CustomGeneration(GenerationInterface):
    """Custom generation backend implementation."""

    def __init__(self, model_name: str, **kwargs):
        self.model = load_custom_model(model_name)

    def generate(self, data: BatchedDataDict["GenerationDatumSpec"], greedy: bool):  # noqa: F821
        pass

    def prepare_for_generation(self):
        pass

    def finish_generation(self):
        pass


def test_a_documented_custom_policy_works_as_printed():
    policy = CustomPolicy(str(MODEL))
    batch = BatchedDataDict({"input_ids": torch.tensor([[4, 5, 13, 6, 7, 15]])})
    output = policy.generate(batch, greedy=True)
    assert output["generation_lengths"].tolist() == [output["output_ids"].shape[1] - 6]
    assert policy.get_logprobs(batch)["logprobs"].shape[:2] == (1, 6)
    assert policy.train(batch, lambda model, data: torch.tensor(1.5)) == {"loss": 1.5}
    policy.prepare_for_training()
    policy.finish_training()
    assert policy.shutdown() is True


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda policy: policy.get_reference_policy_logprobs({}), "get_reference_policy_logprobs"),
        (lambda policy: policy.get_reference_logprobs({}), "get_reference_policy_logprobs"),
        (lambda policy: policy.save_checkpoint("weights"), "save_checkpoint"),
        (lambda policy: policy.load_checkpoint("weights"), "load_checkpoint"),
    ],
)
def test_what_a_custom_policy_leaves_out_is_an_error_that_names_it(call, named):
    policy = CustomPolicy.__new__(CustomPolicy)
    with pytest.raises(NotSupportedError, match=f"CustomPolicy does not implement `{named}`"):
        call(policy)


def test_either_name_of_the_reference_log_probabilities_can_be_implemented():
    class Promised(CustomPolicy):
        def get_reference_logprobs(self, data):
            return "scores"

    assert Promised.__new__(Promised).get_reference_policy_logprobs({}) == "scores"


def test_a_documented_custom_generation_backend_can_be_created_as_printed():
    engine = CustomGeneration(str(MODEL), anything=1)
    assert engine.prepare_for_generation() is None
    assert engine.shutdown() is True


def test_the_documented_names_of_the_specifications_exist():
    assert LogprobsSpec is LogprobOutputSpec
    assert set(TrainingDatumSpec.__annotations__) == {"input_ids", "input_lengths", "token_mask", "sample_mask"}


@pytest.mark.parametrize(("model", "own"), [(HFGenerationConfig, "hf_cfg"), (VllmConfig, "vllm_cfg")])
def test_keys_of_a_transformers_generation_config_are_accepted_if_they_agree(model, own):
    section = section_from_keywords("Engine", model, own=own, fields=GENERATION, model_name="m")
    assert (section.max_new_tokens, section.temperature, section.top_k) == (512, 0.7, 50)
    assert section == section_from_keywords("Engine", model, own=own, fields=section.model_dump())


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("do_sample", False, "do_sample is False, but an engine samples unless it is called with greedy=True"),
        ("pad_token_id", 7, "pad_token_id is 7, but completions are padded with 0"),
    ],
)
def test_keys_of_a_transformers_generation_config_that_disagree_are_explained(key, value, said):
    with pytest.raises(ConfigError, match=said):
        section_from_keywords("Engine", HFGenerationConfig, own="hf_cfg", fields={**GENERATION, key: value}, model_name="m")
