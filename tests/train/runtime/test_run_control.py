"""Callbacks and early stopping control real runs: stop, save, learning rate and KL weight; wrong ones are one error each."""

import json
import sys
import textwrap
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from documents import MODULES
from hypothesis import given
from hypothesis import strategies as st

from rl_core.config.diagnostics import InvalidConfigError
from rl_core.errors import ConfigError
from rl_core.plugins import Control, hookimpl
from rl_core.plugins.manager import PluginManager
from rl_train.algorithms.losses.config import AdaptiveKLConfig, ClippedPGLossConfig
from rl_train.algorithms.rewards import KLInReward
from rl_train.config.loader import load_config
from rl_train.control import Callback, EarlyStopping, RunControl, add_callbacks, callbacks_of
from rlcore_cli.main import main
from rlcore_cli.report.page import ending_of
from rlcore_cli.report.run_folder import read_run_folder

ROOT = Path(__file__).parents[3]
CALLBACKS = textwrap.dedent(
    """
    import torch
    from rl_core.plugins import Control, hookimpl

    def stop_after_1(step):
        return Control(stop="one is enough") if step == 1 else None

    def stop_after_3(step):
        return Control(stop="three are enough") if step == 3 else None

    def stop_before_the_first(step):
        return Control(stop="good from the start") if step == 0 else None

    def save_at_2(step):
        return Control(save=step == 2)

    def halve(step):
        return Control(lr_factor=0.5)

    def freeze(step):
        return Control(lr_factor=0.0)

    def raise_weight(step):
        return Control(kl_weight=0.5) if step == 2 else None

    def zero_weight(step):
        return Control(kl_weight=0.0)

    def raises(metrics):
        return metrics["no/such"]

    def returns_a_number(metrics):
        return metrics["reward/mean"]

    def nan(step):
        return Control(lr_factor=float("nan"))

    def negative(step):
        return Control(kl_weight=-0.1)

    class Halving:
        '''Halves the learning rate after every second step, and remembers how far it is.'''

        def __init__(self, every=2):
            self.every, self.factor, self.events = every, 1.0, []

        @hookimpl
        def rlcore_run_started(self, run):
            self.events.append("started")

        @hookimpl
        def rlcore_step_finished(self, step):
            if step % self.every:
                return None
            self.factor /= 2
            return Control(lr_factor=self.factor)

        @hookimpl
        def rlcore_run_finished(self, run, error):
            (run.folder / "events.txt").write_text(f"{self.events} {error}")

        def state_dict(self):
            return {"factor": self.factor}

        def load_state_dict(self, state):
            self.factor = state["factor"]

    class WithTensor(Halving):
        def state_dict(self):
            return {"factor": torch.ones(1)}

    class WithoutState(Halving):
        load_state_dict = property()

    class WithoutHooks:
        def on_step_end(self, args, state, control):
            pass

    class Unmarked:
        def rlcore_step_finished(self, step):
            pass
    """
)


@pytest.fixture
def train(monkeypatch, capfd, tmp_path):
    """`rlcore train` of at most five steps in this process: exit code, standard output and standard error."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # otherwise the command sets it permanently
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_callbacks.py").write_text(CALLBACKS)
    (tmp_path / "sums.yaml").write_text(json.dumps(CONFIG))

    def call(*arguments, callbacks=()):
        sys.modules.pop("my_callbacks", None)
        named = [f"++callbacks.{name}.name=my_callbacks.{name}" for name in callbacks]
        monkeypatch.setattr(sys, "argv", ["rlcore", "train", "sums.yaml", *named, *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code or 0, *capfd.readouterr()

    return call


CONFIG = {
    "defaults": str(ROOT / "examples" / "grpo_addition.yaml"),
    "grpo": {"max_num_steps": 5, "num_prompts_per_step": 4, "val_period": 0, "val_at_start": False, "val_at_end": False},
    "policy": {"optimizer": {"kwargs": {"lr": 1e-3}}, "scheduler": {"kwargs": {"num_warmup_steps": 2}}},
    "cluster": {"backend": "in_process"},
    "checkpointing": {"metric_name": None, "keep_top_k": None, "keep_latest_k": 10},
    "logger": {"run_name": "run"},
}


def steps_of(folder, name="run"):
    """The metrics of a run, without times."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    ends = ("_s", "_gib", "/idle_frac", "canary_error")
    return [{key: value for key, value in json.loads(line).items() if not key.endswith(ends)} for line in lines]


