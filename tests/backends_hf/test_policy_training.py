import copy

import pytest
import torch
import transformers

from rl_backends_base.optimizer import MasterWeights, build_optimizer
from rl_backends_base.optimizer_settings import build_scheduler
from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFModelConfig, HFPolicyConfig
from rl_backends_hf.model import exact_weights
from rl_backends_hf.training.worker import HFPolicyWorker
from rl_core.config.schema import OptimizerConfig, SchedulerConfig
from rl_core.errors import CheckpointError, ConfigError, NonFiniteError, NotSupportedError, UserError


@pytest.fixture
def start(parts, model_folder):
    """A separate worker with a tiny model."""

    def started(kind="llama-tied", **fields):
        worker = HFPolicyWorker(parts.make_context(), parts.make_config(model_folder(kind), **fields))
        worker.setup()
        return worker

    return started


def snapshot(worker):
    return {name: tensor.clone() for name, tensor in worker.iter_weights()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_steps_are_those_of_torch_adamw_with_clipping_and_schedule(parts, model_folder, start):
    rows = parts.make_rows()
    # Adam divides by the gradient's size; this eps keeps float32 noise in tiny gradients from becoming whole steps.
    kwargs = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
    worker = start(
        "qwen2",
        optimizer={"name": "torch.optim.AdamW", "kwargs": kwargs},
        scheduler={"name": "linear", "kwargs": {"num_warmup_steps": 2, "num_training_steps": 10}},
        max_grad_norm=0.5,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("qwen2"), dtype=torch.float32)
    plain = torch.optim.AdamW(model.parameters(), **kwargs)
    counts = parts.counts_of(rows, steps=2)
    results = worker.train(rows, parts.NLL(), counts=counts) + worker.train(rows, parts.NLL(), counts=counts)
    for number, share in enumerate((1 / 3, 2 / 3, 1.0, 7 / 8)):
        half = rows.slice(4 * (number % 2), 4 * (number % 2) + 4)
        mask = half["token_mask"] * half["sample_mask"].unsqueeze(1)
        scored = parts.plain_logprobs(model, half)
        plain.zero_grad()
        (-(scored * mask * half["weights"].unsqueeze(1)).sum() / mask.sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        plain.param_groups[0]["lr"] = 1e-2 * share
        plain.step()
        assert results[number].grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert results[number].lr == pytest.approx(1e-2 * share)
    for name, tensor in worker.iter_weights():
        # A step is 1e-2, so this is four digits of it.
        torch.testing.assert_close(tensor, model.get_parameter(name).data, rtol=0, atol=1e-6)
    assert worker.get_weight_version() == 4


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_nan_leaves_weights_optimizer_and_version_untouched(parts, start, where):
    rows = parts.make_rows()
    worker = start(optimizer={"kwargs": {"lr": 1e-2}})
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    weights, moments = snapshot(worker), copy.deepcopy(worker.state.optimizer.state_dict())

    class Poisoned(parts.NLL):
        def __call__(self, next_token_logprobs, data, seqs, toks):
            loss, metrics = super().__call__(next_token_logprobs, data, seqs, toks)
            if where == "loss":
                return loss * float("nan"), metrics
            # Zero with an infinite slope: the loss is finite and its gradient is not.
            return loss + (next_token_logprobs * 0).sum().sqrt() * 0, metrics

    with pytest.raises(NonFiniteError, match="rank 0 is" if where == "loss" else "first non-finite gradient"):
        worker.train(rows, Poisoned(), counts=parts.counts_of(rows), mbs=3)
    assert_same(snapshot(worker), weights)
    assert worker.get_weight_version() == 1
    for key, values in worker.state.optimizer.state_dict()["state"].items():
        assert_same(values, moments["state"][key])
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))


