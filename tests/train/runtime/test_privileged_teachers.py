"""Runs whose teacher reads another prompt than the student: the quickstart model on two steps, and the command's errors."""

import json
import logging
from pathlib import Path

import pytest
import yaml
from command_line import rlcore

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.errors import UserError
from rl_train.algorithms import DistillationTrainer
from rl_train.launch.train import train

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"
SIZES = {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 32}


def config_of(folder, **distillation):
    return {
        "distillation": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 2,
            "max_num_steps": 2,
            "val_at_end": True,
            "teacher_prompt": "{expected_answer} {question}",
            **distillation,
        },
        "loss_fn": {"topk": 4},
        "policy": {**SIZES, "generation": {"backend": "hf", "max_new_tokens": 5}},
        "teacher": dict(SIZES),
        "data": {
            "train": {"dataset_name": "arithmetic", "num_samples": 16},
            "validation": {"dataset_name": "arithmetic", "num_samples": 8, "split": "validation"},
        },
        "env": {"arithmetic": {}},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(folder / "runs")},
    }


def written(folder, config):
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def trained(folder, config):
    train(written(folder, config), console=False)
    return [json.loads(line) for line in (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_teacher_with_the_students_weights_differs_by_what_it_reads(tmp_path):
    steps = trained(tmp_path, config_of(tmp_path))
    assert steps[0]["distillation/kl_forward"] > 0.01
    assert steps[1]["validation/kl_forward"] > 0.01
    assert steps[0]["distillation/too_long_rows"] == 0


def test_the_policy_is_its_own_teacher_with_its_current_weights(tmp_path):
    config = config_of(tmp_path, teacher_weights="current")
    del config["teacher"]
    # The same prompt: the teacher is the student of the same step, also after an optimizer step.
    config["distillation"]["teacher_prompt"] = "{question}"
    config["policy"]["optimizer"] = {"kwargs": {"lr": 1e-3, "weight_decay": 0.1}}
    for metrics in trained(tmp_path, config):
        # float32 sums over the vocabulary of 18 tokens: rounding alone.
        assert abs(metrics["distillation/kl_forward"]) < 1e-5
        assert metrics["distillation/argmax_agreement"] == 1.0


def tell_feedback(row):
    logging.getLogger("test").info("%s", row["feedback"])
    return f"{row['question']}"


def test_a_function_reads_what_the_environment_wrote_after_the_answer(tmp_path, caplog):
    config = config_of(tmp_path, teacher_prompt=None, teacher_prompt_fn=f"{__name__}:tell_feedback", max_num_steps=1)
    with caplog.at_level(logging.INFO, "test"):
        trained(tmp_path, config)
    told = {record.message for record in caplog.records if record.name == "test"}
    assert told <= {"correct", "incorrect"}
    assert told


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"teacher_prompt": "{question} {solution}"},
            "distillation.teacher_prompt: teacher_prompt uses {solution}, but the record does not have this field",
        ),
        (
            {"teacher_prompt": "{question}" + " 1" * 20},
            "distillation.teacher_prompt: 16 of 16 checked prompts of the teacher leave",
        ),
    ],
)
def test_a_prompt_that_cannot_be_written_ends_the_command_with_its_key(tmp_path, changes, says):
    path = written(tmp_path, config_of(tmp_path, **changes))
    for command in (("validate", "--deep"), ("train",)):
        ended = rlcore(*command, path)
        assert ended.returncode == 2
        assert f"run.yaml:6:19: {says}" in ended.stdout + ended.stderr


def test_recorded_rollouts_cannot_be_replayed_because_they_lack_the_metadata(tmp_path):
    trained(tmp_path, config_of(tmp_path, max_num_steps=1, val_at_end=False))
    config = config_of(tmp_path, max_num_steps=1, val_at_end=False)
    config["logger"]["run_name"] = "again"
    ended = rlcore("train", written(tmp_path, config), "--replay", tmp_path / "runs" / "run")
    assert ended.returncode == 2
    assert "recorded rollouts do not have the messages and metadata" in ended.stdout + ended.stderr


def test_a_python_trainer_teaches_the_policy_with_itself():
    generation = {"backend": "hf", "max_new_tokens": 5}
    policy = HuggingFacePolicy(str(MODEL), max_total_sequence_length=32, generation=generation)
    trainer = DistillationTrainer(
        policy,
        generation=HuggingFaceGeneration(config=policy.config.generation.for_policy(policy.config)),
        config={
            "max_num_steps": 1,
            "num_prompts_per_step": 4,
            "teacher_weights": "current",
            "teacher_prompt": "{hint} {question}",
        },
        loss_fn={"topk": 4},
    )
    asked = {"messages": [{"role": "user", "content": "38+72="}]}
    [metrics] = trainer.train([{**asked, "extra_env_info": {"hint": "110"}}] * 4)
    assert metrics["distillation/kl_forward"] > 0.01
    with pytest.raises(UserError, match=r"uses {hint}, but the record does not have this field"):
        trainer.train([asked] * 4)
