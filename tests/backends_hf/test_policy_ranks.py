from pathlib import Path

import pytest
import torch
import transformers
from policy_cases import WITH_MUON
from rank_processes import RankProgram

from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.rendezvous.interfaces import free_port

MODES = ("replicate", "fsdp2")
WORKERS = 2 * (3 * 3 + 2 + 2 + 1)
PRECISIONS = ("float32", "bfloat16")


def one_rank(parts, folder, precision, out):
    """The same steps on one rank: a checkpoint from which two ranks start, and the expected results."""
    worker = HFPolicyWorker(
        parts.make_context(), parts.make_config(folder, precision=precision, optimizer={"kwargs": {"lr": 1e-2}})
    )
    worker.setup()
    start, rows = parts.make_rows(seed=8), parts.make_rows(seed=9)
    worker.train(start, parts.NLL(), counts=parts.counts_of(start))
    worker.save_checkpoint(out / "one" / "w", out / "one" / "o")
    first, second = (worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))[0] for _ in range(2))
    return {
        "losses": (first.loss, second.loss),
        "norms": (first.grad_norm, second.grad_norm),
        "reference": worker.get_logprobs(rows, reference=True)["logprobs"],
        "logprobs": worker.get_logprobs(rows)["logprobs"],
        "topk_logprobs": worker.get_topk_logprobs(rows, k=3)["topk_logprobs"],
        "weights": {name: tensor.clone() for name, tensor in worker.iter_weights()},
    }


@pytest.fixture(scope="module")
def ranks(parts, model_folder, tmp_path_factory):
    """The results of two real processes and of one rank."""
    out = tmp_path_factory.mktemp("ranks")
    models = tmp_path_factory.mktemp("models")
    for kind in ("llama-tied", "qwen2", "qwen3"):
        (models / kind).symlink_to(model_folder(kind))
    alone = {precision: one_rank(parts, model_folder("llama-tied"), precision, out / precision) for precision in PRECISIONS}
    ports = {free_port("127.0.0.1") for _ in range(40)}
    assert len(ports) >= WORKERS
    RankProgram(Path(__file__).with_name("two_ranks.py"), models, out, *sorted(ports)).wait()
    return out, alone