def status(folder):
    return json.loads((folder / "runs" / "run" / "status.json").read_text())


def checkpoints(folder):
    return sorted(path.name for path in (folder / "runs" / "run" / "checkpoints").glob("step_*"))


def log(folder):
    return (folder / "runs" / "run" / "logs" / "driver.log").read_text()


def test_a_stopped_run_ends_like_a_finished_one_and_only_an_explicit_resume_continues_it(train, tmp_path):
    code, output, errors = train(callbacks=["stop_after_1"])
    assert code == 0, errors
    why = "stopped after step 1 by the callback 'callbacks.stop_after_1' (my_callbacks.stop_after_1): one is enough"
    assert why in output
    assert "1 step done" in output
    assert why in log(tmp_path)
    assert status(tmp_path).items() >= {"state": "finished", "steps": 1, "stopped": why}.items()
    assert checkpoints(tmp_path) == ["step_000001"]
    assert ending_of(read_run_folder(tmp_path / "runs" / "run")).sentence == f"Finished: 1 of 5 steps, {why}."

    code, output, errors = train(callbacks=["stop_after_1"])
    assert code == 0, errors
    assert f"run folder runs/run-2, because runs/run exists ({why})" in output

    code, output, errors = train("--resume", "runs/run", callbacks=["stop_after_1"])
    assert code == 0, errors
    assert f"this run was {why}. It continues." in output
    assert [row["step"] for row in steps_of(tmp_path)] == [1, 2, 3, 4, 5]
    assert "stopped" not in status(tmp_path)
    rollouts = [line for path in (tmp_path / "runs/run/rollouts").glob("step_*") for line in path.read_text().splitlines()]
    counts = Counter(json.loads(line)["index"] for line in rollouts)
    assert len(counts) == 5 * 4
    assert len(set(counts.values())) == 1


@pytest.mark.slow
def test_a_run_can_be_stopped_by_the_validation_before_its_first_step(train, tmp_path):
    code, output, errors = train("grpo.val_at_start=true", "grpo.max_val_samples=8", callbacks=["stop_before_the_first"])
    assert code == 0, errors
    assert "0 steps done" in output
    assert [row["step"] for row in steps_of(tmp_path)] == [0]
    assert checkpoints(tmp_path) == ["step_000000"]
    assert status(tmp_path)["steps"] == 0


@pytest.mark.slow
def test_learning_rate_is_the_schedules_times_the_factor_and_a_resumed_run_equals_an_uninterrupted_one(train, tmp_path):
    assert train("logger.run_name=straight", callbacks=["Halving"])[0] == 0
    straight = steps_of(tmp_path, "straight")
    schedule = [1 / 3, 2 / 3, 1, 2 / 3, 1 / 3]  # linear: two steps of warm-up, then to 0 after the last one
    factors = [1, 1, 0.5, 0.5, 0.25]
    assert [row["lr"] for row in straight] == pytest.approx([1e-3 * a * b for a, b in zip(schedule, factors, strict=True)])
    assert [row.get("control/lr_factor") for row in straight] == [None, None, 0.5, 0.5, 0.25]

    assert train("checkpointing.max_time=0.001", callbacks=["Halving"])[0] == 124
    for _ in range(2):  # a process for each step, so that the factor is restored twice
        code, output, errors = train("checkpointing.max_time=0.001", callbacks=["Halving"])
        assert code == 124, errors
    code, output, errors = train(callbacks=["Halving"])
    assert code == 0, errors
    assert "the learning rate is 0.5 times that of the config" in output
    assert steps_of(tmp_path) == straight
    assert (tmp_path / "runs/run/events.txt").read_text() == "['started'] None"


