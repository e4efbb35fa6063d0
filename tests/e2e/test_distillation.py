"""Distillation from a freshly trained teacher: whole runs on the quickstart model."""

import json
import shutil

import pytest
from e2e_runs import MODEL, metrics_of

from rl_backends_hf import HuggingFaceGeneration, HuggingFacePolicy
from rl_core.errors import ConfigError, DataError, UserError
from rl_envs import ArithmeticEnvironment
from rl_envs.arithmetic import ArithmeticDataset
from rl_train.algorithms import DistillationTrainer
from rl_train.launch.train import train

pytestmark = pytest.mark.slow

LIMITS = {"max_total_sequence_length": 16, "train_micro_batch_size": 256, "logprob_batch_size": 256}
OPTIMIZER = {"kwargs": {"lr": 5.0e-4, "weight_decay": 0.0}}
SUMS = {"dataset_name": "arithmetic", "min_digits": 2}
COMMON = {
    "policy": {"backend": "hf", "model_name": str(MODEL), **LIMITS, "optimizer": OPTIMIZER},
    "data": {
        "train": {**SUMS, "num_samples": 8000},
        "validation": {**SUMS, "num_samples": 256, "split": "validation"},
    },
    "cluster": {"backend": "in_process"},
    "checkpointing": {"enabled": False},
}
DISTIL = {
    "distillation": {
        "num_prompts_per_step": 64,
        "max_num_steps": 25,
        "seed": 3,
        "val_at_start": True,
        "val_at_end": True,
    },
    "loss_fn": {"topk": 8},
    "policy": {"generation": {"backend": "hf", "max_new_tokens": 5}},
    "teacher": {"backend": "hf", **LIMITS},
    "env": {"arithmetic": {}},
}


def start(folder, *sections, name="run"):
    """The metrics by step of a whole run in this process. Later sections override earlier ones key by key."""
    config = {}
    for section in (COMMON, *sections, {"logger": {"log_dir": str(folder / "runs")}}):
        config = laid_over(config, section)
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config))
    train(path, resume="never", console=False)
    return metrics_of(folder, name)


