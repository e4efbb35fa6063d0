"""Runs in which each task has its own teacher: which rows it scores, its metrics, and errors of the data."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError, UserError
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.algorithms import DistillationTrainer
from rl_train.config.loader import load_config
from rl_train.launch.train import train
from rl_train.plan.planner import plan_memory
from rl_train.rollouts.teacher_rows import teacher_scores

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The quickstart model with other weights."""
    folder = tmp_path_factory.mktemp("other")
    for file in MODEL.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    [weights] = folder.glob("*.safetensors")
    torch.manual_seed(0)
    noisy = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in load_file(weights).items()}
    save_file(noisy, weights, metadata={"format": "pt"})
    return folder


def section(model, **changes):
    return {"backend": "hf", "model_name": str(model), "max_total_sequence_length": 24, **changes}


def config_of(folder, other, **changes):
    sums = {"dataset_name": "arithmetic", "num_samples": 16}
    return {
        "distillation": {"num_prompts_per_step": 8, "num_generations_per_prompt": 2, "max_num_steps": 2},
        "loss_fn": {"topk": 4},
        "policy": section(MODEL, generation={"backend": "hf", "max_new_tokens": 5}),
        "teachers": {"same": section(MODEL), "other": section(other)},
        "data": {"mix": {name: {**sums, "task_name": name} for name in ("same", "other")}},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": str(folder / "runs")},
        **changes,
    }


