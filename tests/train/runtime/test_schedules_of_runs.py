"""The optimizer steps implied by a config equal those of a run, and its learning-rate schedule ends with it."""

import json
import shutil
from pathlib import Path

import pytest

from rl_core.errors import ConfigError
from rl_train.assembly.run_assembly import plan_policy_and_engine
from rl_train.config.loader import load_config
from rl_train.config.schedules import optimizer_steps
from rl_train.launch.train import train

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples" / "addition" / "model"
PREFERENCES = ROOT / "examples" / "addition" / "preferences" / "train.jsonl"
LR = 1.0e-6
MODEL_SECTION = {
    "backend": "hf",
    "model_name": str(MODEL),
    "max_total_sequence_length": 16,
    "optimizer": {"kwargs": {"lr": LR}},
    "scheduler": {"name": "linear", "kwargs": {"num_warmup_steps": 1}},
}
SAMPLES = {
    "policy": {**MODEL_SECTION, "train_global_batch_size": 3, "generation": {"backend": "hf", "max_new_tokens": 5}},
    "data": {"train": {"dataset_name": "arithmetic", "num_samples": 24}},
    "env": {"arithmetic": {}},
}
RUNS = {
    # 8 rows in steps of 3 are 3 optimizer steps.
    "grpo": {"grpo": {"max_num_steps": 3, "num_prompts_per_step": 2, "num_generations_per_prompt": 4}, **SAMPLES},
    "ppo": {
        "ppo": {"max_num_steps": 3, "num_prompts_per_step": 8, "ppo_epochs": 2, "critic_warmup_steps": 1},
        **SAMPLES,
        "value": {**MODEL_SECTION, "train_global_batch_size": 4},
    },
    "sft": {
        "sft": {"max_num_steps": 3, "global_batch_size": 5},
        "policy": {**MODEL_SECTION, "train_global_batch_size": 2},
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 24, "with_response": True}},
    },
    "dpo": {
        "dpo": {"max_num_steps": 3, "global_batch_size": 5},
        "policy": {**MODEL_SECTION, "train_global_batch_size": 4},
        "data": {"train": {"dataset_name": "preference", "path": str(PREFERENCES)}},
    },
    "rm": {
        "rm": {"max_num_steps": 3, "global_batch_size": 5},
        "policy": {**MODEL_SECTION, "train_global_batch_size": 4},
        "data": {"train": {"dataset_name": "preference", "path": str(PREFERENCES)}},
    },
    "distillation": {
        "distillation": {"max_num_steps": 3, "num_prompts_per_step": 8},
        "loss_fn": {"topk": 4},
        **SAMPLES,
        "teacher": {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16},
    },
}


@pytest.fixture
def config_of(tmp_path):
    """Write the config of a run in this process; its folder is `runs/run`."""

    def write(config):
        whole = {**config, "cluster": {"backend": "in_process"}, "logger": {"log_dir": str(tmp_path / "runs")}}
        path = tmp_path / "run.yaml"
        path.write_text(json.dumps(whole))
        return path

    return write


def steps_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algorithm", RUNS)
def test_a_run_takes_the_configured_optimizer_steps_and_its_schedule_ends_with_it(algorithm, config_of):
    path = config_of(RUNS[algorithm])
    run = load_config(path).run
    implied = {model: optimizer_steps(run, model) for model in ("policy", "value") if getattr(run, model) is not None}
    steps = steps_of(train(path, console=False).folder)
    for model, found in implied.items():
        prefix = "value/" if model == "value" else ""
        made = sum(step.get(f"{prefix}num_optimizer_steps", 0) for step in steps)
        assert found.is_exact
        assert made == found.most
        # Of N steps in a line to 0 after one of warm-up, the last is at 1 / (N - 1).
        assert steps[-1][f"{prefix}lr"] == pytest.approx(LR / (found.most - 1))


def test_the_schedule_of_a_run_limited_by_epochs_lasts_for_these_epochs(config_of):
    sft = {**RUNS["sft"], "sft": {"max_num_steps": 100, "max_num_epochs": 1, "global_batch_size": 6}}
    steps = steps_of(train(config_of(sft), console=False).folder)
    # 24 rows are 4 steps of 3 optimizer steps.
    assert [step["num_optimizer_steps"] for step in steps] == [3, 3, 3, 3]
    assert steps[-1]["lr"] == pytest.approx(LR / 11)


def test_a_schedule_shorter_than_a_run_limited_by_epochs_is_rejected_before_start(config_of):
    policy = {**RUNS["sft"]["policy"], "scheduler": {"name": "linear", "kwargs": {"num_training_steps": 11}}}
    sft = {
        **RUNS["sft"],
        "policy": policy,
        "sft": {"max_num_steps": 100, "max_num_epochs": 1, "global_batch_size": 6},
    }
    with pytest.raises(ConfigError, match=r"ends after 11 optimizer steps, but the run makes 12 \(4 steps x 3 for 6 rows\)"):
        train(config_of(sft), console=False)


