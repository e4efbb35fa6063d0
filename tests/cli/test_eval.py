"""`rlcore eval`: the same numbers as the run, a stable schema, exit code 2 for user errors, and no remaining process."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import uuid
from itertools import combinations
from pathlib import Path
from statistics import fmean

import pytest
import yaml
from marked_processes import MARK, assert_gone
from typer.testing import CliRunner

from rl_core.errors import RLCoreError, UserError
from rl_train.checkpoints.manifest import write_manifest
from rl_train.run_folders.checkpoint_paths import find_weights
from rlcore_cli.main import app

MODEL = Path(__file__).parents[2] / "examples" / "addition" / "model"
IN_PROCESS = "cluster.backend=in_process"
ROUNDING = 1e-6
"""A run's accuracy is a mean in float32."""
CONFIG = {
    "grpo": {
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 4,
        "max_num_steps": 3,
        "seed": 3,
        "val_period": 1,
        "val_batch_size": 20,
        "max_val_samples": 48,
        "val_num_generations_per_prompt": 4,
    },
    "policy": {
        "backend": "hf",
        "model_name": str(MODEL),
        "max_total_sequence_length": 16,
        # So high that each step's weights score otherwise.
        "optimizer": {"kwargs": {"lr": 3.0e-3}},
        "generation": {"backend": "hf", "max_new_tokens": 5, "val_temperature": 1.0},
    },
    "data": {
        "train": {"dataset_name": "arithmetic", "num_samples": 40},
        "validation": {"dataset_name": "arithmetic", "num_samples": 64, "split": "validation", "min_digits": 2},
    },
    "env": {"arithmetic": {"num_workers": 1}},
    "checkpointing": {"save_period": 1, "keep_latest_k": 10, "metric_name": "validation/accuracy"},
}

OWN_WEIGHTS = """
from rl_backends_hf.config import HFGenerationConfig
from rl_backends_hf.generation import HuggingFaceGeneration

class Own(HuggingFaceGeneration):
    has_own_weights = True

    def __init__(self, *, config, **kwargs):
        keys = {"model_name", "max_new_tokens", "val_temperature", "seed", "max_model_len"} & type(config).model_fields.keys()
        own = HFGenerationConfig(backend="hf", **{key: getattr(config, key) for key in keys})
        super().__init__(config=own, **kwargs)
"""
"""An engine given by its path that samples from its own weights."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Folder of a short run in this process; its config is next to it."""
    from rl_train.launch.train import train

    folder = tmp_path_factory.mktemp("eval")
    path = folder / "config.yaml"
    path.write_text(json.dumps(CONFIG))
    overrides = [IN_PROCESS, f"logger.log_dir={folder}", "logger.run_name=run"]
    return train(path, overrides, console=False).folder


