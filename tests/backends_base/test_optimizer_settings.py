"""A resume continues the optimizer state with the settings of the current config."""

import copy
from typing import Any

import pytest
import torch
from pydantic import Field

from rl_backends_base.optimizer import OptimizerChain, build_optimizer
from rl_backends_base.optimizer_settings import OptimizerSettings
from rl_core.config.schema import OptimizerConfig, SchedulerConfig
from rl_core.errors import CheckpointError

ADAMW = "torch.optim.AdamW"


class Counting(torch.optim.Optimizer):
    """Keeps a count in its parameter group, like optimizers that estimate their step size."""

    def __init__(self, params, lr=1.0, decay=0.5):
        super().__init__(params, {"lr": lr, "decay": decay, "count": 0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1


def make(kind, kwargs, scheduler=None, groups=1):
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(groups)]
    optimizer = kind([{"params": [parameter]} for parameter in parameters], **kwargs)
    section = None if scheduler is None else SchedulerConfig(name=scheduler[0], kwargs=scheduler[1])
    return OptimizerSettings(optimizer, OptimizerConfig(name=ADAMW, kwargs=kwargs), section)


def run(settings, steps):
    """The parameter group before each step."""
    seen = []
    for _ in range(steps):
        seen.append({key: value for key, value in settings.optimizer.param_groups[0].items() if key != "params"})
        settings.optimizer.step()
        settings.scheduler.step()
    return seen


SCHEDULES = [
    None,
    ("linear", {"num_training_steps": 9, "num_warmup_steps": 3}),
    ("cosine", {"num_training_steps": 20, "min_lr_ratio": 0.1}),
    ("torch.optim.lr_scheduler.StepLR", {"step_size": 2, "gamma": 0.5}),
    ("torch.optim.lr_scheduler.CosineAnnealingLR", {"T_max": 12, "eta_min": 1e-4}),
    # It changes the betas, too.
    ("torch.optim.lr_scheduler.OneCycleLR", {"max_lr": 0.1, "total_steps": 12}),
]


@pytest.mark.parametrize("after", SCHEDULES)
@pytest.mark.parametrize("before", SCHEDULES)
def test_changed_settings_apply_as_if_the_run_had_had_them_from_its_start(before, after):
    old = make(torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, before)
    run(old, 5)
    new = {"lr": 0.03, "weight_decay": 0.2, "betas": (0.8, 0.9), "eps": 1e-6}
    resumed, straight = make(torch.optim.AdamW, new, after), make(torch.optim.AdamW, new, after)
    resumed.load_state_dict(copy.deepcopy(old.state_dict()), steps=5, source="checkpoint")
    assert run(resumed, 4) == run(straight, 9)[5:]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_unchanged_settings_continue_exactly_as_saved(schedule):
    straight = make(torch.optim.AdamW, {"lr": 0.01, "betas": [0.8, 0.9]}, schedule)
    run(straight, 5)
    saved = copy.deepcopy(straight.state_dict())
    resumed = make(torch.optim.AdamW, {"lr": 0.01, "betas": [0.8, 0.9]}, schedule)
    resumed.load_state_dict(saved, steps=5, source="checkpoint")
    assert run(resumed, 4) == run(straight, 4)


def test_a_learning_rate_that_is_a_tensor_is_not_shared_with_the_settings_of_the_config():
    class WithTensor(torch.optim.SGD):
        """Keeps its learning rate as a tensor, as the optimizers of torchao do."""

        def add_param_group(self, param_group):
            super().add_param_group(param_group)
            self.param_groups[-1]["lr"] = torch.as_tensor(self.param_groups[-1]["lr"])

    schedule = ("linear", {"num_training_steps": 8, "num_warmup_steps": 4})
    old, used, straight = (make(WithTensor, {"lr": lr}, schedule) for lr in (0.5, 1.0, 1.0))
    run(old, 2)
    saved = old.state_dict()
    run(straight, 2)
    expected = float(straight.optimizer.param_groups[0]["lr"])
    assert float(saved["param_groups"][0]["lr"]) == expected / 2
    for _ in range(2):
        used.load_state_dict(saved, steps=2, source="checkpoint")
        assert float(used.optimizer.param_groups[0]["lr"]) == expected
        run(used, 2)
        run(old, 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_factor_on_the_learning_rate_leaves_the_schedule_unchanged(schedule):
    """Some schedules compute a rate from the one before, so they must not see the factor."""
    plain, scaled = (make(torch.optim.AdamW, {"lr": 0.01}, schedule, groups=2) for _ in range(2))
    expected = [group["lr"] for group in run(plain, 9)]
    seen = []
    for step, factor in enumerate([1.0, 1.0, 0.5, 0.5, 0.0, 3.0, 3.0, 1.0, 1.0]):
        scaled.lr_factor = factor
        with scaled.scaled_lr() as lr:
            assert {group["lr"] for group in scaled.optimizer.param_groups} == {lr}
            assert lr == expected[step] * factor
            scaled.optimizer.step()
        seen.append(scaled.optimizer.param_groups[0]["lr"])
        scaled.scheduler.step()
    assert seen == expected
    assert scaled.state_dict() == plain.state_dict()


def test_each_optimizer_of_a_chain_steps_with_the_factor_and_tensors_as_learning_rates_stay_the_same_objects():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    parts = [torch.optim.SGD([weights[0]], lr=0.5), torch.optim.SGD([weights[1]], lr=torch.tensor(0.25), foreach=False)]
    settings = OptimizerSettings(OptimizerChain(*parts), OptimizerConfig(name=ADAMW, kwargs={}), None)
    tensor = parts[1].param_groups[0]["lr"]
    settings.lr_factor = 0.5
    for weight in weights:
        weight.grad = torch.full_like(weight, 2.0)
    with settings.scaled_lr() as lr:
        settings.optimizer.step()
    assert lr == 0.25
    assert [weight.tolist() for weight in weights] == [[0.5, 0.5], [0.75, 0.75]]  # 1 - factor * lr * 2
    assert parts[1].param_groups[0]["lr"] is tensor
    assert tensor == 0.25


def test_an_optimizer_that_has_already_stepped_takes_the_settings_of_a_checkpoint_too():
    schedule = ("linear", {"num_training_steps": 9})
    old, used = make(torch.optim.AdamW, {"lr": 0.01}, None), make(torch.optim.AdamW, {"lr": 0.03}, schedule)
    run(old, 2)
    run(used, 6)
    used.load_state_dict(old.state_dict(), steps=2, source="checkpoint")
    assert used.optimizer.param_groups[0]["lr"] == pytest.approx(0.03 * 7 / 9)


def test_state_that_an_optimizer_keeps_in_its_groups_continues_under_changed_settings():
    old = make(Counting, {"lr": 1.0})
    run(old, 5)
    resumed = make(Counting, {"lr": 2.0, "decay": 0.9})
    resumed.load_state_dict(old.state_dict(), steps=5, source="checkpoint")
    assert run(resumed, 1) == [{"lr": 2.0, "decay": 0.9, "count": 5, "initial_lr": 2.0}]


def test_another_optimizer_or_other_parameter_groups_are_an_error():
    saved = make(torch.optim.AdamW, {"lr": 0.01}).state_dict()
    with pytest.raises(CheckpointError, match=r"written by the optimizer .*AdamW, but the config has .*SGD"):
        make(torch.optim.SGD, {"lr": 0.01}).load_state_dict(saved, steps=0, source="checkpoint")
    with pytest.raises(CheckpointError, match=r"1 parameter groups, but the config has 2.*decay_matrices_only"):
        make(torch.optim.AdamW, {"lr": 0.01}, groups=2).load_state_dict(saved, steps=0, source="checkpoint")
    with pytest.raises(CheckpointError, match="damaged: its state has no `param_groups`"):
        make(torch.optim.AdamW, {"lr": 0.01}).load_state_dict({}, steps=0, source="checkpoint")


class LionConfig(OptimizerConfig):
    """The section of a plugin whose default optimizer is its own."""

    name: str = "acme.Lion"
    kwargs: dict[str, Any] = Field(default_factory=lambda: {"lr": 1e-4})


@pytest.mark.parametrize(
    ("section", "kwargs"),
    [
        ({}, {"lr": 1e-4}),
        ({"kwargs": {"beta": 0.9}}, {"lr": 1e-4, "beta": 0.9}),
        ({"name": "torch.optim.AdamW", "kwargs": {"lr": 1}}, {"lr": 1, "weight_decay": 0.0}),
        ({"name": "torch.optim.SGD", "kwargs": {"lr": 1}}, {"lr": 1}),
    ],
)
def test_the_section_of_a_plugin_has_its_own_default_arguments(section, kwargs):
    assert LionConfig.model_validate(section).kwargs == kwargs


def test_a_schedule_that_only_changes_learning_rates_can_scale_those_of_groups():
    """Torch's schedules also record the initial rates; one by its path needs only `step` and `state_dict`."""
    config = OptimizerConfig(name=ADAMW, kwargs={"lr": 0.01}, groups={"matrices": {"kwargs": {"lr": 0.02}}})
    weights = {name: torch.nn.Parameter(torch.ones(2, 2)) for name in ("layers.0.weight", "head.weight")}
    settings = OptimizerSettings(build_optimizer(weights, config), config, SchedulerConfig(name=f"{__name__}.Halving"))
    settings.scheduler.step()
    assert [group["lr"] for group in settings.optimizer.param_groups] == [0.01, 0.005]


class Halving:
    """Halves the learning rates at each step."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        for group in self.optimizer.param_groups:
            group["lr"] /= 2

    def state_dict(self):
        return {}
