"""An exported adapter in plain vLLM, which loads it by its path."""

import pytest
import torch
from tiny_models import LENGTH, make_model, take_step
from transformers import AutoModelForCausalLM

from rl_backends_hf import HuggingFacePolicy
from rl_backends_vllm.device import set_process_environment

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


def logprobs_of(model, tokens, sampled):
    """The log-probabilities [sampled] of the last tokens, by a plain forward pass."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        scores = model(ids).logits[0].log_softmax(-1)
    return scores[:-1].gather(1, ids[0, 1:].unsqueeze(1)).squeeze(1)[-sampled:]


@pytest.mark.parametrize("use_rslora", [False, True])
def test_vllm_samples_with_an_exported_adapter_as_peft_scores(tmp_path, use_rslora):
    peft = pytest.importorskip("peft")
    base, folder = make_model(tmp_path / "base", "qwen2"), tmp_path / "adapter"
    lora = {"rank": 4, "alpha": 8, "use_rslora": use_rslora}
    policy = HuggingFacePolicy(base, lora=lora, optimizer={"kwargs": {"lr": 1e-2}}, max_total_sequence_length=LENGTH)
    take_step(policy, 1)
    take_step(policy, 2)
    policy.save_checkpoint(folder, None)
    policy.shutdown()
    set_process_environment("cpu")
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    sizes = {"max_model_len": LENGTH, "max_num_seqs": 4, "kv_cache_memory_bytes": 2**26, "gpu_memory_utilization": 0.1}
    engine = LLM(
        base, dtype="float32", enable_lora=True, max_lora_rank=8, enforce_eager=True, skip_tokenizer_init=True, **sizes
    )
    try:
        outputs = engine.generate(
            [{"prompt_token_ids": [5, 9, 12, 77]}, {"prompt_token_ids": [100, 3, 45]}],
            SamplingParams(max_tokens=12, logprobs=0, seed=1, detokenize=False, ignore_eos=True),
            lora_request=LoRARequest("adapter", 1, str(folder)),
        )
    finally:
        engine.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model, furthest = peft.PeftModel.from_pretrained(plain, folder), 0.0
    for output in outputs:
        [row] = output.outputs
        tokens = [*output.prompt_token_ids, *row.token_ids]
        found = torch.tensor([step[token].logprob for step, token in zip(row.logprobs, row.token_ids, strict=True)])
        torch.testing.assert_close(found, logprobs_of(model, tokens, 12), rtol=0, atol=1e-5)
        with model.disable_adapter():
            furthest = max(furthest, float((found - logprobs_of(model, tokens, 12)).abs().max()))
    assert furthest > 0.05
