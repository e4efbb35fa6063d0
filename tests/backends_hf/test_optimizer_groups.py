"""Optimizer groups: Muon for the matrices of layers and AdamW for the rest, and learning rates by name."""

import dataclasses

import pytest
import torch
import transformers
from simulated_gpu import SimulatedGpu

from rl_backends_base.optimizer import build_optimizer, parameters_by_group
from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.planned_memory import PolicyMemory
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.config.schema import OptimizerConfig
from rl_core.errors import CheckpointError, ConfigError, UserError

MUON = {"name": "torch.optim.Muon", "kwargs": {"lr": 0.02, "weight_decay": 0.1}}
ADAMW = {"lr": 1e-2, "weight_decay": 0.05}
GROUPS = {"kwargs": ADAMW, "groups": {"matrices": MUON}}
LINEAR = {"name": "linear", "kwargs": {"num_warmup_steps": 2, "num_training_steps": 10}}


@pytest.fixture
def start(parts, model_folder):
    """A separate worker with a tiny model."""

    def started(kind="llama-tied", *, context=None, hf=None, **fields):
        config = parts.make_config(model_folder(kind), hf=hf, **{"optimizer": GROUPS, **fields})
        worker = HFPolicyWorker(context or parts.make_context(), config)
        worker.setup()
        return worker

    return started


def names_of(config, model):
    groups = parameters_by_group(dict(model.named_parameters()), OptimizerConfig(**config))
    return {group: set(members) for group, members in groups.items()}


def record(worker):
    """The gradients with which the worker steps, whole and clipped, by step."""
    seen = []
    worker.state.optimizer.register_step_pre_hook(
        lambda *_: seen.append({name: each.clone() for name, each in worker.state.masters.gradients().items()})
    )
    return seen


def masters_of(worker):
    return {name: each.detach().clone() for name, each in worker.state.masters.parameters.items()}


def state_of(worker):
    return {
        (name, key): value.clone()
        for name, each in worker.state.masters.parameters.items()
        for key, value in worker.state.optimizer.state[each].items()
    }


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_steps_are_those_of_torch_muon_and_adamw_with_one_clipping_and_one_schedule(parts, start, precision):
    rows = parts.make_rows()
    worker = start(precision=precision, scheduler=LINEAR, max_grad_norm=0.5)
    plain = {name: torch.nn.Parameter(each) for name, each in masters_of(worker).items()}
    matrices = [each for name, each in plain.items() if name.endswith("proj.weight")]
    others = [each for name, each in plain.items() if not name.endswith("proj.weight")]
    muon, adamw = torch.optim.Muon(matrices, **MUON["kwargs"]), torch.optim.AdamW(others, **ADAMW, fused=True)
    gradients, counts = record(worker), parts.counts_of(rows)
    for step, share in enumerate((1 / 3, 2 / 3, 1.0, 7 / 8)):
        (result,) = worker.train(rows, parts.NLL(), counts=counts)
        # One norm of all parameters: that of the clipped gradients is the limit.
        norm = torch.stack([each.norm() for each in gradients[step].values()]).norm()
        assert float(norm) == pytest.approx(min(0.5, result.grad_norm), rel=1e-5)
        for name, each in plain.items():
            each.grad = gradients[step][name]
        for optimizer, lr in ((muon, 0.02), (adamw, 1e-2)):
            optimizer.param_groups[0]["lr"] = lr * share
            optimizer.step()
        assert result.group_lrs == pytest.approx({"matrices": 0.02 * share, "rest": 1e-2 * share})
        assert result.lr == pytest.approx(0.02 * share)
    # Learning rates are products in another order, with the rounding of a float64.
    for name, master in masters_of(worker).items():
        torch.testing.assert_close(master, plain[name].detach(), rtol=1e-6, atol=1e-7)
    dtype = getattr(torch, precision)
    exported = {name: each.float() for name, each in worker.iter_weights()}
    assert_equal(
        {name: exported[name] for name in plain}, {name: each.to(dtype).float() for name, each in masters_of(worker).items()}
    )


