"""AdamW with 8-bit state (torchao): steps, memory, and checkpoints on one rank and on two with FSDP2."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
import transformers
from policy_cases import TINY_SHAPE
from rank_processes import RankProgram
from simulated_gpu import SimulatedGpu

from rl_backends_base.optimizer import build_optimizer
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.config.schema import OptimizerConfig
from rl_core.errors import UserError
from rl_core.rendezvous.interfaces import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (Path(sys.prefix) / "torchao").is_dir(), reason="torchao is not installed in the folder that the Makefile names"
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of whose weights most shards have 4096 elements or more; smaller ones are not quantized."""
    shape = {**TINY_SHAPE, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 160}
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**shape)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, model):
    """What the ranks of each number of ranks found; two ranks come first, because one rank reads their checkpoint."""
    out = tmp_path_factory.mktemp("ranks")
    program = Path(__file__).with_name("quantized_ranks.py")
    for world in (2, 1):
        ports = {free_port("127.0.0.1") for _ in range(12)}
        RankProgram(program, model, out, world, *sorted(ports)).wait()
    return [torch.load(out / f"{name}.pt", weights_only=False) for name in ("1-0", "2-0", "2-1")]


def assert_equal(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_bits_of_a_run_without_interruption(ranks, precision):
    for rank in ranks:
        (losses, state), (resumed_losses, resumed_state) = rank[precision, "resumed"]
        assert resumed_losses == losses
        assert_equal(state, resumed_state)


def test_a_checkpoint_from_before_the_first_step_has_no_optimizer_state(ranks):
    for rank in ranks:
        assert_equal(*rank["float32", "first"])
        assert_equal(*rank["bfloat16", "first"])


def test_most_of_the_state_has_a_quarter_of_the_bytes(ranks):
    for rank in ranks:
        # 8 bytes per weight without quantization; norms are not quantized, and each tensor has 1 KiB of values of codes.
        assert 2.03 < rank["bytes"] / rank["weights"] < 2.6
        assert rank["finite"] is None


def test_losses_fall_as_with_float32_state(ranks):
    for rank in ranks:
        expected = [loss for loss, _ in rank["torch.optim.AdamW"]]
        losses = [loss for loss, _ in rank["torchao.optim.AdamW8bit"]]
        assert expected[-1] < expected[0]
        # Codes round moments by about 1 %, which adds up over six steps, in which losses fall by a factor of ten or more.
        assert losses == pytest.approx(expected, rel=0.05)


def test_a_changed_learning_rate_applies_as_if_the_run_had_had_it_from_its_start(ranks):
    for rank in ranks:
        unchanged = rank["float32", "resumed"][0][0]
        assert [lr for _, lr in rank["changed"]] == pytest.approx([3 * lr for _, lr in unchanged])


def test_state_of_another_number_of_shards_is_refused(ranks):
    assert "quantized optimizer state of 2 shard(s) of the weights, and this run has 1" in ranks[0]["refused"]


def test_state_of_adapters_is_whole_and_continues_on_another_number_of_ranks(ranks):
    (state, losses), *two = (rank["lora"] for rank in ranks)
    assert any(tensor.dtype == torch.uint8 for tensor in state.values())
    for of_rank, _ in two:
        assert_equal(state, of_rank)
    # Sums over ranks are in another order, and codes may round to the next one.
    assert [first + second for first, second in zip(two[0][1], two[1][1], strict=True)] == pytest.approx(losses, rel=1e-3)


def test_the_state_leaves_the_gpu_through_pinned_memory_and_returns_with_its_bits(model, parts, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(sys.prefix) / "torchao"))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # as TORCHDYNAMO_DISABLE does
    optimizer, rows = {"name": "torchao.optim.AdamW8bit", "kwargs": {"lr": 1e-2}}, parts.make_rows()
    with SimulatedGpu().active() as gpu:
        config = parts.make_config(str(model), optimizer=optimizer, precision="bfloat16")
        worker = HFPolicyWorker(dataclasses.replace(parts.make_context(), device="cuda"), config)
        worker.setup()
        newly_pinned = []
        for _ in range(2):
            worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
            before, resident = [tensor.cpu() for tensor in worker.state.tensors()], torch.cuda.memory_allocated()
            pinned = gpu.pinned
            with gpu.counting() as waits:
                worker.offload_before_refit()
                worker.offload_after_refit()
            newly_pinned.append(gpu.pinned - pinned)
            assert waits.total() == 2, waits
            assert torch.cuda.memory_allocated() < 100, "step counts at most"
            with gpu.counting() as waits:
                worker.prepare_for_training()
            assert not waits
            assert torch.cuda.memory_allocated() == resident
            after = [tensor.cpu() for tensor in worker.state.tensors()]
            assert any(tensor.dtype == torch.uint8 for tensor in after)
            assert all(map(torch.equal, before, after))
    first, second = newly_pinned
    assert first > 0
    assert second == 0


@pytest.mark.full("compiling the steps takes a minute")
def test_compiled_steps_give_the_weights_of_steps_that_are_not_compiled(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(sys.prefix) / "torchao"))
    config = OptimizerConfig(name="torchao.optim.AdamW8bit", kwargs={"lr": 1e-2})
    gradients = torch.randn(3, 64, 128, generator=torch.Generator().manual_seed(0))

    def weights() -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(64, 128))
        optimizer = build_optimizer({"weight": weight}, config)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        return weight.detach()

    compiled = weights()
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    # Fused operations round differently, by one unit in the last place (1.2e-7); a step moves a weight by about 1e-2.
    torch.testing.assert_close(compiled, weights(), atol=1e-6, rtol=0)
    assert (compiled - 1).abs().max() > 1e-2


def test_without_a_compiler_the_error_names_the_key(monkeypatch):
    import torch._inductor.config as inductor

    monkeypatch.syspath_prepend(str(Path(sys.prefix) / "torchao"))
    config = OptimizerConfig(name="torchao.optim.AdamW8bit", kwargs={"lr": 1e-2})
    torch._dynamo.reset()
    with (
        inductor.patch({"cpp.cxx": ("/nonexistent/compiler",), "force_disable_caches": True}),
        pytest.raises(UserError, match=r"AdamW8bit cannot be compiled: .*C\+\+ compiler") as caught,
    ):
        build_optimizer({"weight": torch.nn.Parameter(torch.ones(64, 128))}, config)
    assert caught.value.key == "policy.optimizer.name"
    torch._dynamo.reset()