def test_bfloat16_steps_too_small_for_bfloat16_add_up_in_the_masters(parts, start):
    rows = parts.make_rows()
    worker = start(precision="bfloat16", optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 2e-5}}, max_grad_norm=None)
    before = snapshot(worker)
    masters = {name: parameter.detach().clone() for name, parameter in worker.state.masters.parameters.items()}
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    changed = sum(int((tensor != before[name]).sum()) for name, tensor in worker.iter_weights())
    moved = sum(int((p.detach() != masters[name]).sum()) for name, p in worker.state.masters.parameters.items())
    assert all(tensor.dtype == torch.bfloat16 for tensor in before.values())
    assert moved > 10 * changed
    for state in worker.state.optimizer.state.values():
        assert all(value.dtype == torch.float32 for value in state.values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3"])
def test_master_weights_start_from_the_float32_checkpoint_and_not_from_rounded_weights(start, model_folder, kind, tmp_path):
    worker = start(kind, precision="bfloat16")
    exact = transformers.AutoModelForCausalLM.from_pretrained(model_folder(kind), dtype=torch.float32)
    assert_same(
        {name: master.detach() for name, master in worker.state.masters.parameters.items()},
        {name: parameter.detach() for name, parameter in exact.named_parameters()},
    )
    rounded = transformers.AutoModelForCausalLM.from_pretrained(model_folder(kind), dtype=torch.bfloat16)
    rounded.save_pretrained(tmp_path / "rounded")
    assert exact_weights(str(tmp_path / "rounded"), options=HFModelConfig(), dtype=torch.bfloat16) == {}


def test_exported_weights_move_as_much_as_the_master_weights_on_average(parts, start):
    """A step far below the resolution of bfloat16: a few weights near a rounding boundary cross it."""
    worker = start(precision="bfloat16", optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}})
    masters = worker.state.masters
    before = {name: tensor.float() for name, tensor in snapshot(worker).items()}
    step = 1e-5
    with torch.no_grad():
        for master in masters.parameters.values():
            master.add_(step)
    masters.copy_to_model()
    moved = torch.cat(
        [(tensor.float() - before[name]).flatten() for name, tensor in worker.iter_weights() if "norm" not in name]
    )
    # Weights of about 0.02 lie on a grid of about 1e-4, on which few move, by ten times the step; 10 % is four standard errors.
    assert 0.01 < float((moved != 0).float().mean()) < 0.5
    assert float(moved.mean()) == pytest.approx(step, rel=0.1)


def test_resumed_training_equals_uninterrupted_training(parts, start, tmp_path):
    fields = {
        "optimizer": {"kwargs": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"name": "cosine", "kwargs": {"num_training_steps": 9}},
        "hf": {"config_overrides": {"attention_dropout": 0.2}, "attn_implementation": "eager"},
    }
    batches = [parts.make_rows(seed=seed) for seed in range(4)]

    def step(worker, rows):
        return worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))[0]

    with torch.random.fork_rng():
        torch.manual_seed(1)
        straight = start(**fields)
        for rows in batches[:2]:
            step(straight, rows)
        straight.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
        expected = [step(straight, rows) for rows in batches[2:]]
        resumed = start(**fields)
        torch.manual_seed(2)
        resumed.load_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
        assert [step(resumed, rows) for rows in batches[2:]] == expected
    assert_same(snapshot(resumed), snapshot(straight))
    assert resumed.get_weight_version() == 4


def test_bfloat16_resumes_bit_for_bit_from_its_masters(parts, start, tmp_path):
    fields = {"precision": "bfloat16", "optimizer": {"kwargs": {"lr": 1e-4}}}
    rows = parts.make_rows()
    straight = start(**fields)
    straight.train(rows, parts.NLL(), counts=parts.counts_of(rows, steps=2))
    straight.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    resumed = start(**fields)
    resumed.load_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    for worker in (straight, resumed):
        worker.train(rows, parts.NLL(), counts=parts.counts_of(rows, steps=2))
    assert_same(
        {name: p.detach() for name, p in resumed.state.masters.parameters.items()},
        {name: p.detach() for name, p in straight.state.masters.parameters.items()},
    )


def test_a_checkpoint_before_the_first_step_changes_neither_that_run_nor_a_resumed_one(parts, start, tmp_path):
    fields, rows = {"optimizer": {"kwargs": {"lr": 1e-2}}}, parts.make_rows()
    plain, saved, resumed = (start(**fields) for _ in range(3))
    saved.save_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    resumed.load_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    for worker in (plain, saved, resumed):
        worker.train(rows, parts.NLL(), counts=parts.counts_of(rows, steps=2))
    assert_same(snapshot(saved), snapshot(plain))
    assert_same(snapshot(resumed), snapshot(plain))


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3"])
def test_saved_weights_are_what_transformers_loads(parts, start, tmp_path, kind):
    rows = parts.make_rows()
    worker = start(kind, optimizer={"kwargs": {"lr": 1e-2}})
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    worker.save_checkpoint(tmp_path, None)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same({name: parameter.data for name, parameter in model.named_parameters()}, snapshot(worker))
    assert (tmp_path / "model.safetensors").is_file()
    sent = {name: (tuple(tensor.shape), str(tensor.dtype)[len("torch.") :]) for name, tensor in worker.iter_weights()}
    assert sent == worker.weight_manifest()


