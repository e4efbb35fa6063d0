"""The FLOPs that a run reports, against those that torch counts in real training calls."""

from __future__ import annotations

import pytest
import torch
import transformers
from family_configs import hybrid_config
from torch.utils.flop_counter import FlopCounterMode, addmm_flop

from rl_backends_hf.matrix_sizes import matrix_sizes
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.metrics.measured import ModelFlops

IN_PLACE = {torch.ops.aten.addmm_: lambda _, left, right, **__: addmm_flop(_, left, right)}
"""torch does not count products that are added in place, as the gradient of the LM head is."""
LENGTH, ROWS, PROMPT = 24, 4, 9


def rows():
    """Rows of equal length, so that no padding is computed."""
    mask = (torch.arange(LENGTH) >= PROMPT).float().expand(ROWS, LENGTH)
    ids = torch.randint(3, 160, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=torch.full((ROWS,), LENGTH),
        token_mask=mask,
        sample_mask=torch.ones(ROWS),
        weights=torch.ones(ROWS),
    )


@pytest.mark.parametrize(
    ("kind", "lora"),
    [("llama", None), ("llama-tied", None), ("gpt2", None), ("llama", {"rank": 4})],
    ids=["untied", "tied", "gpt2", "lora"],
)
def test_the_model_flops_of_training_are_those_that_torch_counts(parts, model_folder, kind, lora):
    hf = {"attn_implementation": "eager", "logprob_chunk_tokens": 1024, "lora": lora}
    worker = HFPolicyWorker(parts.make_context(), parts.make_config(model_folder(kind), hf=hf, shared_prefix="off"))
    facts, batch = worker.setup(), rows()
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        worker.train(batch, parts.NLL(), counts=parts.counts_of(batch))
    counted = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(flops for op, flops in counted.items() if "bmm" in op)
    result = {
        "computed_lengths": [LENGTH] * ROWS,
        "global_valid_toks": float(batch["token_mask"].sum()),
        "skipped_valid_toks": 0.0,
    }
    # `eager` computes all pairs of tokens, also those that causal attention masks: T * T instead of T * (T + 1) / 2.
    pairs_computed = 2 * LENGTH / (LENGTH + 1)
    without_attention = ModelFlops(facts["matrix_sizes"] | {"attention": 0}, ranks=1, peak=None).tflop(result) * 1e12
    of_attention = ModelFlops({"attention": facts["matrix_sizes"]["attention"]}, ranks=1, peak=None).tflop(result) * 1e12
    assert of_attention * pairs_computed == pytest.approx(attention, rel=1e-9)
    # With adapters, the first layer's input needs no gradient, which the count of 4 FLOPs per frozen weight includes.
    assert without_attention == pytest.approx(sum(counted.values()) - attention, rel=0.15 if lora else 1e-9)


@pytest.mark.parametrize(("family", "width"), [("lfm2", 32), ("qwen3_next", 32), ("mamba", 0), ("falcon_h1", 2 * 16)])
def test_of_a_hybrid_only_layers_with_attention_count_as_such_and_convolutions_whole(family, width):
    config = hybrid_config(family)
    model = transformers.AutoModelForCausalLM.from_config(config)
    sizes = matrix_sizes(model)
    assert sizes["attention"] == width
    convolutions = {f"{name}.weight" for name, each in model.named_modules() if isinstance(each, torch.nn.Conv1d)}
    assert convolutions
    experts, chosen = getattr(config, "num_experts", 1), getattr(config, "num_experts_per_tok", 1)
    expected = sum(
        each.numel() * chosen // experts if name.endswith(("gate_up_proj", "experts.down_proj")) else each.numel()
        for name, each in model.named_parameters()
        if each.ndim > 1 and "embed" not in name and name != "lm_head.weight"
    )
    assert sizes["trained"] == expected
