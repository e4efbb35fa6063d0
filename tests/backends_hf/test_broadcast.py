"""All ranks of a sharded policy gather its weights in the same order when they are broadcast to an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from broadcasts import assert_all_arrived, assert_lockstep
from rank_processes import RankProgram

from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.cluster.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MIXTURE = transformers.Qwen3MoeConfig(
    vocab_size=160,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
)
SMOLLM2 = transformers.LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=2,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)
"""SmolLM2-135M with two of its 30 layers."""


def run(folder: Path, out: Path, *, budget_bytes: int, world: int = 2):
    """What the ranks found, after one refit with buckets of this size."""
    ports = f"{free_port('127.0.0.1')}:{free_port('127.0.0.1')}"
    RankProgram(Path(__file__).with_name("broadcast_ranks.py"), out, f"{world}:{budget_bytes}:{ports}:{folder}").wait()
    return [torch.load(out / f"{folder.name}-{rank}.pt") for rank in range(world)]


def make_model(config, folder: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


CASES = [
    # Larger than a bucket: embeddings, and `q_proj`, but not `k_proj`.
    pytest.param(None, 3072, id="llama"),
    # Larger than a bucket: the tensor that Transformers stores all experts of a layer in, but not an expert.
    pytest.param(MIXTURE, 3072, id="experts"),
    pytest.param(SMOLLM2, 2**20, id="smollm2", marks=pytest.mark.full("the same with a tiny model: `llama`")),
]


@pytest.mark.parametrize(("config", "budget_bytes"), CASES)
def test_sharded_ranks_broadcast_tensors_larger_than_a_bucket_in_one_order(parts, model_folder, tmp_path, config, budget_bytes):
    folder = Path(model_folder("llama")) if config is None else make_model(config, tmp_path / "model")
    found = run(folder, tmp_path, budget_bytes=budget_bytes)
    assert any(len(bucket) == 1 for bucket in found[0]["buckets"])
    assert_all_arrived(found[0])
    assert_lockstep(found)
    alone = HFPolicyWorker(parts.make_context(), parts.make_config(str(folder)))
    alone.setup()
    assert found[0]["fingerprint"] == alone.weight_fingerprint()
