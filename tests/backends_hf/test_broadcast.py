"""All ranks of a sharded policy start the same collectives in one order: when weights are broadcast, and in other methods."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from broadcasts import assert_all_arrived, assert_gathered_once
from rank_processes import RankProgram
from recorded_collectives import assert_lockstep, with_two_swapped

from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.rendezvous.interfaces import free_port

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


BUDGET_BYTES = 3072
"""Less than the embeddings, `q_proj`, and the tensor that Transformers stores a layer's experts in; more than an expert."""


def make_model(config, folder: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def run(out: Path, budget_bytes: int, *folders: Path, world: int = 2) -> None:
    """Refit policies of several ranks with buckets of this size; one program for all, because imports take long."""
    launches = [f"{world}:{budget_bytes}:{free_port('127.0.0.1')}:{free_port('127.0.0.1')}:{folder}" for folder in folders]
    RankProgram(Path(__file__).with_name("broadcast_ranks.py"), out, *launches).wait()


def read(out: Path, folder: Path, world: int = 2):
    return [torch.load(out / f"{folder.name}-{rank}.pt") for rank in range(world)]


def check(found, folder: Path, parts) -> None:
    assert any(len(bucket) == 1 for bucket in found[0]["buckets"])
    assert_all_arrived(found[0])
    assert_gathered_once(found)
    alone = HFPolicyWorker(parts.make_context(), parts.make_config(str(folder)))
    alone.setup()
    assert found[0]["fingerprint"] == alone.weight_fingerprint()


@pytest.fixture(scope="module")
def tiny(model_folder, tmp_path_factory):
    """Results, and the folder of each model."""
    out = tmp_path_factory.mktemp("broadcasts")
    folders = {"llama": Path(model_folder("llama")), "experts": make_model(MIXTURE, out / "experts")}
    run(out, BUDGET_BYTES, *folders.values())
    return out, folders


@pytest.mark.parametrize("kind", ["llama", "experts"])
def test_sharded_ranks_broadcast_tensors_larger_than_a_bucket_in_one_order(parts, tiny, kind):
    out, folders = tiny
    check(read(out, folders[kind]), folders[kind], parts)


@pytest.mark.parametrize("kind", ["llama", "experts"])
def test_sharded_ranks_start_the_same_collectives_in_one_order(tiny, kind):
    out, folders = tiny
    found = [rank["methods"] for rank in read(out, folders[kind])]
    for method in found[0]:
        assert_lockstep([calls[method] for calls in found])
        with pytest.raises(AssertionError):
            assert_lockstep([with_two_swapped(found[0][method]), found[1][method]])


@pytest.mark.full("test_sharded_ranks_broadcast_tensors_larger_than_a_bucket_in_one_order has a tiny model")
def test_sharded_ranks_broadcast_smollm2_in_buckets_of_one_mebibyte(parts, tmp_path):
    folder = make_model(SMOLLM2, tmp_path / "smollm2")
    run(tmp_path, 2**20, folder)
    check(read(tmp_path, folder), folder, parts)