@pytest.mark.slow
def test_the_learning_rate_of_the_critic_is_not_touched(train, tmp_path):
    ppo = {
        "defaults": str(ROOT / "examples" / "ppo_addition.yaml"),
        "ppo": {"max_num_steps": 3, "num_prompts_per_step": 8, "critic_warmup_steps": 1, "ppo_epochs": 1}
        | dict.fromkeys(("val_at_start", "val_at_end"), False),
        "cluster": {"backend": "in_process"},
        "logger": {"run_name": "run"},
    }
    (tmp_path / "sums.yaml").write_text(json.dumps(ppo))
    code, _, errors = train(
        "loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.1", callbacks=["halve", "raise_weight"]
    )
    assert code == 0, errors
    rows = steps_of(tmp_path)
    assert [row.get("lr") for row in rows] == [None, 1e-4, 1e-4]
    assert [row["value/lr"] for row in rows] == [5e-4] * 3
    assert [row.get("kl/penalty_weight") for row in rows] == [None, None, 0.5]


@pytest.mark.slow
def test_with_a_factor_of_zero_no_weight_changes(train, tmp_path):
    assert train("grpo.max_num_steps=3", callbacks=["freeze"])[0] == 0
    assert [row["lr"] > 0 for row in steps_of(tmp_path)] == [True, False, False]
    assert [row["refit/weight_version"] for row in steps_of(tmp_path)] == [0, 1, 2]


@pytest.mark.slow
def test_the_callback_of_the_documents_halves_the_learning_rate_until_it_is_too_low(train, tmp_path):
    (tmp_path / "plateau.py").write_text(MODULES["my_callbacks.py"])
    sections = "{plateau: {name: plateau.HalveOnPlateau, kwargs: {patience: 1}}}"
    code, output, errors = train(f"++callbacks={sections}", "grpo.max_num_steps=20", "policy.scheduler=null")
    assert code == 0, errors
    assert "the learning rate is too low" in output
    rows, best = steps_of(tmp_path), float("-inf")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        factor = row.get("control/lr_factor", 1.0)
        expected = factor if row["reward/mean"] > best else factor / 2
        best = max(best, row["reward/mean"])
        if following is None:
            assert expected <= 0.05
        else:
            assert following.get("control/lr_factor", 1.0) == expected
            assert following["lr"] == 1e-3 * expected


@pytest.mark.slow
def test_checkpoint_is_saved_when_a_callback_asks(train, tmp_path):
    assert train("grpo.max_num_steps=4", callbacks=["save_at_2"])[0] == 0
    assert checkpoints(tmp_path) == ["step_000002", "step_000004"]
    assert "step 2: the callback 'callbacks.save_at_2' (my_callbacks.save_at_2) asks for a checkpoint" in log(tmp_path)


@pytest.mark.slow
def test_weight_of_the_kl_in_the_loss_changes_at_the_step_boundary_and_survives_a_resume(train, tmp_path):
    kl = ("loss_fn.reference_policy_kl_penalty=0.1", "policy.scheduler=null")
    code, _, errors = train(*kl, "checkpointing.max_time=0.001", callbacks=["raise_weight"])
    assert code == 124, errors
    code, _, errors = train(*kl, "checkpointing.max_time=0.001", callbacks=["raise_weight"])
    assert code == 124, errors
    code, output, errors = train(*kl, callbacks=["raise_weight"])
    assert code == 0, errors
    assert "the weight of the KL penalty is 0.5" in output
    rows = steps_of(tmp_path)
    assert [row.get("kl/penalty_weight") for row in rows] == [None, None, 0.5, 0.5, 0.5]
    for row, weight in zip(rows, [0.1, 0.1, 0.5, 0.5, 0.5], strict=True):
        # The loss is that of the policy plus the weighted KL: float32 sums of terms of at most 1.
        assert row["loss"] - row["loss/policy"] == pytest.approx(weight * row["kl/reference"], abs=2e-7)
    assert rows[-1]["kl/reference"] > 1e-4


