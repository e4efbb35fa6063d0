"""Two copies of a model on four ranks, each sharded over two of them (HSDP), and prefetching of layers (FSDP2)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rank_processes import RankProgram

from rl_backends_hf.model_options import HFConfig
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.errors import ConfigError
from rl_core.rendezvous.interfaces import free_port
from rl_train.config.loader import load_config

pytestmark = pytest.mark.slow

QUICKSTART = Path(__file__).parents[2] / "examples" / "grpo_addition.yaml"


@pytest.fixture(scope="module")
def ranks(model_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    ports = {free_port("127.0.0.1") for _ in range(8)}
    RankProgram(Path(__file__).with_name("four_ranks.py"), model_folder("llama-tied"), out, *sorted(ports)).wait()
    return [torch.load(out / f"rank-{rank}.pt", weights_only=False) for rank in range(4)]


def test_two_copies_of_two_shards_have_the_gradients_of_one_plain_backward_pass(parts, model_folder, ranks):
    expected = parts.plain_gradients(model_folder("llama-tied"), parts.make_rows())
    norm = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    for rank in ranks:
        gradients = parts.gradients_from(rank["before"], rank["after"])
        assert parts.largest_relative_error(gradients, expected) < 1e-5
        assert rank["norm"] == pytest.approx(norm, rel=1e-5)


def test_copies_hold_the_same_shards_and_each_rank_half_of_the_weights(ranks):
    whole = sum(tensor.numel() for tensor in ranks[0]["before"].values())
    assert [rank["held"] for rank in ranks] == [pytest.approx(whole / 2, rel=0.01)] * 4
    assert [rank["sample"].shard for rank in ranks] == ["shard 0", "shard 1"] * 2
    digests = [rank["sample"].digest for rank in ranks]
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]


def test_two_copies_of_two_shards_train_the_adapters_of_one_rank(parts, model_folder, ranks):
    steps = {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.05}}, "max_grad_norm": None}
    config = parts.make_config(model_folder("llama-tied"), hf={"lora": {"rank": 4}}, **steps)
    alone = HFPolicyWorker(parts.make_context(), config)
    alone.setup()
    rows = parts.make_rows()
    norms = [alone.train(rows, parts.NLL(), counts=parts.counts_of(rows))[0].grad_norm for _ in range(3)]
    for rank in ranks:
        assert rank["lora"] == pytest.approx(norms, rel=1e-4)
    samples = {(rank["lora sample"].shard, rank["lora sample"].digest) for rank in ranks}
    assert len(samples) == 1
    assert {shard for shard, _ in samples} == {""}


def test_a_resumed_run_continues_as_without_the_interruption(ranks):
    for rank in ranks:
        assert rank["resumed"] == rank["continued"]


def test_prefetching_gathers_the_next_layer_before_a_layer_is_computed(ranks):
    for rank in ranks:
        without, with_next = rank["gathered"]
        assert without == [2, 3], "the root and the layer itself"
        assert with_next == [3, 3]


@pytest.mark.parametrize("key", ["fsdp_num_shards", "fsdp_prefetched_layers"])
def test_keys_of_fsdp_are_refused_without_it(key):
    with pytest.raises(ValueError, match=f"{key} has no effect without data_parallel: fsdp2"):
        HFConfig(**{key: 2})


def test_a_number_of_shards_that_does_not_divide_the_ranks_is_refused(tmp_path):
    path = tmp_path / "sums.yaml"
    policy = {"hf_cfg": {"data_parallel": "fsdp2", "fsdp_num_shards": 2}}
    path.write_text(json.dumps({"defaults": str(QUICKSTART), "policy": policy}))
    with pytest.raises(ConfigError, match=r"policy\.hf_cfg\.fsdp_num_shards.*the cluster has 3 rank\(s\)\. Use a divisor of 3"):
        load_config(path, ["cluster.backend=ray", "cluster.workers_per_node=3"])
    assert load_config(path, ["cluster.backend=ray", "cluster.workers_per_node=4"]).run.policy.hf_cfg.fsdp_num_shards == 2
