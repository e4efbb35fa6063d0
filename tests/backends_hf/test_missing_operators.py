"""Without an operator of torch that is not public, policy and engine compute the same with its public ones."""

import importlib
import types

import pytest
import torch
from policy_cases import make_rows

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy, cpu_attention, cpu_products, torch_internals
from rl_backends_hf.sampling import packed_linears, shared_prompts
from rl_core.data.batched_data_dict import BatchedDataDict

MODULES = (cpu_attention, cpu_products, packed_linears, shared_prompts)
OPERATORS = {
    "flash_attention": ("aten", "_scaled_dot_product_flash_attention_for_cpu"),
    "flash_attention_backward": ("aten", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    "linear_pointwise": ("mkldnn", "_linear_pointwise"),
    "reorder_linear_weight": ("mkldnn", "_reorder_linear_weight"),
}


def scored_and_sampled(parts, folder):
    policy = HuggingFacePolicy(config=parts.make_config(folder, optimizer=parts.SGD, max_grad_norm=None))
    rows = make_rows()
    policy.train(rows, parts.NLL())
    logprobs = policy.get_logprobs(rows)["logprobs"]
    prompts = parts.make_prompt_rows()
    columns = {key: prompts[key] for key in ("input_ids", "input_lengths", "prompt_id")}
    return logprobs, HuggingFaceGeneration(model_name=folder, max_new_tokens=8).generate(BatchedDataDict(columns), True)


@pytest.mark.parametrize("missing", [*OPERATORS, "all"])
def test_policy_and_engine_compute_the_same_without_an_operator(parts, model_folder, monkeypatch, missing):
    folder = model_folder("llama")
    logprobs, output = scored_and_sampled(parts, folder)
    for module in MODULES:
        for name in OPERATORS if missing == "all" else [missing]:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, None)
    found, sampled = scored_and_sampled(parts, folder)
    # Other kernels add in another order; the tests of each kernel have the same tolerances.
    torch.testing.assert_close(found, logprobs, rtol=0, atol=2e-5)
    assert torch.equal(sampled["output_ids"], output["output_ids"])
    torch.testing.assert_close(sampled["logprobs"], output["logprobs"], rtol=0, atol=2e-5)


def test_every_operator_is_used_and_each_that_is_missing_is_named_in_one_warning(monkeypatch, caplog):
    for name, (library, operator) in OPERATORS.items():
        assert getattr(torch_internals, name) is getattr(getattr(torch.ops, library), operator)
        assert any(hasattr(module, name) for module in MODULES)
    monkeypatch.setattr(torch, "ops", types.SimpleNamespace(aten=object(), mkldnn=object()))
    spec = importlib.util.spec_from_file_location("without_operators", torch_internals.__file__)
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    assert [getattr(without, name) for name in OPERATORS] == [None] * len(OPERATORS)
    for library, operator in OPERATORS.values():
        assert caplog.text.count(f"has no {library}.{operator}, so") == 1