def trained(folder, config):
    (folder / "run.yaml").write_text(json.dumps(config))
    train(folder / "run.yaml", console=False)
    return [json.loads(line) for line in (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_mixed_batch_has_the_scores_that_each_rows_teacher_gives_it_alone(other):
    teachers = {name: HuggingFacePolicy(str(model), frozen=True) for name, model in {"a": MODEL, "b": other}.items()}
    torch.manual_seed(1)
    lengths = torch.tensor([9, 4, 7, 9, 2])
    ids = torch.randint(3, 18, (5, 9)).masked_fill(torch.arange(9) >= lengths.unsqueeze(1), 0)
    tasks, asked = ["b", "a", "c", "b", "a"], {}
    rows = BatchedDataDict(input_ids=ids, input_lengths=lengths, task_name=tasks)

    def scores_of(teacher, own):
        asked[teacher] = own["input_ids"].shape[0]
        return {**teacher.get_logprobs(own), **teacher.get_topk_logprobs(own, 3)}

    by_task = {**teachers, "c": teachers["a"]}
    scores = teacher_scores(rows, by_task, None, scores_of=scores_of)
    assert asked == {teachers["a"]: 3, teachers["b"]: 2}  # two tasks of one teacher are scored together
    assert scores["teacher_numbers"].tolist() == [1, 0, 2, 1, 0]
    for row, task in enumerate(tasks):
        length = int(lengths[row])
        alone = BatchedDataDict(input_ids=ids[row : row + 1, :length], input_lengths=lengths[row : row + 1])
        expected = {**by_task[task].get_logprobs(alone), **by_task[task].get_topk_logprobs(alone, 3)}
        for name in ("logprobs", "topk_logprobs"):
            # Other widths of a batch change the order of float32 sums, with log-probabilities of up to 10 nats.
            torch.testing.assert_close(scores[f"teacher_{name}"][row, :length], expected[name][0], atol=1e-5, rtol=0)
        assert scores["teacher_topk_token_ids"][row, :length].equal(expected["topk_token_ids"][0])


@pytest.mark.parametrize("topk", [4, None])
def test_metrics_by_task_are_means_over_the_tokens_that_the_teacher_scores(tmp_path, other, topk):
    loss = {"topk": topk, "divergence": "reverse_kl"}
    first = trained(tmp_path, config_of(tmp_path, other, loss_fn=loss))[0]
    kl = "distillation/kl_sampled" if topk is None else "distillation/kl_reverse"
    # The teacher `same` has the weights of the student: rounding alone.
    assert abs(first[f"{kl}/same"]) < 1e-5
    assert abs(first[f"{kl}/other"]) > 0.01
    shares = {task: first[f"distillation/tokens_frac/{task}"] for task in ("same", "other")}
    assert 0 < shares["same"] < 1
    assert sum(shares.values()) == pytest.approx(1, abs=1e-6)
    assert sum(shares[task] * first[f"{kl}/{task}"] for task in shares) == pytest.approx(first[kl], abs=1e-6)


def test_answers_of_the_data_are_scored_by_the_teacher_of_their_task_and_so_is_validation(tmp_path, other):
    config = config_of(tmp_path, other)
    config["distillation"] |= {"student_data_fraction": 0.0, "val_at_end": True}
    for dataset in config["data"]["mix"].values():
        dataset["with_response"] = True
    held_out = {"dataset_name": "arithmetic", "num_samples": 8, "split": "validation", "task_name": "other"}
    config["data"]["validation"] = held_out
    last = trained(tmp_path, config)[-1]
    assert last["distillation/kl_forward/other"] > 0.01
    assert last["validation/kl_forward/other"] == pytest.approx(last["validation/kl_forward"], abs=1e-6)
    assert "validation/kl_forward/same" not in last


def test_each_teacher_has_its_own_length_for_its_own_prompt(tmp_path, other):
    config = config_of(tmp_path, other)
    config["distillation"]["teacher_prompt"] = "1 {question}"
    config["teachers"]["other"]["max_total_sequence_length"] = 32
    config["data"]["on_long_prompt"] = "drop"
    assert trained(tmp_path, config)[0]["distillation/too_long_rows"] == 0
    config["distillation"]["teacher_prompt"] = "1 1 1 1 1 1 1 1 1 {question}"
    config["logger"]["run_name"] = "long"
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    train(tmp_path / "run.yaml", console=False)
    first = json.loads((tmp_path / "runs" / "long" / "metrics.jsonl").read_text().splitlines()[0])
    # Only the rows of the teacher with the shorter limit are left out.
    assert first["distillation/too_long_rows"] > 0
    assert "distillation/kl_forward/same" not in first
    assert first["distillation/tokens_frac/other"] == pytest.approx(1, abs=1e-6)


def test_rows_of_a_task_without_a_teacher_end_the_run_before_a_model_loads(tmp_path, other):
    config = config_of(tmp_path, other)
    config["teachers"]["other"]["model_name"] = str(MODEL)
    del config["data"]["mix"]["other"]["task_name"]
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"`teachers` has no such task\. Tasks in `teachers`: same, other\. Add a section"):
        train(tmp_path / "run.yaml", console=False)


def test_the_memory_of_each_teacher_is_planned_and_that_of_equal_sections_once(tmp_path, other):
    registry = Registry(discover())

    def held(**changes):
        run = load_config(config_of(tmp_path, other, cluster={}, **changes), registry=registry).run
        return {process.name for process in plan_memory(run, registry, on_gpu=False, limit=None).processes}

    assert {"teachers.same", "teachers.other"} <= held()
    shared = held(teachers={"same": section(MODEL), "other": section(MODEL)})
    assert "teachers.same" in shared
    assert "teachers.other" not in shared


def test_a_python_trainer_takes_the_teacher_of_each_task(other):
    generation = {"backend": "hf", "max_new_tokens": 5}
    policy = HuggingFacePolicy(str(MODEL), max_total_sequence_length=16, generation=generation)
    frozen = {"max_total_sequence_length": 16, "frozen": True}
    teachers = {"a": HuggingFacePolicy(str(MODEL), **frozen), "b": HuggingFacePolicy(str(other), **frozen)}
    engine = HuggingFaceGeneration(config=policy.config.generation.for_policy(policy.config))
    settings = {"max_num_steps": 1, "num_prompts_per_step": 4}
    trainer = DistillationTrainer(policy, generation=engine, teacher=teachers, config=settings, loss_fn={"topk": 4})
    row = {"messages": [{"role": "user", "content": "38+72="}]}
    [metrics] = trainer.train([{**row, "task_name": task} for task in ("a", "b") * 2])
    assert metrics["distillation/kl_forward/a"] < 1e-5 < metrics["distillation/kl_forward/b"]
    with pytest.raises(UserError, match="task_name is 'c', but `teachers` has no such task"):
        trainer.train([{**row, "task_name": task} for task in "aabc"])
    hot = HuggingFacePolicy(str(other), **frozen, generation={"temperature": 0.5})
    with pytest.raises(ConfigError, match=r"the teachers\.b scores tokens at 0\.5"):
        DistillationTrainer(policy, generation=engine, teacher={**teachers, "b": hot}, config=settings, loss_fn={"topk": 4})
