"""Decoder layers that are compiled with `torch.compile`."""

import json
from pathlib import Path

import pytest
import torch
from rank_processes import RankProgram

from rl_backends_hf.training.worker import HFPolicyWorker, compile_layers
from rl_core.errors import NotSupportedError, UserError
from rl_core.rendezvous.interfaces import free_port


@pytest.fixture
def start(parts, model_folder):
    """A function that starts a policy on a tiny model."""

    def start(kind="llama", *, hf=None, **fields):
        worker = HFPolicyWorker(parts.make_context(), parts.make_config(model_folder(kind), hf=hf, **fields))
        worker.setup()
        return worker

    return start


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    yield
    torch._dynamo.reset()


def gradients_of_a_step(parts, worker, rows):
    before = {name: each.clone() for name, each in worker.iter_weights()}
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    return parts.gradients_from(before, dict(worker.iter_weights()))


def step_without_gradient(parts, worker, rows):
    """Score and train on rows with weight 0, which changes no weight."""
    worker.get_logprobs(rows)
    rows = rows.copy()
    rows["weights"] = torch.zeros_like(rows["weights"])
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))


@pytest.mark.full("refusals and the error without a compiler are tested below; compiling takes a minute per case")
@pytest.mark.parametrize(
    ("kind", "fields", "hf"),
    [
        ("llama-tied", {}, {}),
        ("qwen3", {"activation_checkpointing": True}, {}),
        ("gemma2", {}, {}),
        ("llama", {"sequence_packing": {"enabled": True}}, {}),
        ("llama", {}, {"lora": {"rank": 4}}),
    ],
    ids=["shared-prefix", "checkpointed", "windows", "packed", "lora"],
)
def test_numbers_and_gradients_are_those_of_the_model_and_lengths_are_not_compiled_again(parts, start, kind, fields, hf):
    fields = {**fields, "optimizer": parts.SGD, "max_grad_norm": None}
    plain, compiled = start(kind, hf=hf, **fields), start(kind, hf={**hf, "compile_layers": True}, **fields)
    rows = parts.make_prompt_rows()
    step_without_gradient(parts, compiled, rows)
    seen = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert seen > 0
    for seed in (1, 2, 3):
        step_without_gradient(parts, compiled, parts.make_prompt_rows(num_prompts=seed + 1, group=seed + 2, seed=seed))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == seen
    # Fused code rounds some sums in another order: single float32 roundings in numbers of about 5 nats.
    torch.testing.assert_close(compiled.get_logprobs(rows)["logprobs"], plain.get_logprobs(rows)["logprobs"], rtol=0, atol=2e-5)
    expected = gradients_of_a_step(parts, plain, rows)
    for name, gradient in gradients_of_a_step(parts, compiled, rows).items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5 * scale + 1e-9, msg=name)


@pytest.mark.full("the collectives and numbers of FSDP2 are tested without compiling, which takes minutes on two ranks")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fields", [{}, {"activation_checkpointing": True}], ids=["shared-prefix", "checkpointed"])
def test_layers_whose_weights_are_sharded_have_the_same_numbers_and_are_compiled_once(parts, model_folder, tmp_path, fields):
    ports = {free_port("127.0.0.1") for _ in range(2)}
    program = Path(__file__).with_name("compiled_ranks.py")
    RankProgram(program, model_folder("llama"), tmp_path, json.dumps(fields), *sorted(ports)).wait()
    for rank in range(2):
        found = torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False)
        first, *later = found["compiled graphs"]
        assert found["plain graphs"] == [0, 0, 0]
        assert first > 0
        assert later == [first, first]
        plain, compiled = found["plain"], found["compiled"]
        # The tolerances are those of one rank.
        torch.testing.assert_close(compiled["logprobs"], plain["logprobs"], rtol=0, atol=2e-5)
        assert compiled["norm"] == pytest.approx(plain["norm"], rel=1e-5)
        expected = parts.gradients_from(plain["before"], plain["after"])
        for name, gradient in parts.gradients_from(compiled["before"], compiled["after"]).items():
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5 * scale + 1e-9, msg=name)


@pytest.mark.slow
def test_without_a_compiler_the_error_names_the_key(start):
    import torch._inductor.config as inductor

    with (
        inductor.patch({"cpp.cxx": ("/nonexistent/compiler",), "force_disable_caches": True}),
        pytest.raises(UserError, match=r"cannot be compiled on cpu: .*C\+\+ compiler") as caught,
    ):
        start(hf={"compile_layers": True})
    assert caught.value.key == "policy.hf_cfg.compile_layers"


def test_replaced_products_are_not_compiled(start):
    with pytest.raises(UserError, match="no effect on a CPU that multiplies bfloat16 matrices in float32"):
        start(precision="bfloat16", hf={"compile_layers": True, "cpu_products": "float32"})


def test_a_model_that_does_not_name_its_layers_is_refused(start):
    model = start().model.model
    model._no_split_modules = None
    with pytest.raises(NotSupportedError, match="does not name its decoder layers"):
        compile_layers(model, float32_products=False)