def test_the_reference_stays_the_initial_policy_through_training_and_resuming(parts, start, tmp_path):
    rows = parts.make_rows()
    worker = start(optimizer={"kwargs": {"lr": 1e-2}})
    initial = worker.get_logprobs(rows)["logprobs"]
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    worker.save_checkpoint(tmp_path / "w", tmp_path / "o")
    resumed = start()
    resumed.load_checkpoint(tmp_path / "w", tmp_path / "o")
    for each in (worker, resumed):
        assert torch.equal(each.get_logprobs(rows, reference=True)["logprobs"], initial)
        assert not torch.equal(each.get_logprobs(rows)["logprobs"], initial)
    with pytest.raises(NotSupportedError, match="has no reference"):
        start(hf={"reference": False}).get_logprobs(rows, reference=True)


def test_checkpoints_that_do_not_fit_are_refused_with_their_reason(parts, start, tmp_path):
    rows = parts.make_rows()
    worker = start("llama", optimizer={"kwargs": {"lr": 1e-2}})
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    worker.save_checkpoint(tmp_path / "w", tmp_path / "o")
    other = start("qwen3")
    before = snapshot(other)
    with pytest.raises(CheckpointError, match="no config"):
        other.load_checkpoint(tmp_path / "absent", None)
    with pytest.raises(CheckpointError, match="a different model"):
        other.load_checkpoint(tmp_path / "w", None)
    with pytest.raises(CheckpointError, match="no training state"):
        worker.load_checkpoint(tmp_path / "w", tmp_path / "absent")
    (tmp_path / "o" / "trainer.pt").write_bytes((tmp_path / "o" / "trainer.pt").read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged"):
        worker.load_checkpoint(tmp_path / "w", tmp_path / "o")
    whole = (tmp_path / "w" / "model.safetensors").read_bytes()
    (tmp_path / "w" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="is incomplete or corrupt"):
        worker.load_checkpoint(tmp_path / "w", None)
    assert_same(snapshot(other), before)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"name": "torch.optim.AdamWW"}, "Did you mean 'AdamW'"),
        ({"name": "torch.optimm.AdamW"}, "cannot import 'torch.optimm'"),
        ({"name": "torch.optim.AdamW", "kwargs": {"learning_rate": 1.0}}, "takes no such argument"),
        ({"name": "torch.optim.AdamW", "kwargs": {"weight_decy": 1.0}}, "Did you mean 'weight_decay'"),
        ({"name": "torch.optim.AdamW", "kwargs": {"lr": -1.0}}, "rejects"),
        ({"name": "torch.optim.Optimizer"}, "is missing defaults"),
        ({"name": "torch.nn.ParameterList"}, "not a torch optimizer"),
    ],
)
def test_an_invalid_optimizer_is_an_error_with_a_reason(section, says):
    weights = {"w": torch.nn.Parameter(torch.zeros(2, 2))}
    with pytest.raises(UserError, match=says):
        build_optimizer(weights, OptimizerConfig(**{"kwargs": {}, **section}))


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"name": "lineer"}, "Did you mean 'linear'"),
        ({"name": "linear"}, "is missing num_training_steps"),
        ({"name": "cosine", "kwargs": {"warmup": 3}}, "Did you mean 'num_warmup_steps'|takes no such argument"),
        ({"name": "torch.optim.lr_scheduler.CosineAnealingLR"}, "Did you mean 'CosineAnnealingLR'"),
    ],
)
def test_an_invalid_schedule_is_an_error_with_a_reason(section, says):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    with pytest.raises(UserError, match=says):
        build_scheduler(optimizer, SchedulerConfig(**section))


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"name": "constant", "kwargs": {"num_warmup_steps": 3}}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ({"name": "linear", "kwargs": {"num_training_steps": 4}}, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"name": "cosine", "kwargs": {"num_training_steps": 4}}, [1.0, 0.853553, 0.5, 0.146447, 0.0]),
        ({"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.5}}, [1.0, 0.5, 0.25, 0.125, 0.0625]),
    ],
)
def test_schedules_have_the_shape_that_their_name_says(section, expected):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    scheduler = build_scheduler(optimizer, SchedulerConfig(**section))
    rates = []
    for _ in expected:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "kwargs", "fused"),
    [
        ("torch.optim.AdamW", {}, True),
        ("torch.optim.Adam", {}, True),
        ("torch.optim.AdamW", {"fused": False}, False),
        ("torch.optim.AdamW", {"foreach": True}, None),
        ("torch.optim.SGD", {}, None),
    ],
)
def test_adam_is_fused_unless_kwargs_choose_another_implementation(name, kwargs, fused):
    weights = {"weight": torch.nn.Parameter(torch.ones(2))}
    optimizer = build_optimizer(weights, OptimizerConfig(name=name, kwargs={"lr": 0.1, **kwargs}))
    assert optimizer.param_groups[0]["fused"] is fused