def test_a_longer_run_continues_on_the_schedule_of_its_new_length_with_a_message(config_of, capsys):
    first = train(config_of(RUNS["sft"]), console=False)
    assert steps_of(first.folder)[-1]["lr"] == pytest.approx(LR / 8)
    # The fifth step has the 4 rows that are left of 24.
    longer = {**RUNS["sft"], "sft": {"max_num_steps": 5, "global_batch_size": 5}}
    again = train(config_of(longer), console=False)
    assert (again.folder, again.resumed_from) == (first.folder, 3)
    # Of 15 optimizer steps in a line to 0 after one of warm-up, the twelfth and the fourteenth.
    assert [step["lr"] for step in steps_of(again.folder)[3:]] == pytest.approx([LR * 4 / 14, LR * 2 / 14])
    said = capsys.readouterr().err
    assert "the linear schedule follows the length of the run, which is now 15 optimizer steps and was 9" in said
    assert "It continues at optimizer step 10 with a learning rate of 4.29e-07; with the previous length it would be 0." in said


def test_a_schedule_with_its_own_length_keeps_it_in_a_longer_run(config_of, capsys):
    def sft(steps):
        scheduler = {"name": "linear", "kwargs": {"num_training_steps": 20}}
        section = {"max_num_steps": steps, "global_batch_size": 5}
        return {**RUNS["sft"], "policy": {**RUNS["sft"]["policy"], "scheduler": scheduler}, "sft": section}

    first = train(config_of(sft(2)), console=False)
    again = train(config_of(sft(3)), console=False)
    assert again.resumed_from == 2
    assert [step["lr"] for step in steps_of(first.folder)] == pytest.approx([LR * (20 - last) / 20 for last in (2, 5, 8)])
    assert "schedule" not in capsys.readouterr().err


def test_models_that_are_only_examined_need_no_length_either(config_of):
    with plan_policy_and_engine(config_of(RUNS["grpo"]), num_prompts=2).started() as pair:
        assert pair.policy.weight_version == pair.generation.weight_version == 0


def test_a_run_ended_by_epochs_resumes_with_its_schedule(config_of):
    config = {
        **RUNS["sft"],
        "sft": {"max_num_steps": 100, "max_num_epochs": 1, "global_batch_size": 6},
        "checkpointing": {"save_period": 2},
    }
    path = config_of(config)
    whole = train(path, console=False)
    before = steps_of(whole.folder)
    shutil.rmtree(whole.folder / "checkpoints" / "step_000004")
    again = train(path, console=False)
    assert (again.folder, again.resumed_from) == (whole.folder, 2)
    assert [step["lr"] for step in steps_of(again.folder)] == [step["lr"] for step in before]


def test_optimizer_groups_of_policy_and_critic_follow_their_schedules_and_have_metrics(config_of):
    def with_groups(section):
        groups = {"matrices": {"name": "torch.optim.Muon", "kwargs": {"lr": 100 * LR}}}
        return {**section, "optimizer": {"kwargs": {"lr": LR}, "groups": groups}}

    ppo = {**RUNS["ppo"], "policy": with_groups(RUNS["ppo"]["policy"]), "value": with_groups(RUNS["ppo"]["value"])}
    steps = steps_of(train(config_of(ppo), console=False).folder)
    for prefix in ("lr", "value/lr"):
        written = [step for step in steps if prefix in step]
        assert len(written) > 1
        for step in written:
            assert step[f"{prefix}/matrices"] == pytest.approx(100 * step[f"{prefix}/rest"])
            assert step[prefix] == step[f"{prefix}/matrices"]
    assert "value/lr/rest" in steps[0]
    assert "lr/rest" not in steps[0]  # the critic warms up alone


def test_sft_with_muon_learns_and_resumes_bit_for_bit(config_of):
    groups = {"matrices": {"name": "torch.optim.Muon", "kwargs": {"lr": 0.01, "weight_decay": 0.0}}}
    policy = {**MODEL_SECTION, "optimizer": {"kwargs": {"lr": 1.0e-3}, "groups": groups}}
    sft = {
        "sft": {"max_num_steps": 16, "global_batch_size": 32},
        "policy": policy,
        "data": {"train": {"dataset_name": "arithmetic", "num_samples": 600, "with_response": True}},
        "checkpointing": {"save_period": 8},
    }
    folder = train(config_of(sft), console=False).folder
    before = steps_of(folder)
    assert sum(step["loss"] for step in before[-4:]) < 0.7 * sum(step["loss"] for step in before[:4])
    shutil.rmtree(folder / "checkpoints" / "step_000016")
    again = steps_of(train(config_of(sft), console=False).folder)
    for name in ("loss", "grad_norm", "lr", "lr/matrices", "lr/rest"):
        assert [step[name] for step in again] == [step[name] for step in before], name