def test_without_groups_the_optimizer_and_the_layout_of_checkpoints_are_those_of_before(parts, start, tmp_path):
    worker = start(optimizer={"kwargs": ADAMW})
    (result,) = worker.train(parts.make_rows(), parts.NLL(), counts=parts.counts_of(parts.make_rows()))
    assert type(worker.state.optimizer) is torch.optim.AdamW
    assert result.group_lrs == {}
    assert worker.state.settings.state_dict()["settings"] == {
        "optimizer": "torch.optim.adamw.AdamW",
        "kwargs": ADAMW,
        "scheduler": None,
    }


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "gpt2"])
def test_muon_has_the_matrices_of_layers_by_default_and_each_tied_weight_is_once_in_the_rest(model_folder, kind):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder(kind))
    found = names_of(GROUPS, model)
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | transformers.pytorch_utils.Conv1D) and name != "lm_head"
    }
    assert found["matrices"] == linear
    assert found["rest"] == {name for name, _ in model.named_parameters()} - linear
    assert ("lm_head.weight" in found["rest"]) == (kind in ("llama", "qwen2"))


def test_fused_experts_are_left_to_the_other_optimizer_and_refused_in_a_group_of_muon():
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32, "num_attention_heads": 2}
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**shape, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
        )
    experts = {name for name, each in model.named_parameters() if each.ndim == 3}
    assert len(experts) == 2
    assert experts < names_of(GROUPS, model)["rest"]
    config = OptimizerConfig(kwargs=ADAMW, groups={"experts": {**MUON, "params": "*.experts.*"}})
    with pytest.raises(
        UserError, match=r"do not have two axes: model.layers.0.mlp.experts.gate_up_proj \[4, 48, 16\]"
    ) as error:
        build_optimizer(dict(model.named_parameters()), config)
    assert error.value.key == "policy.optimizer.groups.experts"


@pytest.mark.parametrize(
    ("optimizer", "key", "message"),
    [
        (
            {"groups": {"attention": {"params": "q_proj.weight", "kwargs": {"lr": 1.0}}}},
            "policy.optimizer.groups.attention.params",
            "'q_proj.weight' matches no trained parameter. Did you mean '*q_proj.weight*'? Patterns match whole",
        ),
        (
            {"groups": {"a": {**MUON, "params": ["*.q_proj.*"]}, "b": {"params": "*.layers.0.*", "kwargs": {"lr": 1.0}}}},
            "policy.optimizer.groups.b.params",
            "'*.layers.0.*' matches model.layers.0.self_attn.q_proj.weight, which the group 'a' also names.",
        ),
        (
            {"groups": {"a": MUON, "b": MUON}},
            "policy.optimizer.groups.b",
            "there is no matrix of a layer that no other group has.",
        ),
        (
            {"groups": {"norms": {**MUON, "params": ["*norm*"]}}},
            "policy.optimizer.groups.norms",
            "do not have two axes: model.layers.0.input_layernorm.weight [32], ",
        ),
        (MUON, "policy.optimizer", "do not have two axes: model.layers.0.input_layernorm.weight [32], "),
        (
            {"groups": {"a": {"name": "torch.optim.Muon", "kwargs": {"adjust_lr_fn": "none"}}}},
            "policy.optimizer.groups.a.kwargs",
            "Muon rejects {'adjust_lr_fn': 'none'}: Adjust learning rate function none is not supported",
        ),
        (
            {"groups": {"a": {"name": "torch.optim.Muon", "kwargs": {"betas": [0.9, 0.9]}}}},
            "policy.optimizer.groups.a.kwargs.betas",
            "Muon takes no such argument.",
        ),
    ],
)
def test_a_group_that_cannot_be_is_one_error_before_training_and_in_the_deep_check(
    parts, model_folder, start, optimizer, key, message
):
    with pytest.raises(UserError) as error:
        start(optimizer=optimizer)
    assert error.value.key == key
    assert message in str(error.value)
    with pytest.raises(UserError) as early:
        list(parts.make_config(model_folder("llama-tied"), optimizer=optimizer).deep_conflicts(None))
    assert (early.value.key, str(early.value)) == (key, str(error.value))


def test_a_group_without_a_name_has_the_optimizer_of_all_with_its_own_learning_rate(parts, start):
    groups = {"embeddings": {"params": "*.embed_tokens.weight", "kwargs": {"lr": 0.0}}, "matrices": MUON}
    worker = start(optimizer={"kwargs": ADAMW, "groups": groups})
    before = masters_of(worker)
    worker.train(parts.make_rows(), parts.NLL(), counts=parts.counts_of(parts.make_rows()))
    kept = {name for name, each in masters_of(worker).items() if torch.equal(each, before[name])}
    assert kept == {"model.embed_tokens.weight"}
    assert [type(each).__name__ for each in worker.state.optimizer.parts] == ["AdamW", "Muon", "AdamW"]
    assert [each.param_groups[0]["weight_decay"] for each in worker.state.optimizer.parts] == [0.05, 0.1, 0.05]


