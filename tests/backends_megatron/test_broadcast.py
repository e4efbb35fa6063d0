"""All ranks of a policy start the same collectives in one order: when weights are broadcast, and in other methods."""

from __future__ import annotations

from pathlib import Path

import broadcast_ranks as ranks
import pytest
import torch
import transformers
from broadcasts import assert_all_arrived, assert_gathered_once
from megatron_cases import make_context
from rank_processes import RankProgram
from recorded_collectives import assert_lockstep, with_two_swapped

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.rendezvous.interfaces import free_port

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(300)]

BUDGET_BYTES = 3072
"""Less than the embeddings and `q_proj`, but not than `k_proj`, which Megatron stores in the same parameter as `q_proj`."""
TINY = [
    ("tp2", "llama"),
    ("pp2", "llama-tied"),
    ("ep2", "qwen3-moe"),
    ("tp2-pp2", "qwen2"),
    ("tp2-ep2", "mixtral"),
]


def launch(layout: str, folder: Path, budget_bytes: int) -> str:
    return f"{layout}:{budget_bytes}:{free_port('127.0.0.1')}:{free_port('127.0.0.1')}:{folder}"


def run(out: Path, *launches: str) -> None:
    RankProgram(Path(__file__).with_name("broadcast_ranks.py"), out, *launches).wait()


def read(out: Path, layout: str, folder: Path):
    return [torch.load(out / f"{layout}-{folder.name}-{rank}.pt") for rank in range(ranks.LAYOUTS[layout][0])]


def fingerprint_of(folder: Path) -> str:
    worker = HFPolicyWorker(make_context(), HFPolicyConfig(model_name=str(folder)))
    worker.setup()
    return worker.weight_fingerprint()


@pytest.fixture(scope="module")
def tiny(models, tmp_path_factory):
    """The folder with the results of all layouts of tiny models; one program, because importing Megatron takes long."""
    out = tmp_path_factory.mktemp("broadcasts")
    run(out, *(launch(layout, models / kind, BUDGET_BYTES) for layout, kind in TINY))
    return out


@pytest.mark.parametrize(("layout", "kind"), TINY)
def test_ranks_broadcast_tensors_larger_than_a_bucket_in_one_order(models, tiny, layout, kind):
    found = read(tiny, layout, models / kind)
    assert any(len(bucket) == 1 for bucket in found[0]["buckets"])
    assert_all_arrived(found[0])
    assert_gathered_once(found)
    assert found[0]["fingerprint"] == fingerprint_of(models / kind)


@pytest.mark.parametrize("method", ["get_logprobs", "train", "weight_fingerprint", "save_checkpoint", "load_checkpoint"])
@pytest.mark.parametrize(("layout", "kind"), TINY)
def test_ranks_start_the_same_collectives_in_one_order(models, tiny, layout, kind, method):
    found = [rank["methods"][method] for rank in read(tiny, layout, models / kind)]
    assert_lockstep(found)
    swapped = with_two_swapped(found[0])
    if swapped is not None:
        with pytest.raises(AssertionError):
            assert_lockstep([swapped, *found[1:]])


@pytest.mark.full("the same with tiny models: test_ranks_broadcast_tensors_larger_than_a_bucket_in_one_order")
@pytest.mark.parametrize("layout", ["tp3", "pp2"])
def test_ranks_broadcast_smollm2_in_buckets_of_one_mebibyte(tmp_path, layout):
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "smollm2")
    run(tmp_path, launch(layout, tmp_path / "smollm2", 2**20))
    found = read(tmp_path, layout, tmp_path / "smollm2")
    assert_all_arrived(found[0])
    assert_gathered_once(found)
    assert found[0]["fingerprint"] == fingerprint_of(tmp_path / "smollm2")