SLOW = pytest.mark.slow
WRONG = [
    ((), "raises", 1, "of the callback 'callbacks.raises' (my_callbacks.raises) raised KeyError: 'no/such'"),
    pytest.param((), "returns_a_number", 1, "(my_callbacks.returns_a_number) returned ", marks=SLOW),
    pytest.param(
        (), "nan", 1, "raised ValueError: Control.lr_factor must be a finite number, 0 or more, or None; found nan", marks=SLOW
    ),
    pytest.param(
        (),
        "negative",
        1,
        "raised ValueError: Control.kl_weight must be a finite number, 0 or more, or None; found -0.1",
        marks=SLOW,
    ),
    pytest.param((), "zero_weight", 1, "set loss_fn.reference_policy_kl_penalty above 0", marks=SLOW),
    pytest.param(
        ("checkpointing.enabled=false",),
        "save_at_2",
        1,
        "asked for a checkpoint of step 2, but checkpointing.enabled is false",
        marks=SLOW,
    ),
]


@pytest.mark.parametrize(
    ("overrides", "callback", "code", "says"), WRONG, ids=lambda value: value if str(value).isidentifier() else ""
)
def test_a_wrong_callback_ends_the_run_with_one_error_and_a_checkpoint(train, tmp_path, overrides, callback, code, says):
    found, _, errors = train("grpo.max_num_steps=2", *overrides, callbacks=[callback])
    assert found == code
    assert says in errors.replace("\n", " ")
    assert errors.count("\nerror: ") + errors.startswith("error: ") <= 1
    assert status(tmp_path)["state"] == "failed"
    if not overrides:
        assert checkpoints(tmp_path) == ["step_000001"]
    if callback == "raises":
        assert "To run without it, remove callbacks.raises from the config." in errors


@pytest.mark.slow
def test_callbacks_that_contradict_each_other_are_both_named(train):
    code, _, errors = train("grpo.max_num_steps=2", callbacks=["halve", "freeze"])
    assert code == 1
    first, second = "callback 'callbacks.freeze' (my_callbacks.freeze)", "callback 'callbacks.halve' (my_callbacks.halve)"
    assert f"After step 1, the {first} set lr_factor to 0 and the {second} to 0.5. Remove one of them." in errors


MISTAKES = [
    ("callbacks.a.name=my_callbacks.Halvin", "Did you mean 'Halving'?"),
    ("callbacks.a.name=Halving", "must be a dotted path such as my_module.MyCallback"),
    ("callbacks.a.name=my_callbacks.WithoutHooks", "it must have methods marked with @hookimpl"),
    ("callbacks.a.name=my_callbacks.Unmarked", "rlcore_step_finished has no @hookimpl"),
    ("callbacks.a={name: my_callbacks.Halving, kwargs: {often: 3}}", "unexpected keyword argument 'often'"),
    ("callbacks.a={name: my_callbacks.halve, kwargs: {every: 3}}", "is not a class, so `kwargs` has no effect"),
    ("callbacks.a={class: my_callbacks.Halving}", "callbacks.a"),
    ("callbacks=[my_callbacks.Halving]", "must be a section with keys below it"),
    ("callbacks.a.name=my_callbacks.WithTensor", "saving the state raised TypeError"),
    ("stop.metric_name=lr", "metric_name requires mode"),
    ("stop.patience=2", "has no effect without metric_name"),
    ("stop={metric_name: validation/acuracy, mode: max}", "Did you mean 'validation/accuracy'?"),
    ("stop={metric_name: validation/accuracy, mode: max}", "validation never runs between steps. Set grpo.val_period."),
]