@pytest.mark.parametrize("name", ["rest", "a b", "", "lr/x"])
def test_a_name_that_metrics_cannot_have_is_refused(model_folder, name):
    with pytest.raises(ConfigError, match="cannot name a group"):
        HuggingFacePolicy(model_folder("llama"), optimizer={"groups": {name: MUON}})


def test_adapters_are_matrices_so_muon_takes_all_of_them(parts, start):
    pytest.importorskip("peft")
    worker = start(hf={"lora": {"rank": 4}})
    assert worker.state.optimizer.names == ("matrices",)
    first = masters_of(worker)
    worker.train(parts.make_rows(), parts.NLL(), counts=parts.counts_of(parts.make_rows()))
    # B starts at 0, so the gradient of A is 0 in the first step: only weight decay changes it.
    for name, each in masters_of(worker).items():
        if ".lora_A." in name:
            torch.testing.assert_close(each, first[name] * (1 - 0.02 * 0.1))
        else:
            assert each.norm() > 0
    with_magnitudes = start(hf={"lora": {"rank": 4, "use_dora": True}}).state.optimizer
    assert with_magnitudes.names == ("matrices", "rest")
    alone = start(hf={"lora": {"rank": 4}}, optimizer=MUON).state.optimizer
    assert type(alone) is torch.optim.Muon


@pytest.mark.parametrize(("precision", "hf"), [("float32", {}), ("bfloat16", {}), ("bfloat16", {"lora": {"rank": 4}})])
def test_a_resumed_run_has_the_bits_of_a_run_without_interruption(parts, start, tmp_path, precision, hf):
    if hf:
        pytest.importorskip("peft")
    groups = {"values": {"params": "*.v_proj.*", "kwargs": {"lr": 3e-3}}, "matrices": MUON}
    fields = {"precision": precision, "scheduler": LINEAR, "hf": hf, "optimizer": {"kwargs": ADAMW, "groups": groups}}
    rows, worker = parts.make_rows(), start(**fields)
    counts = parts.counts_of(rows)
    for _ in range(2):
        worker.train(rows, parts.NLL(), counts=counts)
    worker.save_checkpoint(tmp_path / "w", tmp_path / "o")
    # The order of the groups in the file has no meaning.
    resumed = start(**{**fields, "optimizer": {"kwargs": ADAMW, "groups": dict(reversed(groups.items()))}})
    resumed.load_checkpoint(tmp_path / "w", tmp_path / "o")
    assert_equal(state_of(worker), state_of(resumed))
    results = [[each.train(rows, parts.NLL(), counts=counts)[0] for _ in range(2)] for each in (worker, resumed)]
    assert results[0] == results[1]
    assert_equal(masters_of(worker), masters_of(resumed))
    assert_equal(state_of(worker), state_of(resumed))


def test_a_resume_changes_arguments_of_a_group_but_not_its_optimizer_or_parameters(parts, start, tmp_path):
    worker, rows = start(scheduler=LINEAR), parts.make_rows()
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    worker.save_checkpoint(tmp_path / "w", tmp_path / "o")
    faster = {**MUON, "kwargs": {"lr": 0.2, "momentum": 0.5}}
    resumed = start(scheduler=LINEAR, optimizer={"kwargs": ADAMW, "groups": {"matrices": faster}})
    resumed.load_checkpoint(tmp_path / "w", tmp_path / "o")
    assert_equal(state_of(worker), state_of(resumed))
    muon, adamw = (part.param_groups[0] for part in resumed.state.optimizer.parts)
    assert (muon["lr"], adamw["lr"]) == pytest.approx((0.2 * 2 / 3, 1e-2 * 2 / 3))
    assert (muon["momentum"], muon["weight_decay"], adamw["weight_decay"]) == (0.5, 0.1, 0.05)
    for groups in ({}, {"matrices": {"kwargs": {"lr": 1.0}}}, {"matrices": {**MUON, "params": ["*.q_proj.*"]}}):
        other = start(scheduler=LINEAR, optimizer={"kwargs": ADAMW, "groups": groups})
        with pytest.raises(CheckpointError, match="was written with the optimizer groups") as error:
            other.load_checkpoint(tmp_path / "w", tmp_path / "o")
        assert error.value.key == "optimizer.groups"