def read(ranks, name):
    return [torch.load(ranks[0] / f"{name}-{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["by_count", "token_budget", "packed"])
@pytest.mark.parametrize("kind", ["llama-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_have_the_gradients_of_one_plain_backward_pass(parts, model_folder, ranks, mode, kind, form):
    found = [each[kind, form] for each in read(ranks, f"{mode}-gradients")]
    expected = parts.plain_gradients(model_folder(kind), parts.make_rows())
    norm = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    for rank in found:
        gradients = parts.gradients_from(rank["before"], rank["after"])
        assert parts.largest_relative_error(gradients, expected) < 1e-5
        assert rank["norm"] == pytest.approx(norm, rel=1e-5)
    assert found[0]["norm"] == found[1]["norm"]


@pytest.mark.parametrize("kind", ["llama-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_start_with_the_weights_of_the_files_bit_for_bit(model_folder, ranks, mode, kind):
    plain = transformers.AutoModelForCausalLM.from_pretrained(model_folder(kind), dtype=torch.float32)
    for rank in read(ranks, f"{mode}-gradients"):
        before = rank[kind, "by_count"]["before"]
        assert all(torch.equal(before[name], tensor) for name, tensor in plain.named_parameters())


@pytest.mark.parametrize("form", ["by_count", "packed"])
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_with_a_shared_prefix_have_the_gradients_of_one_plain_backward_pass(parts, model_folder, ranks, mode, form):
    expected = parts.plain_gradients(model_folder("llama-tied"), parts.make_prompt_rows())
    for rank in (each[form] for each in read(ranks, f"{mode}-shared")):
        assert rank["shared"]
        assert parts.largest_relative_error(parts.gradients_from(rank["before"], rank["after"]), expected) < 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_resume_a_checkpoint_of_one_rank(ranks, mode):
    found, alone = read(ranks, f"{mode}-float32"), ranks[1]["float32"]
    for step in range(2):
        assert sum(each["losses"][step] for each in found) == pytest.approx(alone["losses"][step], rel=1e-5)
        # After a step of 1e-2 by Adam, float32 noise in small gradients shows at 1e-4.
        assert found[0]["norms"][step] == pytest.approx(alone["norms"][step], rel=1e-3)
    scored = torch.cat([each["reference"] for each in found])
    torch.testing.assert_close(scored, alone["reference"], rtol=0, atol=1e-5)
    for name in ("logprobs", "topk_logprobs"):
        torch.testing.assert_close(torch.cat([each[name] for each in found]), alone[name], rtol=0, atol=1e-3)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_resume_their_own_checkpoint_bit_for_bit(ranks, mode, precision):
    for each in read(ranks, f"{mode}-{precision}"):
        assert each["losses"][1] == each["losses"][2]
        assert each["norms"][1] == each["norms"][2]
        assert each["version"] == 3


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_on_one_rank_stops_all_ranks(ranks, mode):
    for rank, each in enumerate(read(ranks, f"{mode}-float32")):
        assert ("microbatch 1 of 1 on rank 1" in each["raised"]) == (rank == 1)
        assert "was not taken" in each["raised"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mode", MODES)
def test_one_rank_resumes_a_checkpoint_of_two_ranks(parts, model_folder, ranks, mode, precision):
    folder = ranks[0] / precision / f"two-{mode}"
    worker = HFPolicyWorker(
        parts.make_context(),
        parts.make_config(model_folder("llama-tied"), precision=precision, optimizer={"kwargs": {"lr": 1e-2}}),
    )
    worker.setup()
    worker.load_checkpoint(folder / "w", folder / "o")
    rows = parts.make_rows(seed=9)
    loss = worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))[0].loss
    found = read(ranks, f"{mode}-{precision}")
    # In bfloat16, rows of another microbatch round differently.
    assert loss == pytest.approx(sum(each["losses"][1] for each in found), rel=1e-5 if precision == "float32" else 1e-2)
    assert worker.get_weight_version() == 3
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "after")
    assert str(saved.dtype) == f"torch.{precision}"
    for name, tensor in worker.iter_weights():
        # Adam moves each weight by up to 1e-2, so agreement to a tenth of that is agreement of moments and masters.
        tolerance = 1e-3 if precision == "float32" else 2e-2
        torch.testing.assert_close(tensor, saved.get_parameter(name).data, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_shards_are_halves_and_full_tensors_are_exported(ranks, precision):
    whole, halves = read(ranks, f"replicate-{precision}"), read(ranks, f"fsdp2-{precision}")
    assert sum(each["held"] for each in halves) == whole[0]["held"] == whole[1]["held"]
    assert halves[0]["fingerprint"]
    assert not halves[1]["fingerprint"]
    assert "cannot sample" in halves[0]["generates"]
    assert whole[0]["generates"] == "yes"


@pytest.mark.parametrize("mode", MODES)
def test_muon_orthogonalizes_whole_matrices_on_each_rank(parts, model_folder, ranks, mode):
    found, (_, other) = read(ranks, f"{mode}-muon")[0], read(ranks, f"{mode}-muon")
    matrices = {name for name in found["after"] if name.endswith("proj.weight")}
    assert found["momentum"].keys() == matrices
    plain = {name: torch.nn.Parameter(each.clone()) for name, each in found["steps"][0]["before"].items()}
    muon = torch.optim.Muon([plain[name] for name in sorted(matrices)], lr=0.02, weight_decay=0.1)
    others = torch.optim.AdamW([plain[name] for name in sorted(plain.keys() - matrices)], lr=1e-2, weight_decay=0.0, fused=True)
    for step in found["steps"]:
        for name, each in plain.items():
            each.grad = step["gradients"][name].clone()
        muon.step()
        others.step()
    # The same operations on the same whole matrices, so the same bits; a shard that was orthogonalized alone would differ.
    for name, each in plain.items():
        assert torch.equal(each, found["after"][name]), name
        assert torch.equal(each, other["after"][name]), name
    elements = sum(each.numel() for each in found["momentum"].values())
    assert found["held"] == (elements // 2 if mode == "fsdp2" else elements)
    alone = HFPolicyWorker(parts.make_context(), parts.make_config(model_folder("qwen3"), optimizer=WITH_MUON))
    alone.setup()
    alone.load_checkpoint(ranks[0] / f"muon-{mode}" / "w", ranks[0] / f"muon-{mode}" / "o")
    for name, each in alone.state.masters.parameters.items():
        assert torch.equal(each, plain[name])
        if name in matrices:
            assert torch.equal(alone.state.optimizer.state[each]["momentum_buffer"], found["momentum"][name])
