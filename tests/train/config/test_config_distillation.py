"""Defaults of distillation configs, and their errors with file and line."""

import re
from pathlib import Path

import pytest
import yaml

from rl_train.config.loader import load_config

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "algorithms" / "distillation.md").read_text()
DISTILLATION = """\
distillation:
  num_prompts_per_step: 8
loss_fn:
  divergence: forward_kl
policy:
  backend: hf
  model_name: some/model
  generation:
    backend: hf
    max_new_tokens: 64
teacher:
  backend: hf
  model_name: some/teacher
data:
  train: {dataset_name: arithmetic}
"""
FORM = "divergence: forward_kl"
TEACHER = "teacher:\n  backend: hf\n  model_name: some/teacher\n"
STEP = "num_prompts_per_step: 8"
VALIDATES = "num_prompts_per_step: 8\n  val_at_end: true"
HELD_OUT = "  validation: {dataset_name: arithmetic, split: validation}\n"


def test_a_teacher_and_no_environment_are_enough(files):
    run = files.load(DISTILLATION).run
    assert (run.algorithm_name, run.loss_fn.name, run.env) == ("distillation", "distillation", {})
    assert (run.teacher.head, run.teacher.frozen) == ("tokens", True)
    assert (run.loss_fn.topk, run.loss_fn.num_candidates, run.loss_fn.beyond_topk) == (64, 64, "bucket")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (TEACHER, "", "teacher is required. distillation needs a teacher model"),
        ("model_name: some/teacher", "model_name: some/teacher\n  frozen: false", "teacher.frozen: must be true"),
        ("  generation:\n    backend: hf\n    max_new_tokens: 64\n", "", "policy.generation is required."),
        (
            TEACHER,
            TEACHER.replace("hf", "plain"),
            "config.yaml:12:12: teacher.backend: the loss 'distillation' is not supported by teacher",
        ),
        (FORM, "topk: null", "topk null uses only the sampled tokens, which estimate the reverse KL and no other"),
        (FORM, "topk: 0", "config.yaml:4:9: loss_fn.topk"),
        (FORM, "divergence: jsd\n  mixed_kl_weight: 0.2", "divergence jsd with topk 64 does not use mixed_kl_weight"),
        (
            f"num_prompts_per_step: 8\nloss_fn:\n  {FORM}",
            "student_data_fraction: 0.5\nloss_fn:\n  divergence: reverse_kl\n  topk: null",
            "config.yaml:2:26: distillation.student_data_fraction: if loss_fn.topk is null, the KL to the teacher is estimated",
        ),
        (
            "num_prompts_per_step: 8",
            "student_data_fraction: 0.5\n  max_num_epochs: 1",
            "config.yaml:3:19: distillation.max_num_epochs: if student_data_fraction is below 1, only some steps draw prompts",
        ),
        ("num_prompts_per_step: 8", "student_data_fraction: 1.5", "distillation.student_data_fraction: must be"),
        (FORM, "divergence: kl", "config.yaml:4:15: loss_fn.divergence"),
        (
            STEP,
            f"{STEP}\n  teacher_prompt: '{{question}}'\n  teacher_prompt_fn: os.path.join",
            "teacher_prompt and teacher_prompt_fn are both set: keep one of them",
        ),
        (STEP, f"{STEP}\n  teacher_prompt: '{{}}'", "config.yaml:3:3: distillation.teacher_prompt: {} cannot be filled"),
        (STEP, f"{STEP}\n  teacher_prompt: '{{a.b}}'", "distillation.teacher_prompt: {a.b} is not a plain field name"),
        (
            STEP,
            f"{STEP}\n  teacher_prompt_fn: rl_train.missing",
            "config.yaml:3:22: distillation.teacher_prompt_fn: rl_train.missing cannot be imported",
        ),
        (STEP, f"{STEP}\n  teacher_weights: current", "teacher: distillation does not use a teacher: remove the section"),
        (
            f"{STEP}\n",
            f"{STEP}\n  teacher_prompt: '{{question}}'\n  student_data_fraction: 0.5\n",
            "distillation.teacher_prompt: the teacher's prompt is written for sampled answers",
        ),
        (
            f"{STEP}\n",
            f"{STEP}\n  teacher_prompt: '{{question}}'\nrollout: {{history: template}}\n",
            "the teacher reads one prompt (teacher_prompt) for a whole rollout",
        ),
        ("model_name: some/model", "model_name: some/model\n  vocab_size: 9", "vocab_size is only for a frozen model"),
        (FORM, "name: clipped_pg", "config.yaml:4:9: loss_fn.name: clipped_pg does not use a teacher"),
        (FORM, "name: dpo", "config.yaml:4:9: loss_fn.name: dpo does not use a teacher"),
        (FORM, "name: nll", "config.yaml:4:9: loss_fn.name: nll does not use a teacher"),
    ],
)
def test_settings_that_exclude_each_other_are_reported_with_their_line(files, old, new, says):
    assert old in DISTILLATION
    assert says in "\n".join(files.errors(DISTILLATION.replace(old, new, 1)))