def test_an_optimizer_without_state_resumes_next_to_one_with_state(parts, start, tmp_path):
    optimizer = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}, "groups": {"matrices": MUON}}
    worker, rows = start(optimizer=optimizer), parts.make_rows()
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    worker.save_checkpoint(tmp_path / "w", tmp_path / "o")
    resumed = start(optimizer=optimizer)
    resumed.load_checkpoint(tmp_path / "w", tmp_path / "o")
    for each in (worker, resumed):
        each.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    assert_equal(masters_of(worker), masters_of(resumed))


def test_a_schedule_that_gives_all_groups_one_learning_rate_is_refused(start):
    cycle = {
        "name": "torch.optim.lr_scheduler.OneCycleLR",
        "kwargs": {"max_lr": 0.1, "total_steps": 9, "cycle_momentum": False},
    }
    with pytest.raises(UserError, match=r"sets the same learning rate for all groups .* 0.02, 0.01") as error:
        start(scheduler=cycle)
    assert error.value.key == "policy.scheduler.name"
    halves = {"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step_size": 1, "gamma": 0.5}}
    assert start(scheduler=halves).state.group_lrs() == {"matrices": 0.02, "rest": 0.01}


def newton_schulz(matrix, steps=5):
    """The orthogonalization of Keller Jordan's post on Muon (2024), in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.double() / matrix.double().norm()
    if x.shape[0] > x.shape[1]:
        x = x.T
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("shape", [(64, 64), (32, 96), (96, 32)])
def test_the_bfloat16_of_muon_changes_its_steps_by_one_to_two_percent(shape):
    """The update of a first step against the same iteration in float64."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = torch.randn(shape)
    torch.optim.Muon([weight], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    expected = -newton_schulz(weight.grad) * max(1.0, shape[0] / shape[1]) ** 0.5
    difference = float((weight.detach().double() - expected).norm() / expected.norm())
    # A bfloat16 has 8 bits, so each of 15 products rounds by up to 0.4 %, and random errors add up to sqrt(15) times 0.2 %,
    # some of them amplified by later iterations. In float32, the difference would be 1e-6.
    assert 0.005 < difference < 0.03
    # The coefficients do not converge to singular values of 1: the published range ends at about 1.2.
    assert torch.linalg.matrix_norm(weight.detach() / max(1.0, shape[0] / shape[1]) ** 0.5, ord=2) < 1.25


def test_the_state_is_planned_as_it_is_held_and_muon_needs_room_for_its_largest_matrix(parts, model_folder, start):
    worker, rows = start("llama"), parts.make_rows()
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    shapes = {"ranks": 1, "train": (4, 20), "several": True, "score": None, "reference": False, "on_gpu": False}
    memory = PolicyMemory(worker.config)
    phases = memory.by_phase(**shapes)
    assert phases["held"]["optimizer state"] == sum(each.nbytes for each in state_of(worker).values() if each.ndim > 0)
    # The largest matrices are 48 x 32: a float32 update, two bfloat16 matrices, two bfloat16 Gram matrices.
    assert phases["update"]["orthogonalized matrix"] == 48 * 32 * (4 + 2 * 2) + 32 * 32 * 2 * 2
    assert memory.not_counted() == []
    unknown = {**GROUPS, "groups": {"matrices": {"name": "torch.optim.Adagrad"}}}
    assert PolicyMemory(parts.make_config(model_folder("llama"), optimizer=unknown)).not_counted() == [
        "state of the optimizer torch.optim.Adagrad"
    ]


def test_the_states_of_both_optimizers_leave_the_gpu_and_return_with_their_bits(parts, start):
    rows = parts.make_rows()
    with SimulatedGpu().active():
        worker = start(context=dataclasses.replace(parts.make_context(), device="cuda"), precision="bfloat16")
        worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
        before = {name: each.cpu() for name, each in state_of(worker).items()}
        worker.offload_before_refit()
        away = {each.device.type for each in worker.state.tensors() if each.ndim > 0}
        worker.prepare_for_training()
        back = {each.device.type for each in worker.state.tensors()}
        assert (away, back) == ({"cpu"}, {"cuda"})
        assert_equal({name: each.cpu() for name, each in state_of(worker).items()}, before)
        worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))


def test_losses_fall_with_muon(parts, start):
    worker, rows = start(), parts.make_rows()
    losses = [worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))[0].loss for _ in range(8)]
    assert losses[-1] < losses[0] / 2