@pytest.fixture(scope="module")
def run_metrics(run):
    """The run's metrics by step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def evaluate(config, *arguments):
    return CliRunner().invoke(app, ["eval", config, IN_PROCESS, *map(str, arguments)])


def results_of(config, *arguments):
    result = evaluate(config, *arguments, "--json", "found.json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    prompts = [json.loads(line) for line in Path("found.prompts.jsonl").read_text().splitlines()]
    return json.loads(Path("found.json").read_text()), prompts


def values(scores):
    return {name: found["value"] for name, found in scores["metrics"].items()}


@pytest.mark.parametrize("which", ["run folder", "step folder"])
def test_evaluating_a_checkpoint_equals_the_validation_of_the_run(config, run, run_metrics, which):
    step = 3 if which == "run folder" else 1
    found, _ = results_of(config, "--checkpoint", run if step == 3 else run / "checkpoints" / "step_000001")
    scores = values(found["modes"][0]["all"])
    assert found["weights"]["step"] == step
    assert scores["mean@4"] == pytest.approx(run_metrics[step]["validation/accuracy"], abs=ROUNDING)
    for name in ("pass@1", "pass@2", "pass@4", "cons@1", "cons@2", "cons@4", "reward", "length", "truncated_frac"):
        assert scores[name] == pytest.approx(run_metrics[step][f"validation/{name}"], abs=ROUNDING), name
    # Otherwise the test would pass with any checkpoint.
    assert len({row["validation/pass@1"] for row in run_metrics.values()}) == 3


def test_a_run_is_evaluated_with_its_own_config_and_newest_checkpoint(config, run, run_metrics):
    Path("runs").symlink_to(run.parent)
    Path(run.name).mkdir()  # as `rlcore init` makes one
    found, _ = results_of(run.name)
    assert (found["weights"]["step"], Path(found["config_file"]).parent.name) == (3, run.name)
    assert values(found["modes"][0]["all"])["mean@4"] == pytest.approx(run_metrics[3]["validation/accuracy"], abs=ROUNDING)


def test_a_config_that_prompts_otherwise_than_the_run_is_a_warning(config, run):
    same = evaluate(config, "--checkpoint", run, "--json", "same.json")
    other = evaluate(config, "policy.generation.max_new_tokens=4", "--checkpoint", run, "--json", "other.json")
    assert "warning" not in same.stderr
    assert (
        "warning: the run of the checkpoint had other values of policy.generation.max_new_tokens, so its accuracy may differ. "
        f"`rlcore eval {run}` uses the run's config." in other.stderr
    )


@pytest.mark.parametrize(
    ("held_out", "override"),
    [("split", "data.val_data_path=test.jsonl"), ("split", "data.validation={}"), ("file", "data.val_data_path=test.jsonl")],
)
def test_validation_data_of_an_override_replaces_that_of_the_config(config, tmp_path, held_out, override):
    """With the fields of the rows that it replaces."""
    rows = [{"problem": f"1+{digit}=", "solution": str(1 + digit)} for digit in range(9)]
    for name, count in (("train.jsonl", 9), ("test.jsonl", 3)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
    fields = {"dataset_name": "jsonl", "input_key": "problem", "output_key": "solution", "task_name": "arithmetic"}
    data = {"train": {**fields, "path": "train.jsonl"}}
    data |= (
        {"split": {"validation": 0.5}, "validation": None}
        if held_out == "split"
        else {"validation": {**fields, "path": "train.jsonl"}}
    )
    Path(config).write_text(json.dumps({**CONFIG, "data": data}))
    found, prompts = results_of(config, override.format(json.dumps({**fields, "path": "test.jsonl"})))
    assert found["modes"][0]["all"]["num_prompts"] == 3
    assert [line["expected_answer"] for line in prompts] == ["1", "2", "3"]


def test_the_best_checkpoint_is_the_one_that_the_runs_metric_ranks_first(config, run, run_metrics):
    best = max(run_metrics, key=lambda step: run_metrics[step]["validation/accuracy"])
    Path("runs").symlink_to(run.parent)
    found, _ = results_of(config, "--checkpoint", run.name, "--best")
    assert found["weights"]["step"] == best


def test_the_best_checkpoint_is_converted(config, run, run_metrics):
    best = max(run_metrics, key=lambda step: (run_metrics[step]["validation/accuracy"], step))
    result = CliRunner().invoke(app, ["convert", str(run), "model", "--best"])
    assert result.exit_code == 0, result.output + repr(result.exception)
    weights = run / "checkpoints" / f"step_{best:06d}" / "policy" / "weights" / "model.safetensors"
    assert (Path("model") / "model.safetensors").read_bytes() == weights.read_bytes()
    assert f"Best checkpoint of {run}: " in result.stdout
    of_a_step = CliRunner().invoke(app, ["convert", str(weights.parents[2]), "other", "--best"])
    assert "is a single checkpoint, so --best does not apply" in str(of_a_step.exception)


def test_a_misspelt_run_is_an_error_that_suggests_a_name(config, run):
    Path("runs").symlink_to(run.parent)
    result = evaluate(config, "--checkpoint", "ruin")
    assert isinstance(result.exception, RLCoreError), repr(result.exception)
    assert result.exception.exit_code == 2
    said = "ruin does not exist. Give a run folder, such as runs/NAME, or its name. Did you mean 'run'?"
    assert said in str(result.exception)


def test_the_weights_of_a_checkpoint_as_a_model_are_the_same_weights(config, run):
    step = run / "checkpoints" / "step_000002"
    as_checkpoint, _ = results_of(config, "--checkpoint", step)
    as_model, _ = results_of(config, "--checkpoint", step / "policy" / "weights")
    assert as_checkpoint["weights"]["source"] == "checkpoint"
    assert as_model["weights"]["source"] == "model"
    assert as_checkpoint["weights"]["fingerprint"] == as_model["weights"]["fingerprint"]
    assert as_checkpoint["modes"][0]["all"] == as_model["modes"][0]["all"]


def test_an_engine_with_its_own_weights_is_evaluated_without_a_policy(config, run, tmp_path, monkeypatch):
    (tmp_path / "engine_with_weights.py").write_text(OWN_WEIGHTS)
    monkeypatch.syspath_prepend(tmp_path)
    own = "policy.generation.backend=engine_with_weights.Own"
    found, _ = results_of(config, own, "grpo.max_val_samples=8", "policy.backend=megatron")
    synced, _ = results_of(config, "grpo.max_val_samples=8")
    assert found["weights"] == {
        "source": "engine",
        "path": str(MODEL),
        "step": None,
        "version": None,
        "fingerprint": None,
        "transport": None,
    }
    assert found["modes"][0]["all"] == synced["modes"][0]["all"]
    result = evaluate(config, own, "--checkpoint", run)
    assert isinstance(result.exception, UserError), repr(result.exception)
    assert "has its own weights and cannot receive those of a checkpoint" in result.output + str(result.exception)


def test_greedy_and_sampled_in_one_call_add_up_to_their_prompts(config):
    found, prompts = results_of(config, "--greedy", "--samples", 5, "--k", "1,2,5")
    greedy, sampled = found["modes"]
    assert (greedy["mode"], greedy["temperature"], sampled["mode"], sampled["temperature"]) == ("greedy", 0.0, "sampled", 1.0)
    assert list(values(greedy["all"]))[:3] == ["mean@1", "pass@1", "cons@1"]
    assert len(prompts) == 96
    of_sampled = [line for line in prompts if line["mode"] == "sampled"]
    assert [line["index"] for line in of_sampled] == list(range(48))
    scores = values(sampled["all"])
    assert scores["mean@5"] == pytest.approx(fmean(fmean(line["correct"]) for line in of_sampled))
    for k in (1, 2, 5):
        passed = fmean(fmean(any(subset) for subset in combinations(line["correct"], k)) for line in of_sampled)
        assert scores[f"pass@{k}"] == pytest.approx(passed)
    assert scores["reward"] == pytest.approx(fmean(fmean(line["rewards"]) for line in of_sampled))
    for line in prompts:
        expected = str(sum(map(int, line["prompt"].removesuffix("=").split("+"))))
        assert line["correct"] == [answer == expected for answer in line["answers"]]
        assert len({len(line[key]) for key in ("completions", "answers", "rewards", "lengths", "truncated")}) == 1


def test_reward_functions_are_tried_before_the_evaluation_and_score_it(config):
    Path("own_rewards.py").write_text(
        "def exact(completion, expected_answer):\n    return float(completion == expected_answer)\n"
    )
    section = "env.arithmetic={reward_fn: own_rewards.exact}"
    found, prompts = results_of(config, section, "--greedy")
    assert values(found["modes"][0]["all"])["reward"] == fmean(float(*line["rewards"]) for line in prompts)
    Path("other_rewards.py").write_text("def named(completion, solution):\n    return 1.0\n")
    error = evaluate(config, "env.arithmetic={reward_fn: other_rewards.named}").exception
    assert isinstance(error, UserError)
    assert "requires 'solution'" in str(error)


def test_the_keys_of_the_json_are_those_of_the_page(config):
    found, prompts = results_of(config, "grpo.max_val_samples=3")
    assert list(found) == [
        *("format", "weights", "dataset", "validation_set", "reward_above", "modes", "prompts", "config_file", "overrides"),
        *("config", "environment"),
    ]
    assert found["format"] == 2
    assert found["weights"] == {
        **{"source": "config", "path": str(MODEL), "step": None, "version": 0, "transport": "by_reference"},
        "fingerprint": found["weights"]["fingerprint"],
    }
    [one] = found["modes"]
    assert list(one) == ["mode", "temperature", "seconds", "all", "by_task", "by_dataset", "environments"]
    assert one["by_task"] == one["by_dataset"] == {"arithmetic": one["all"]}
    assert list(one["all"]) == [
        *("num_prompts", "samples_per_prompt", "metrics", "max_length", "num_truncated_prompts", "not_reported"),
    ]
    assert all(list(estimate) == ["value", "standard_error"] for estimate in one["all"]["metrics"].values())
    assert found["config"]["grpo"]["max_val_samples"] == 3
    assert [list(line) for line in prompts] == [
        [
            *("mode", "dataset", "task", "index", "prompt", "prompt_truncated", "expected_answer", "completions"),
            *("answers", "correct", "rewards"),
            *("reward_parts", "lengths", "truncated", "turns"),
        ]
    ] * 3
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    for key in [*found, *found["weights"], *one, *one["all"], *prompts[0]]:
        assert f"`{key}`" in page, key


def test_results_go_into_the_run_folder_and_never_over_others(config, run):
    for _ in range(2):
        result = evaluate(config, "grpo.max_val_samples=2", "--checkpoint", run)
        assert result.exit_code == 0, result.output
    found = sorted(path.name for path in (run / "eval").iterdir())
    assert found == [
        *("step_000003-2.json", "step_000003-2.prompts.jsonl", "step_000003.json", "step_000003.prompts.jsonl"),
    ]
    assert f"results: {run / 'eval' / 'step_000003-2.json'}" in result.output


def test_a_narrow_terminal_cuts_no_number_off(config, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")  # so that the output counts as a terminal
    table = evaluate(config, "--greedy", "--samples", "2", "grpo.max_val_samples=8").stdout
    assert "…" not in table
    assert len(re.findall(r"\d\.\d{4} ± \d\.\d{4}", table)) >= 8


def test_without_a_run_folder_nothing_is_written_and_the_table_is_all(config, tmp_path):
    result = evaluate(config, "grpo.max_val_samples=2", "--temperature", "0")
    assert result.exit_code == 0, result.output
    assert "Results were not saved; use --json FILE to save them" in result.output
    [heading, *rows] = [line.split() for line in result.output.splitlines() if line.startswith(("task", "arithmetic"))]
    assert heading[2] == "greedy"
    assert [row[1] for row in rows if "@" in row[1] or row[1] == "accuracy"] == ["accuracy"]
    assert "±" in rows[0]
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


TWO_TASKS = """
from rl_envs.arithmetic import ArithmeticDataset


