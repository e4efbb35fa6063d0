"""Learning-rate schedules count optimizer steps and users count algorithm steps: the config reports mismatches."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rl_train.config.loader import load_config
from rl_train.config.rules.run import schedule_warnings
from rl_train.config.schedules import optimizer_steps, schedule_changes, schedule_lengths, with_schedule_lengths
from rlcore_cli.main import app

EXAMPLES = Path(__file__).parents[3] / "examples"
MODEL = EXAMPLES / "addition" / "model"
GRPO, SFT, PPO, DPO = (EXAMPLES / f"{name}_addition.yaml" for name in ("grpo", "sft", "ppo", "dpo"))


def steps(path, *overrides, model="policy"):
    return optimizer_steps(load_config(path, overrides).run, model)


@pytest.mark.parametrize(
    ("path", "overrides", "most"),
    [
        (GRPO, (), 120),
        # 64 prompts x 8 samples in steps of 128 rows.
        (GRPO, ("policy.train_global_batch_size=128",), 480),
        # The last of 6 has fewer rows.
        (GRPO, ("policy.train_global_batch_size=100",), 720),
        (GRPO, ("policy.train_global_batch_size=4096",), 120),
        # 128 rows on 3 ranks become 129: 512 rows in 4 steps all the same; 171 become 171, 512 in 3.
        (GRPO, ("policy.train_global_batch_size=128", "cluster.workers_per_node=3"), 480),
        # 102 rows on 5 ranks become 105, and 512 rows take 5 steps, not 6.
        (GRPO, ("policy.train_global_batch_size=102", "cluster.workers_per_node=5"), 600),
        # 32 pairs are 64 rows.
        (DPO, ("policy.train_global_batch_size=16",), 120),
        # A pair stays on one rank: 10 rows on 4 ranks become 16.
        (DPO, ("policy.train_global_batch_size=10", "cluster.workers_per_node=4"), 120),
        # 57 steps after the warm-up of the critic, 2 passes, 256 rows in steps of 128.
        (PPO, (), 57 * 2 * 2),
    ],
)
def test_the_number_of_optimizer_steps_is_steps_times_epochs_times_minibatches(path, overrides, most):
    found = steps(path, *overrides)
    assert (found.most, found.fewest) == (most, most)


def test_critic_warmup_steps_count_as_critic_optimizer_steps():
    assert steps(PPO, model="value").most == 60 * 2 * 2
    assert steps(PPO, "value.train_global_batch_size=64", model="value").most == 60 * 2 * 4
    assert steps(GRPO, model="value") is None


@pytest.mark.parametrize(
    "overrides",
    [
        ("grpo.use_dynamic_sampling=true",),
        ("grpo.max_num_epochs=1",),
    ],
)
def test_an_uncertain_number_of_optimizer_steps_is_counted_as_its_maximum(overrides):
    found = steps(GRPO, "policy.train_global_batch_size=128", *overrides)
    assert (found.most, found.fewest) == (480, 1)


def refusal(path, *overrides):
    result = CliRunner().invoke(app, ["validate", str(path), *overrides])
    return result.exit_code, result.output


def test_a_schedule_shorter_than_the_run_is_an_error_with_numbers_and_a_fix():
    code, output = refusal(
        GRPO, "policy.train_global_batch_size=128", "++policy.scheduler.kwargs.num_training_steps=${grpo.max_num_steps}"
    )
    assert code == 2
    assert (
        "policy.scheduler.kwargs.num_training_steps: the schedule ends after 120 optimizer steps, but the run makes 480 (120 "
        "steps x 4 for 512 rows): the learning rate would be 0 for the last 360 of them. The length counts optimizer "
        "steps, not steps of the algorithm. Remove it to make the schedule as long as the run."
    ) in output


@pytest.mark.parametrize(
    ("length", "code"),
    [(119, 2), (120, 0), (121, 0), (4000, 0)],
)
def test_a_schedule_may_be_longer_but_not_shorter_than_the_run(length, code):
    assert refusal(GRPO, f"++policy.scheduler.kwargs.num_training_steps={length}")[0] == code


def test_a_schedule_that_ends_above_zero_may_end_early():
    cosine = ("policy.scheduler.name=cosine", "++policy.scheduler.kwargs.num_training_steps=60")
    assert refusal(GRPO, *cosine)[0] == 2
    assert refusal(GRPO, *cosine, "++policy.scheduler.kwargs.min_lr_ratio=0.1")[0] == 0


def test_the_schedule_of_a_critic_is_checked_too():
    linear = "++value.scheduler={name: linear, kwargs: {num_training_steps: 60}}"
    code, output = refusal(PPO, linear)
    assert code == 2
    assert "value.scheduler.kwargs.num_training_steps: the schedule ends after 60" in output
    assert "makes 240 (60 steps x 2 passes x 2 for 256 rows)" in output


def test_a_warmup_longer_than_the_run_is_only_a_warning():
    code, output = refusal(GRPO, "grpo.max_num_steps=4")
    assert code == 0
    assert (
        "warning: policy.scheduler.kwargs.num_warmup_steps: the warm-up of 5 optimizer steps does not end before the run, "
        "which makes 4 (4 steps x 1 for 512 rows): the learning rate only reaches 67% of `optimizer.kwargs.lr`."
    ) in output
    as_long = refusal(GRPO, "grpo.max_num_steps=5")[1]
    assert "the warm-up of 5 optimizer steps does not end before the run, which makes 5 (" in as_long
    assert "warning" not in refusal(GRPO)[1]
    [warning] = json.loads(refusal(GRPO, "grpo.max_num_steps=4", "--json")[1])["warnings"]
    assert f"warning: {warning}" in output


def test_a_schedule_that_may_end_early_is_a_warning():
    code, output = refusal(
        GRPO,
        "policy.train_global_batch_size=128",
        "grpo.use_dynamic_sampling=true",
        "++policy.scheduler.kwargs.num_training_steps=120",
    )
    assert code == 0
    assert "the run may make more optimizer steps: up to 480" in output


def test_a_schedule_without_a_length_is_as_long_as_the_run():
    loaded = load_config(GRPO, ["policy.train_global_batch_size=128"])
    assert "num_training_steps" not in loaded.run.policy.scheduler.kwargs
    run = with_schedule_lengths(loaded.run)
    assert run.policy.scheduler.kwargs == {"num_warmup_steps": 5, "num_training_steps": 480}
    assert with_schedule_lengths(run) == run
    assert schedule_lengths(loaded.run) == {"policy": 480}
    assert schedule_lengths(run) == {}, "it has a length of its own now"
    assert list(schedule_warnings(run)) == []


def test_resuming_with_another_length_reports_both_learning_rates():
    run = load_config(GRPO, ["grpo.max_num_steps=240"]).run
    assert schedule_lengths(run) == {"policy": 240}
    [message] = schedule_changes(run, {"policy": 120}, {"policy": 110})
    lr = run.policy.optimizer.kwargs["lr"]
    assert "which is now 240 optimizer steps and was 120. It continues at optimizer step 111" in message
    assert f"with a learning rate of {lr * 130 / 235:.3g}; with the previous length it would be {lr * 10 / 115:.3g}" in message
    assert list(schedule_changes(run, {"policy": 240}, {"policy": 110})) == []
    # A schedule with its own length does not depend on the run.
    assert list(schedule_changes(with_schedule_lengths(run), {"policy": 120}, {"policy": 110})) == []


def test_constant_and_custom_schedules_are_not_changed():
    for schedule in (
        "++policy.scheduler={name: constant, kwargs: {num_warmup_steps: 3}}",
        "++policy.scheduler={name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 3}}",
    ):
        run = load_config(GRPO, [schedule]).run
        assert with_schedule_lengths(run) == run


def test_an_algorithm_without_declared_optimizer_steps_needs_a_schedule_length(files, good):
    text = good.replace("grpo:\n  num_prompts_per_step: 8", "filtered: {}", 1)
    scheduled = text.replace("  generation:", "  scheduler: {name: linear}\n  generation:", 1)
    assert files.errors(scheduled) == [
        "config.yaml:5:3: policy.scheduler.kwargs.num_training_steps is required. filtered does not declare its number "
        "of optimizer steps."
    ]
    files.load(scheduled.replace("linear}", "linear, kwargs: {num_training_steps: 3}}"))


def test_optimizer_steps_of_unequal_size_are_a_warning():
    def warned(*overrides):
        return CliRunner().invoke(app, ["validate", str(SFT), f"policy.model_name={MODEL}", *overrides]).output

    assert "warning" not in warned("sft.global_batch_size=16", "++policy.train_global_batch_size=8")
    assert "warning" not in warned("sft.global_batch_size=16", "++policy.train_global_batch_size=32")
    said = "the last of 2 optimizer steps has 6 rows, which count as much as the 10 rows of the others. Choose a divisor of 16."
    assert said in warned("sft.global_batch_size=16", "++policy.train_global_batch_size=10")
