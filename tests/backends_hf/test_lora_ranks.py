"""LoRA on two ranks, each with the whole base model or with shards of it (FSDP2), computes what one rank computes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import transformers
from policy_cases import TINY_SHAPE
from rank_processes import RankProgram

from rl_backends_hf.planned_memory import PolicyMemory
from rl_core.rendezvous.interfaces import free_port

PROGRAM = Path(__file__).with_name("lora_ranks.py")
CASES = ("replicate", "fsdp2", "unmerged", "values", "experts")
FLOAT32, SHARDED = ("replicate", "fsdp2", "experts"), CASES[1:]


@pytest.fixture(scope="module")
def ranks(parts, model_folder, tmp_path_factory):
    """By case: the results of one rank, and of two that continue its first checkpoint; the folder of checkpoints; a program."""
    importlib.import_module("peft")
    sys.path.insert(0, str(PROGRAM.parent))
    program = importlib.import_module("lora_ranks")
    assert tuple(program.CASES) == CASES
    models, out, rows = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("out"), parts.make_rows()
    for kind in ("qwen2", "llama-tied"):
        (models / kind).symlink_to(model_folder(kind))
    with torch.random.fork_rng():
        torch.manual_seed(4)
        value = transformers.AutoModelForSequenceClassification.from_pretrained(model_folder("qwen2"), num_labels=1)
        mixture = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen3MoeConfig(
                **TINY_SHAPE, vocab_size=160, num_hidden_layers=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
                moe_intermediate_size=24,
            )
        )  # fmt: skip
    value.save_pretrained(models / "value")
    mixture.save_pretrained(models / "mixture")
    alone = {}
    for case in CASES:
        worker = program.make_worker(models, case, 0, 1)
        loss = parts.SquaredValues() if case == "values" else parts.NLL()
        worker.train(rows, loss, counts=parts.counts_of(rows))
        worker.save_checkpoint(out / case / "one" / "w", out / case / "one" / "o")
        alone[case] = program.results_of(worker, rows, parts.counts_of(rows), out / case / "one-after")
    RankProgram(PROGRAM, models, out, *(free_port("127.0.0.1") for _ in CASES)).wait()
    two = {case: [torch.load(out / f"{case}-{rank}.pt", weights_only=False) for rank in range(2)] for case in CASES}
    return alone, two, out, lambda case: program.make_worker(models, case, 0, 1), lambda case: program.config_of(models, case)


def all_but(fast, cases):
    return [case if case == fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def assert_close(one, other, **tolerances):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, **tolerances)


@pytest.mark.parametrize("case", all_but("unmerged", CASES))
def test_two_ranks_that_resume_the_checkpoint_of_one_take_its_steps(parts, ranks, case):
    alone, two = ranks[0][case], ranks[1][case]
    # Sums over ranks are in another order than those over rows. After the first step, adapters differ in their last bit, so
    # that activations in bfloat16 may round differently, by up to 2^-8.
    close = 1e-4 if case in FLOAT32 else 4e-3
    for step, (loss, norm) in enumerate(alone["steps"] + alone["after"]):
        of_ranks = [(rank["steps"] + rank["after"])[step] for rank in two]
        expected = pytest.approx((loss, norm, norm), rel=1e-5 if step == 0 else close)
        assert (sum(each[0] for each in of_ranks), of_ranks[0][1], of_ranks[1][1]) == expected
    for rank in two:
        # A step moves an adapter by about 0.2.
        assert_close(alone["trained"], rank["trained"], rtol=0, atol=close)
        assert rank["after"][0] == rank["after"][1], "the same step before and after loading"
        assert rank["version"] == 4
    shards = parts.make_rows()
    for key in {"scores", "reference"} & alone.keys():
        shards[key] = alone[key]
        for rank, shard in enumerate(shards.shard_by_batch_size(2)):
            torch.testing.assert_close(two[rank][key], shard[key], rtol=0, atol=0 if key == "reference" else 10 * close)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ranks_have_and_send_the_same_adapters(ranks, case):
    first, second = ranks[1][case]
    assert first["sample"].shard == second["sample"].shard == ""
    assert first["sample"].digest == second["sample"].digest
    assert list(first["sent"]) == list(first["manifest"])
    assert_close(first["sent"], second["sent"], rtol=0, atol=0)
    assert first["trained"].keys() == second["trained"].keys()


@pytest.mark.slow
def test_refits_have_the_base_of_the_files_or_the_sum_with_its_adapters(ranks, model_folder):
    plain = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama-tied"), dtype=torch.bfloat16)
    for rank in ranks[1]["unmerged"]:
        base = {name: tensor for name, tensor in rank["sent"].items() if ".lora_" not in name}
        assert_close(base, dict(plain.named_parameters()), rtol=0, atol=0)
        assert rank["adapters"].keys() == rank["sent"].keys() - base.keys()
        for name, tensor in rank["adapters"].items():
            assert torch.equal(tensor, rank["sent"][name])
            key = name.replace(".weight", ".default.weight")
            assert name.endswith(".lora_scale") or torch.equal(tensor, rank["trained"][key])
        assert not ranks[1]["fsdp2"][0]["adapters"]
    assert_close(ranks[0]["fsdp2"]["sent"], ranks[1]["fsdp2"][0]["sent"], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARDED)
def test_each_rank_has_half_of_the_frozen_weights(ranks, case):
    whole, halves = ranks[0][case]["frozen"], [rank["frozen"] for rank in ranks[1][case]]
    assert sum(halves) == whole
    assert halves == [pytest.approx(whole / 2, rel=0.01)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_plan_counts_shards_of_the_base_and_whole_adapters(ranks, case):
    phases = PolicyMemory(ranks[4](case)).by_phase(
        ranks=2, train=(1, 8), several=True, score=None, reference=True, on_gpu=False
    )
    assert phases["held"] == ranks[1][case][0]["held"]
    trained = sum(tensor.nbytes for tensor in ranks[1][case][0]["trained"].values())
    assert phases["update"]["gradients"] == trained


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_rank_resumes_the_checkpoint_of_two(parts, ranks, case):
    two, rows = ranks[1][case], parts.make_rows()
    worker = ranks[3](case)
    worker.load_checkpoint(ranks[2] / case / "two" / "w", ranks[2] / case / "two" / "o")
    assert_close(dict(worker.trained_weights()), two[0]["trained"], rtol=0, atol=0)
    assert worker.get_weight_version() == 3
    result = worker.train(rows, parts.SquaredValues() if case == "values" else parts.NLL(), counts=parts.counts_of(rows))[0]
    assert result.loss == pytest.approx(sum(rank["after"][0][0] for rank in two), rel=1e-5)
    assert result.grad_norm == pytest.approx(two[0]["after"][0][1], rel=1e-5)