def test_the_policy_is_its_own_teacher_only_with_another_prompt(files):
    itself = DISTILLATION.replace(TEACHER, "").replace(STEP, f"{STEP}\n  teacher_weights: current")
    [error] = files.errors(itself)
    assert "config.yaml:3:20: distillation.teacher_weights: with the student's weights and prompt, the teacher is the" in error
    run = files.load(itself.replace(STEP, f"{STEP}\n  teacher_prompt: '{{question}} {{solution}}'")).run
    needs = run.algorithm.runtime_needs
    assert (needs.companions, needs.has_teacher, run.teacher) == ((), True, None)
    assert needs.teacher_prompt.template == "{question} {solution}"


OF_TASKS = "teachers:\n  math: {backend: hf, model_name: some/teacher}\n  code: {backend: hf, model_name: other/teacher}\n"


def test_each_task_may_have_its_own_teacher(files):
    loaded = files.load(DISTILLATION.replace(TEACHER, OF_TASKS))
    assert loaded.run.teacher is None
    assert {task: (each.model_name, each.head, each.frozen) for task, each in loaded.run.teachers.items()} == {
        "math": ("some/teacher", "tokens", True),
        "code": ("other/teacher", "tokens", True),
    }
    assert files.load(loaded.to_yaml()).run == loaded.run


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("teachers:", f"{TEACHER}teachers:", "teachers: `teacher` scores all rows, and `teachers.<task>` those of one task"),
        (
            "data:\n",
            "env:\n  maths: {name: arithmetic}\n  code: {name: arithmetic}\ndata:\n",
            "teachers: no teacher scores the rows of the task 'maths'. Did you mean 'math'? Add a section teachers.maths",
        ),
        (
            "data:\n",
            "env:\n  maths: {name: arithmetic}\n  code: {name: arithmetic}\ndata:\n",
            "config.yaml:12:9: teachers.math: `env` has no task 'math'. Did you mean 'maths'? Tasks in `env`: maths, code",
        ),
        (
            "arithmetic}",
            "arithmetic, task_name: codes}",
            "data.train.task_name: `teachers` has no task 'codes'. Did you mean 'code'? Tasks in `teachers`: math, code.",
        ),
        (
            "other/teacher}",
            "other/teacher, frozen: false}",
            "config.yaml:13:58: teachers.code.frozen: must be true for a teacher",
        ),
        ("other/teacher}", "other/teacher, generation: {backend: hf}}", "teachers.code.generation: a teacher does not sample"),
        ("other/teacher}", "other/teacher, modle_name: x}", "teachers.code has no key 'modle_name'"),
        (
            "other/teacher}",
            "other/teacher, max_total_sequence_length: 8}",
            "teachers.code.max_total_sequence_length: 8 tokens are too few for the policy's rows",
        ),
        ("code: {backend: hf", "code: {backend: plain", "is not supported by teachers.code"),
        ("code: {backend: hf, ", "code: {", "teachers.code.backend is required"),
        (
            STEP,
            f"{STEP}\n  teacher_weights: current\n  teacher_prompt: '{{question}}'",
            "teachers: distillation does not use a teacher: remove the section",
        ),
    ],
)
def test_invalid_teachers_of_tasks_are_reported_with_their_line(files, old, new, says):
    text = DISTILLATION.replace(TEACHER, OF_TASKS)
    assert old in text
    assert says in "\n".join(files.errors(text.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ("teacher_weights: average", "teacher_decay is only for teacher_weights: average, and required there: set it"),
        ("teacher_weights: current\n  teacher_decay: 0.9", "only for teacher_weights: average, and required there: remove it"),
        ("teacher_weights: average\n  teacher_decay: 1.0", "distillation.teacher_decay: must be"),
        ("teacher_weights: average\n  teacher_decay: 0.0", "distillation.teacher_decay: must be"),
    ],
)
def test_the_average_of_the_policy_needs_a_decay_and_nothing_else_has_one(files, keys, says):
    text = DISTILLATION.replace(TEACHER, "").replace(STEP, f"{STEP}\n  teacher_prompt: '{{question}}'\n  {keys}")
    assert says in "\n".join(files.errors(text))