def test_weight_decay_can_exclude_biases_and_norms():
    weights = {"matrix": torch.nn.Parameter(torch.ones(2, 2)), "norm": torch.nn.Parameter(torch.ones(2))}
    kwargs = {"lr": 0.1, "weight_decay": 0.5, "decay_matrices_only": True}
    optimizer = build_optimizer(weights, OptimizerConfig(kwargs=kwargs))
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(weights["norm"], torch.ones(2))
    assert torch.all(weights["matrix"] < 1.0)


def test_the_promised_constructor_takes_fields_of_policy_and_of_hf_cfg(model_folder):
    policy = HuggingFacePolicy(
        model_folder("llama"), torch_dtype=torch.bfloat16, device_map="cpu", load_in_8bit=False, max_grad_norm=2.0
    )
    assert policy.config.precision == "bfloat16"
    assert policy.config.hf_cfg.device_map == "cpu"
    assert policy.config.max_grad_norm == 2.0
    assert policy.facts["vocab_size"] == 160
    assert HuggingFacePolicy(config=policy.config).config == policy.config


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model_name": "m", "max_gradnorm": 1.0}, "Did you mean 'max_grad_norm'"),
        ({"model_name": "m", "torch_dtype": "float16"}, "precision.*float32.*bfloat16"),
        ({"model_name": "m", "load_in_4bit": True, "load_in_8bit": True}, "cannot be combined"),
        ({"model_name": "m", "generation": {"temperature": -1}}, "temperature"),
        ({"model_name": "m", "config": HFPolicyConfig(model_name="m")}, "additional fields"),
        ({}, "needs a model"),
    ],
)
def test_an_invalid_constructor_call_is_an_error_with_a_reason(arguments, says):
    with pytest.raises(ConfigError, match=says):
        HuggingFacePolicy(**arguments)


def test_a_frozen_model_only_scores_and_allocates_no_training_state(parts, start):
    rows = parts.make_rows()
    frozen, trained = start(precision="bfloat16", frozen=True), start(precision="bfloat16")
    assert torch.equal(frozen.get_logprobs(rows)["logprobs"], trained.get_logprobs(rows)["logprobs"])
    assert frozen.state is None
    with pytest.raises(NotSupportedError, match="is frozen"):
        frozen.train(rows, parts.NLL(), counts=parts.counts_of(rows))
    assert frozen.train(rows, parts.NLL(), counts=parts.counts_of(rows), eval_mode=True)[0].loss > 0


def test_master_weights_fall_back_to_rounded_weights_with_a_warning(caplog):
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    masters = MasterWeights(model, model_dtype=torch.bfloat16)
    near = model.bias.detach().float() * (1 + 2**-12)
    masters.load_exact({"weight": model.weight.detach().float() + 1.0, "bias": near})
    assert torch.equal(masters.parameters["weight"], model.weight.float())
    assert torch.equal(masters.parameters["bias"], near)
    assert "weight differs from its float32 value" in caplog.text


def test_layers_return_freed_memory_in_training_passes(parts, start, monkeypatch):
    returned = []
    monkeypatch.setattr("rl_backends_hf.training.worker.return_freed_memory", lambda: returned.append(torch.is_grad_enabled()))
    worker, rows = start(), parts.make_rows()
    worker.get_logprobs(rows)
    assert returned == []
    worker.train(rows, parts.NLL(), counts=parts.counts_of(rows), mbs=4)
    assert returned == [True] * worker.model.model.config.num_hidden_layers * (rows.size // 4)