class TwoTasks(ArithmeticDataset):
    def __init__(self, config):
        super().__init__({"num_samples": 7, "min_digits": 2})

    def __getitem__(self, index):
        return {**super().__getitem__(index), "task_name": ("silent", "sums")[index % 2]}
"""
SILENT = """
from rl_envs.arithmetic import ArithmeticEnvironment


class Silent(ArithmeticEnvironment):
    def __init__(self):
        super().__init__()

    def step(self, logs, metadata):
        return super().step(logs, metadata)._replace(answers=None)
"""


def test_tasks_are_reported_separately_and_missing_metrics_are_not_shared(config, tmp_path):
    (tmp_path / "two_tasks_data.py").write_text(TWO_TASKS)
    (tmp_path / "silent_environment.py").write_text(SILENT)
    changed = {**CONFIG, "env": {"sums": {"name": "arithmetic"}, "silent": {"env_cls": "silent_environment.Silent"}}}
    changed["data"] = {**CONFIG["data"], "validation": {"dataset_name": "two_tasks_data.TwoTasks"}}
    Path(config).write_text(json.dumps(changed))
    result = evaluate(config, "--samples", 2, "--json", "found.json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    [one] = json.loads(Path("found.json").read_text())["modes"]
    assert {task: scores["num_prompts"] for task, scores in one["by_task"].items()} == {"silent": 4, "sums": 3}
    assert "cons@2" in values(one["by_task"]["sums"])
    for scores in (one["all"], one["by_task"]["silent"]):
        assert "pass@2" in values(scores)
        assert "cons@2" not in values(scores)
        assert scores["not_reported"] == {"cons@k": "silent: the environment returned no answers"}
    assert "cons@k is not reported: silent: the environment returned no answers" in result.output
    shown = {line.split()[0] for line in result.output.splitlines() if " pass@2 " in line}
    assert shown == {"all", "silent", "sums"}


def without_manifest(run, folder):
    shutil.copytree(run / "checkpoints" / "step_000001", folder / "step_000001")
    (folder / "step_000001" / "manifest.json").unlink()
    return folder / "step_000001"


def half_written(run, folder):
    (folder / "step_000002.partial").mkdir()
    return folder / "step_000002.partial"


def without_checkpoints(run, folder):
    (folder / "checkpoints").mkdir()
    return folder


def of_another_model(run, folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(run / "checkpoints" / "step_000001", folder / "step_000001")
    weights = folder / "step_000001" / "policy" / "weights"
    shutil.rmtree(weights)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 30}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(weights)
    write_manifest(folder / "step_000001", step=1, metrics={})
    return folder / "step_000001"


@pytest.mark.parametrize("weights", ["model.safetensors", "lit_model.pth"])
def test_a_model_without_a_config_of_transformers_is_a_model(tmp_path, weights):
    (tmp_path / weights).write_bytes(b"")
    found = find_weights(tmp_path)
    assert (found.weights, found.step, found.run_folder) == (tmp_path, None, None)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda run, folder: folder / "nowhere", "does not exist. Give a run folder"),
        (lambda run, folder: run / "metrics.jsonl", "is not a folder"),
        (lambda run, folder: folder, "is neither a checkpoint, a run folder nor a model (it contains: nothing)"),
        (without_checkpoints, "has no complete checkpoint"),
        (without_manifest, "it has no manifest.json"),
        (half_written, "is incomplete"),
        (of_another_model, "has a different model"),
    ],
)
def test_a_path_without_matching_weights_is_a_user_error(config, run, tmp_path, make, said):
    folder = tmp_path / "given"
    folder.mkdir()
    result = evaluate(config, "--checkpoint", make(run, folder))
    # For an error that `main` would print, the runner returns the exception; a worker error has the code of its cause.
    assert isinstance(result.exception, RLCoreError), repr(result.exception)
    assert result.exception.exit_code == 2
    assert said in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--samples", "4", "--k", "1,8"), "--k 8: k must be from 1 to 4"),
        (("--greedy", "--k", "2"), "k must be from 1 to 1"),
        (("--temperature", "0.5"), "policy.generation.temperature=0.5"),
        (("--k", "1;2"), "is not a list of integers"),
        (("--k", "0"), "--k 0"),
        (("--best",), "give the run folder with --checkpoint"),
        (("--best", "--checkpoint", str(MODEL)), "so --best does not apply"),
        (("--json", "no/such/folder/found.json"), "Create it first"),
        (("--json", "."), "is a folder"),
        (("--json", "/proc/found.json"), "cannot be written"),
        (("data.validation=null",), "data.validation is required"),
        (("policy.precison=bfloat16",), "Did you mean 'precision'?"),
    ],
)
def test_errors_in_options_or_config_are_reported_before_anything_starts(config, tmp_path, arguments, said):
    if arguments[0] == "data.validation=null":
        without = {**CONFIG, "data": {"train": CONFIG["data"]["train"]}, "grpo": {**CONFIG["grpo"], "val_period": 0}}
        Path(config).write_text(json.dumps(without))
        arguments = ()
    result = evaluate(config, *arguments)
    assert isinstance(result.exception, UserError), repr(result.exception)
    assert result.exception.exit_code == 2
    assert said in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_preference_pairs_cannot_be_evaluated(config, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": "3"}) + "\n")
    pairs = {"dataset_name": "preference", "path": str(tmp_path / "pairs.jsonl")}
    changed = {**CONFIG, "dpo": {}, "data": {"train": pairs, "validation": pairs}}
    del changed["grpo"]
    Path(config).write_text(json.dumps(changed))
    result = evaluate(config)
    assert isinstance(result.exception, UserError), repr(result.exception)
    assert "but no messages; it may have preferences" in str(result.exception)


@pytest.mark.parametrize(("algorithm", "samples"), [("dpo", True), ("rm", False)])
def test_a_run_on_preference_pairs_leads_to_a_config_with_prompts_if_its_policy_can_sample(
    config, tmp_path, algorithm, samples
):
    pairs = {"dataset_name": "preference", "path": str(tmp_path / "pairs.jsonl")}
    policy = {key: value for key, value in CONFIG["policy"].items() if key != "generation"}
    changed = {**CONFIG, algorithm: {}, "policy": policy, "data": {"train": pairs, "validation": pairs}}
    del changed["grpo"], changed["env"]
    Path(config).write_text(json.dumps(changed))
    message = str(evaluate(config).exception)
    assert ("rlcore eval CONFIG_WITH_PROMPTS_AND_ENV --checkpoint RUN" in message) is samples
    assert "`validation/accuracy`" in message
    assert "++" not in message


def test_a_run_of_supervised_training_leads_to_a_config_with_prompts_and_is_not_compared_with_it(config, run, tmp_path):
    supervised = tmp_path / "runs" / "sft"
    shutil.copytree(run, supervised)
    changed = {**yaml.safe_load((run / "config.yaml").read_text()), "sft": {}}
    del changed["grpo"], changed["env"], changed["policy"]["generation"]
    changed["policy"]["max_total_sequence_length"] = 12
    (supervised / "config.yaml").write_text(json.dumps(changed))
    message = str(evaluate(str(supervised)).exception)
    assert "rlcore eval CONFIG_WITH_PROMPTS_AND_ENV --checkpoint RUN" in message
    assert "++" not in message
    plain = evaluate(config, "grpo.max_val_samples=2", "--checkpoint", supervised)
    changed["policy"]["tokenizer"]["chat_template_kwargs"] = {"short": True}
    (supervised / "config.yaml").write_text(json.dumps(changed))
    other = evaluate(config, "grpo.max_val_samples=2", "--checkpoint", supervised)
    assert plain.exit_code == other.exit_code == 0, plain.output + other.output
    assert "warning" not in plain.stderr
    assert "other values of policy.tokenizer.chat_template_kwargs" in other.stderr
    assert "uses the run's config" not in other.stderr


def test_the_command_imports_nothing_heavy_before_it_runs():
    code = "import sys, rlcore_cli.eval; print(sorted({'torch', 'ray', 'numpy', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.full(
    "backends_vllm/test_replicas.py has vLLM over Ray; core/cluster/test_no_orphans.py looks for processes of a killed driver"
)
@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_over_ray_scores_a_checkpoint_as_hf_does_in_process_and_leaves_no_process(config, run):
    greedy = ("--checkpoint", str(run), "--greedy")
    in_process, _ = results_of(config, *greedy)
    mark = uuid.uuid4().hex
    vllm = ("policy.generation.backend=vllm", "++policy.generation.vllm_cfg.max_num_seqs=16", "--json", "vllm.json")
    result = subprocess.run(
        [sys.executable, "-m", "rlcore_cli.main", "eval", config, *vllm, *greedy],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, MARK: mark},
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(Path("vllm.json").read_text())
    assert found["weights"]["transport"] == "shared_memory"
    # Greedy tokens in float32 of one model: the two engines may differ only if two tokens are almost equally likely.
    [mine], [theirs] = found["modes"], in_process["modes"]
    assert math.isclose(values(mine["all"])["pass@1"], values(theirs["all"])["pass@1"], abs_tol=1.5 / 48)
    assert_gone(mark)