@pytest.mark.parametrize(("override", "says"), MISTAKES)
def test_mistakes_in_the_config_are_found_before_the_first_step(train, tmp_path, override, says):
    code, _, errors = train(f"++{override}" if override.startswith("callbacks") else override)
    assert code == 2, errors
    assert says in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "runs/run/metrics.jsonl").exists()


def test_early_stopping_ends_a_run_whose_metric_does_not_improve(train, tmp_path):
    code, output, errors = train("stop={metric_name: num_optimizer_steps, mode: max, patience: 2}")
    assert code == 0, errors
    why = "num_optimizer_steps did not improve in 2 successive values; the best is 1 at step 1"
    assert f"stopped after step 3 by the callback 'stop' (rl_train.control.EarlyStopping): {why}" in output
    assert checkpoints(tmp_path) == ["step_000003"]
    # Another patience needs no confirmation, and the values before the stop count.
    code, output, errors = train("--resume", "runs/run", "stop={metric_name: num_optimizer_steps, mode: max, patience: 1}")
    assert code == 0, errors
    assert "stopped after step 4" in output
    assert "the best is 1 at step 1" in output


@pytest.mark.slow
def test_a_metric_that_only_a_run_can_know_is_refused_after_its_first_step(train, tmp_path):
    code, _, errors = train("stop={metric_name: env/arithmetic/no_such, mode: max}")
    assert code == 2
    assert "stop.metric_name: step 1 has no metric 'env/arithmetic/no_such'." in errors
    assert checkpoints(tmp_path) == ["step_000001"]


def test_early_stopping_refuses_an_unknown_validation_metric_only_after_a_validation_on_its_data():
    config = load_config(ROOT / "examples" / "grpo_addition.yaml").run
    run = SimpleNamespace(config=config, validation_sets=[SimpleNamespace(name=""), SimpleNamespace(name="hard")])
    stopping = EarlyStopping(metric_name="validation/hard/acuracy", mode="max")
    assert stopping.rlcore_step_finished(run, 1, {"loss": 0.0, "validation/accuracy": 0.5}) is None
    with pytest.raises(ConfigError, match="Did you mean 'validation/hard/accuracy'"):
        stopping.rlcore_step_finished(run, 2, {"validation/hard/accuracy": 0.5})
    with pytest.raises(ConfigError, match="step 1 has no metric"):
        EarlyStopping(metric_name="validation/easy/accuracy", mode="max").rlcore_step_finished(
            run, 1, {"validation/accuracy": 0.5}
        )


def test_a_metric_that_only_some_steps_have_is_awaited_and_its_absence_is_a_warning(caplog):
    # kto/margin is absent in a step whose answers all have the same label.
    run = SimpleNamespace(config=load_config(ROOT / "examples" / "kto_addition.yaml").run)
    stopping = EarlyStopping(metric_name="kto/margin", mode="max", patience=1)
    assert stopping.rlcore_step_finished(run, 1, {"loss": 0.0}) is None
    stopping.rlcore_run_finished(None)
    assert "early stopping had no effect: the run has not written the metric kto/margin" in caplog.text
    caplog.clear()
    stopping.rlcore_step_finished(run, 2, {"loss": 0.0, "kto/margin": 0.5})
    assert stopping.rlcore_step_finished(run, 3, {"loss": 0.0, "kto/margin": 0.5}) is not None
    stopping.rlcore_run_finished(None)
    assert caplog.text == ""