def laid_over(base, changes):
    """`base` updated with `changes`, key by key; None is a value."""
    both = {key: laid_over(base[key], changes[key]) for key in base.keys() & changes.keys() if isinstance(base[key], dict)}
    return {**base, **changes, **both}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The student after 80 batches of correct sums: it drops the carry less often."""
    folder = tmp_path_factory.mktemp("teacher")
    start(
        folder,
        {
            "sft": {"max_num_steps": 80, "global_batch_size": 64, "seed": 0},
            "policy": {"optimizer": {"kwargs": {"lr": 1.0e-3}}},
            "data": {"train": {"with_response": True}},
            "checkpointing": {"enabled": True, "save_period": 80},
        },
    )
    return str(folder / "runs" / "run" / "checkpoints" / "step_000080" / "policy" / "weights")


def distil(folder, teacher, changes=None):
    return start(folder, DISTIL, {"teacher": {"model_name": teacher}}, changes or {})


FORMS = {
    "forward": {},
    "reverse": {"loss_fn": {"divergence": "reverse_kl"}},
    # One token has less signal than eight: a noisier gradient needs more rows.
    "sampled": {
        "distillation": {"num_prompts_per_step": 256},
        "loss_fn": {"divergence": "reverse_kl", "topk": None},
        "policy": {"generation": {"val_temperature": 1.0}, "optimizer": {"kwargs": {"lr": 3.0e-4}}},
    },
}


def test_a_student_with_lora_learns_from_the_teacher_and_only_its_adapters_change(teacher, tmp_path):
    steps = distil(
        tmp_path,
        teacher,
        {
            "distillation": {"max_num_steps": 4},
            "policy": {"hf_cfg": {"lora": {"rank": 8}}, "optimizer": {"kwargs": {"lr": 3.0e-3}}},
            "checkpointing": {"enabled": True, "save_period": 4},
        },
    )
    assert steps[4]["validation/kl_forward"] < steps[0]["validation/kl_forward"]
    weights = tmp_path / "runs" / "run" / "checkpoints" / "step_000004" / "policy" / "weights"
    assert (weights / "adapter_model.safetensors").is_file()
    assert not list(weights.glob("model*.safetensors"))


@pytest.mark.full("tests/train/algorithms proves the divergences; the next test lowers the forward one in four steps")
@pytest.mark.parametrize("form", FORMS)
def test_distillation_reduces_kl_to_teacher(form, teacher, tmp_path):
    steps = distil(tmp_path, teacher, FORMS[form])
    first, last, kl = steps[0], steps[25], f"validation/kl_{form}"
    # Seen: 0.20 to 0.07, 0.22 to 0.05, 0.21 to 0.07 nats; accuracy 0.61 to 0.85, 0.61 to 0.89, 0.70 to 0.79 (sampled answers).
    assert last[kl] < first[kl] * (0.75 if form == "sampled" else 0.5)
    assert last["validation/accuracy"] > first["validation/accuracy"] + (0.04 if form == "sampled" else 0.15)
    assert first["validation/loss"] == pytest.approx(first[kl], rel=1e-5)


def test_distillation_works_without_an_environment(teacher, tmp_path):
    questions = tmp_path / "questions.jsonl"
    sums = ArithmeticDataset({"num_samples": 64, "min_digits": 2})
    asked = [sums[i]["messages"][0]["content"] for i in range(64)]
    rows = [json.dumps({"question": question, "expected_answer": "nobody reads it"}) for question in asked]
    questions.write_text("\n".join(rows))
    source = {"dataset_name": "jsonl", "path": str(questions)}
    short = {"max_num_steps": 4, "num_prompts_per_step": 16, "num_generations_per_prompt": 2}
    section = {**DISTIL, "distillation": {**DISTIL["distillation"], **short}}
    del section["env"]
    common = {key: value for key, value in COMMON.items() if key != "data"}
    config = {**common, "data": {"train": source, "validation": source}, "logger": {"log_dir": str(tmp_path / "runs")}}
    config = laid_over(laid_over(config, section), {"teacher": {"model_name": teacher}})
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    train(tmp_path / "run.yaml", resume="never", console=False)
    steps = metrics_of(tmp_path)
    assert steps[4]["validation/kl_forward"] < steps[0]["validation/kl_forward"]
    assert steps[4]["rollout/rows"] == 32
    recorded = {name for numbers in steps.values() for name in numbers}
    assert not {name for name in recorded if "reward" in name or "accuracy" in name}
    written = (tmp_path / "runs" / "run" / "rollouts" / "step_000004.jsonl").read_text().splitlines()
    assert [json.loads(line)["turns"] for line in written] == [1] * 32


def test_a_model_with_itself_as_teacher_has_zero_loss_at_any_temperature(tmp_path):
    steps = distil(
        tmp_path,
        str(MODEL),
        {
            "distillation": {"max_num_steps": 1, "val_at_end": False},
            "policy": {"generation": {"temperature": 0.6}, "optimizer": {"kwargs": {"lr": 1.0e-9}}},
        },
    )
    # A teacher that scored at another temperature than the student would be tenths of a nat away.
    assert abs(steps[0]["validation/kl_forward"]) < 1e-5
    assert abs(steps[1]["distillation/kl_reverse"]) < 1e-5
    assert steps[0]["validation/argmax_agreement"] == 1.0


def test_from_python_the_trainer_takes_the_steps_of_the_config(teacher, tmp_path):
    short = {"max_num_steps": 2, "num_prompts_per_step": 16, "seed": 3, "val_at_start": False, "val_at_end": False}
    steps = distil(tmp_path, teacher, {"distillation": short})
    section = {"backend": "hf", "max_new_tokens": 5}
    policy = HuggingFacePolicy(str(MODEL), optimizer=OPTIMIZER, generation=section, **LIMITS)
    trainer = DistillationTrainer(
        policy,
        config=short,
        loss_fn=DISTIL["loss_fn"],
        generation=HuggingFaceGeneration(config=policy.config.generation.for_policy(policy.config)),
        teacher=HuggingFacePolicy(teacher, frozen=True, **LIMITS),
        environments={"arithmetic": ArithmeticEnvironment()},
    )
    history = trainer.train(ArithmeticDataset({"num_samples": 8000, "min_digits": 2}))
    for numbers in history:
        there = steps[numbers["step"]]
        assert numbers["loss"] == pytest.approx(there["loss"], rel=1e-6)
        assert numbers["distillation/kl_reverse"] == pytest.approx(there["distillation/kl_reverse"], rel=1e-6)


def test_a_trainer_without_a_teacher_or_at_another_temperature_is_refused():
    policy = HuggingFacePolicy(str(MODEL), generation={"backend": "hf", "max_new_tokens": 5, "temperature": 0.5}, **LIMITS)
    parts = {"generation": HuggingFaceGeneration(config=policy.config.generation.for_policy(policy.config))}
    with pytest.raises(ConfigError, match="needs a teacher"):
        DistillationTrainer(policy, **parts)
    with pytest.raises(
        ConfigError, match=r"samples at temperature 0.5, but the teacher scores tokens at 1: .*temperature.: 0.5"
    ):
        DistillationTrainer(policy, teacher=HuggingFacePolicy(str(MODEL), frozen=True, **LIMITS), **parts)


def test_a_teacher_with_another_tokenizer_is_rejected_before_anything_starts(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    text = (other / "tokenizer.json").read_text()
    vocabulary = json.loads(text)
    tokens = vocabulary["model"]["vocab"]
    tokens["3"], tokens["4"] = tokens["4"], tokens["3"]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(UserError, match=r"teacher.model_name: the tokenizer of .* differs from that of the policy") as refused:
        distil(tmp_path, str(other))
    assert refused.value.exit_code == 2


def test_more_candidates_than_tokens_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"The 500 most likely tokens of .*loss_fn.topk") as refused:
        distil(tmp_path, str(MODEL), {"loss_fn": {"topk": 500}})
    assert refused.value.exit_code == 2


@pytest.mark.full("the tests above distill in one process; runs of test_runs.py have several groups of workers")
def test_over_ray_student_and_teacher_are_separate_workers(teacher, tmp_path, local_ray):
    small = {"max_num_steps": 2, "num_prompts_per_step": 16}
    steps = distil(tmp_path, teacher, {"distillation": small, "cluster": {"backend": "ray"}})
    assert steps[2]["validation/kl_forward"] < steps[0]["validation/kl_forward"]
    assert steps[2]["refit/weight_version"] == 1


def test_dataset_answers_are_distilled_in_off_policy_steps(teacher, tmp_path):
    steps = distil(
        tmp_path,
        teacher,
        {
            "distillation": {"student_data_fraction": 0.5, "max_num_steps": 10},
            "data": {"train": {"with_response": True}},
        },
    )
    sampled = {step: numbers["rollout/sampled"] for step, numbers in steps.items() if step > 0}
    assert set(sampled.values()) == {0.0, 1.0}
    for step, is_sampled in sampled.items():
        assert ("length/mean" in steps[step]) == ("staleness/mean" in steps[step]) == bool(is_sampled)
        assert steps[step]["distillation/kl_forward"] > 0
    # Seen: 0.61 to 0.78.
    assert steps[10]["validation/accuracy"] > steps[0]["validation/accuracy"] + 0.05


@pytest.mark.full("the test before this one distills given answers in half of its steps")
def test_distillation_on_dataset_answers_learns_from_the_teacher_not_the_answers(teacher, tmp_path):
    # Three of ten answers that need a carry forget it; the teacher seldom does, and is believed.
    steps = distil(
        tmp_path,
        teacher,
        {
            "distillation": {"student_data_fraction": 0.0, "max_num_steps": 25},
            "data": {"train": {"with_response": True, "forgotten_carries": 0.3}},
        },
    )
    assert {numbers["rollout/sampled"] for step, numbers in steps.items() if step > 0} == {0.0}
    # Seen: 0.20 to 0.07 nats, 0.61 to 0.87.
    assert steps[25]["validation/kl_forward"] < steps[0]["validation/kl_forward"] * 0.6
    assert steps[25]["validation/accuracy"] > steps[0]["validation/accuracy"] + 0.1


@pytest.fixture(scope="module")
def copier(tmp_path_factory):
    """The student after batches of sums that mostly drop the carry, half of them after their correct answer, to be repeated."""
    folder = tmp_path_factory.mktemp("copier")
    sums = ArithmeticDataset({"num_samples": 12000, "min_digits": 2, "with_response": True, "forgotten_carries": 0.65})
    rows = []
    for index in range(len(sums)):
        asked, given = (message["content"] for message in sums[index]["messages"])
        right = sums[index]["extra_env_info"]["expected_answer"]
        rows += [{"question": asked, "answer": given}, {"question": f"{right} {asked}", "answer": right}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"dataset_name": "jsonl", "path": str(folder / "rows.jsonl"), "response_key": "answer", "output_key": None}
    config = laid_over(
        {key: value for key, value in COMMON.items() if key != "data"},
        {
            "policy": {"max_total_sequence_length": 24, "optimizer": {"kwargs": {"lr": 1.0e-3}}},
            "checkpointing": {"enabled": True, "save_period": 200},
        },
    )
    config |= {
        "sft": {"max_num_steps": 200, "global_batch_size": 128, "seed": 0},
        "data": {"train": source},
        "logger": {"log_dir": str(folder / "runs")},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    train(folder / "run.yaml", resume="never", console=False)
    return str(folder / "runs" / "run" / "checkpoints" / "step_000200" / "policy" / "weights")


@pytest.mark.full("tests/train/algorithms/test_teacher_prompts.py proves scores and gradient; runtime has short runs")
def test_a_model_learns_from_itself_only_if_it_sees_the_answers_as_a_teacher(copier, tmp_path):
    def run(name, **distillation):
        changes = {
            "distillation": {"max_num_steps": 20, "num_prompts_per_step": 128, **distillation},
            "policy": {"model_name": copier, "max_total_sequence_length": 24, "optimizer": {"kwargs": {"lr": 3.0e-4}}},
            "teacher": {"max_total_sequence_length": 24},
        }
        (tmp_path / name).mkdir()
        steps = distil(tmp_path / name, copier, changes)
        return steps[0]["validation/accuracy"], steps[20]["validation/accuracy"]

    # Seen: 0.66 to 0.90, and 0.66 to 0.65.
    before, after = run("privileged", teacher_prompt="{expected_answer} {question}")
    assert after > before + 0.15
    before, after = run("plain")
    assert abs(after - before) < 0.03