def test_the_average_of_the_policy_is_refused_where_the_backend_keeps_none(files):
    keys = "teacher_prompt: '{question} {hint}'\n  teacher_weights: average\n  teacher_decay: 0.9"
    text = DISTILLATION.replace(TEACHER, "").replace(STEP, f"{STEP}\n  {keys}")
    needs = files.load(text).run.algorithm.runtime_needs
    assert (needs.companions, needs.teaches_itself, needs.teacher_decay) == ((), True, 0.9)
    errors = "\n".join(files.errors(text.replace("backend: hf", "backend: valuer", 1)))
    assert (
        "policy.backend: the teacher of distillation is the moving average of the policy's weights, but the backend" in errors
    )
    [error] = files.errors(text.replace("teacher_prompt: '{question} {hint}'\n  ", ""))
    assert "with the student's weights and prompt, the teacher is the student" in error


SPANS = DISTILLATION.replace(FORM, "divergence: reverse_kl\n  topk: null").replace(
    STEP, f"{STEP}\n  teacher_tokenizer: own\n  max_rollout_turns: 1"
)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("divergence: reverse_kl\n  topk: null", FORM, "own compares spans of sampled text, not distributions."),
        (TEACHER, OF_TASKS, "own is not supported with a teacher for each task."),
        (
            f"{STEP}\n",
            f"{STEP}\n  teacher_weights: current\n  teacher_prompt: '{{question}}'\n",
            "own is only for a frozen teacher",
        ),
        (
            "max_rollout_turns: 1",
            "max_rollout_turns: 3\nenv: {arithmetic: {}}",
            "config.yaml:3:22: distillation.teacher_tokenizer: own is only supported for rollouts of one turn.",
        ),
        ("tokenizer: own", "tokenizer: other", "distillation.teacher_tokenizer: must be"),
    ],
)
def test_a_teacher_with_its_own_tokenizer_needs_sampled_text_of_one_turn(files, old, new, says):
    prompt = files.load(SPANS).run.algorithm.runtime_needs.teacher_prompt
    assert (prompt.own_tokens, prompt.key, prompt.template) == (True, "teacher_tokenizer", None)
    assert old in SPANS
    assert says in "\n".join(files.errors(SPANS.replace(old, new, 1)))


def test_a_teachers_prompt_is_a_setting_of_distillation_alone(files, good):
    assert "teacher_prompt" in files.errors(good.replace("grpo:", "grpo:\n  teacher_prompt: a"))[0]


def test_a_backend_without_topk_logprobs_supports_sampled_distillation(files):
    other = DISTILLATION.replace(TEACHER, TEACHER.replace("hf", "plain"))
    assert files.load(other.replace(FORM, "divergence: reverse_kl\n  topk: null")).run.loss_fn.num_candidates == 0


def test_sampled_distillation_excludes_greedy_validation(files):
    text = DISTILLATION.replace("num_prompts_per_step: 8", VALIDATES) + HELD_OUT
    assert files.load(text).run.algorithm.val_at_end
    sampled = text.replace(FORM, "divergence: reverse_kl\n  topk: null")
    [error] = files.errors(sampled)
    assert "policy.generation.val_temperature: validation is greedy" in error
    assert files.load(sampled.replace("max_new_tokens: 64", "max_new_tokens: 64\n    val_temperature: 1.0"))


def test_other_algorithms_still_need_their_environment(files, good):
    assert any(
        "env is required. grpo trains on rewards" in error
        for error in files.errors(good.replace("env:", "# env:").replace("  arithmetic: {}", ""))
    )


def test_the_config_on_the_page_and_the_example_are_valid(files, registry):
    block = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)[0]
    config = yaml.safe_load(block)
    for section in ("policy", "teacher"):
        config[section]["model_name"] = "some/model"
    assert files.load(yaml.safe_dump(config)).run.loss_fn.topk == 8
    example = load_config(ROOT / "examples" / "distillation_addition.yaml", (), registry=registry).run
    assert example.teacher.model_name.endswith("step_000300/policy/weights")