@given(
    values=st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0, float("nan")]), max_size=14),
    patience=st.integers(1, 4),
    min_delta=st.sampled_from([0.0, 0.2]),
    mode=st.sampled_from(["max", "min"]),
    resumed_at=st.integers(0, 14),
)
def test_early_stopping_stops_at_the_first_window_without_an_improvement(values, patience, min_delta, mode, resumed_at):
    """The reference: the values that improved are known from the list alone, and the rest is counting."""
    sign, best, improved = (1 if mode == "max" else -1), None, []
    for index, value in enumerate(values):
        if value == value and (best is None or sign * value > sign * best + min_delta):
            best = value
            improved.append(index)
    starts = [-1, *improved]
    expected = next((i for i in range(len(values)) if i - max(s for s in starts if s <= i) >= patience), None)

    settings = {"metric_name": "m", "mode": mode, "patience": patience, "min_delta": min_delta}
    stopping, stopped = EarlyStopping(**settings), None
    for index, value in enumerate(values):
        if index == resumed_at:
            state, stopping = json.loads(json.dumps(stopping.state_dict())), EarlyStopping(**settings)
            stopping.load_state_dict(state)
        if stopping.rlcore_step_finished(None, index, {"m": value}) is not None:
            stopped = index
            break
    assert stopped == expected


@pytest.mark.parametrize(
    "fields",
    [{"stop": True}, {"stop": " "}, {"lr_factor": -1}, {"lr_factor": float("inf")}, {"lr_factor": "0.5"}, {"kl_weight": True}],
)
def test_a_control_with_an_invalid_value_cannot_be_made(fields):
    with pytest.raises(ValueError, match=f"Control.{next(iter(fields))} must be"):
        Control(**fields)


def test_weight_of_the_kl_in_the_reward_can_be_set_and_adapts_from_there():
    constant = KLInReward(ClippedPGLossConfig(reference_policy_kl_penalty=0.1, use_kl_in_reward=True))
    section = {"reference_policy_kl_penalty": 0.1, "use_kl_in_reward": True, "adaptive_kl": AdaptiveKLConfig(target=1.0)}
    adaptive = KLInReward(ClippedPGLossConfig(**section))
    for penalty in (constant, adaptive):
        control = RunControl()
        control.use_penalty(penalty)
        plugin = Callback(name="a", distribution="", version="", module="m.a")
        control.apply(SimpleNamespace(), 1, [(plugin, Control(kl_weight=0.4))])
        assert penalty.weight == 0.4
        resumed = RunControl()
        resumed.load_state_dict(control.state_dict())
        again = KLInReward(penalty._config)
        resumed.use_penalty(again)
        # The weight of an adaptive one is saved by its controller.
        assert again.weight == (0.4 if penalty is constant else 0.1)
    adaptive.controller.update(2.0, answers=1000)  # error clipped to 0.2: 0.4 (1 + 0.2 * 1000 / 10000)
    assert adaptive.weight == pytest.approx(0.408)


def test_sections_of_callbacks_are_layered_and_removed_by_name(tmp_path):
    base = tmp_path / "base.yaml"
    named = {"a": {"name": "torch.zeros"}, "b": {"name": "torch.ones"}}
    base.write_text(json.dumps({**CONFIG, "callbacks": named}))
    (tmp_path / "run.yaml").write_text(
        json.dumps({"defaults": "base.yaml", "callbacks": {"a": None, "b": {"kwargs": {"x": 1}}}})
    )
    run = load_config(tmp_path / "run.yaml").run
    assert {name: section.model_dump() for name, section in run.callbacks.items()} == {
        "b": {"name": "torch.ones", "kwargs": {"x": 1}}
    }
    with pytest.raises(InvalidConfigError, match=r"callbacks\.b\.kwarg: .*Did you mean 'kwargs'"):
        load_config(base, ["++callbacks.b.kwarg={}"])


def test_a_misspelled_hook_of_an_object_is_named():
    class Misspelled:
        @hookimpl
        def rlcore_step_ended(self):
            return None

    with pytest.raises(ConfigError, match="unknown hook 'rlcore_step_ended'"):
        add_callbacks(PluginManager(), {"mine": Misspelled()})


def test_a_config_without_callbacks_creates_none():
    assert callbacks_of(load_config(ROOT / "examples" / "grpo_addition.yaml").run) == {}
