"""`--config` layers config files, and the configs of the page on NeMo RL are valid over the packaged ones."""

import json
import re
import sys
from pathlib import Path

import pytest

from rl_core.config.diagnostics import InvalidConfigError
from rl_train.config.loader import load_config
from rl_train.config.rules.rule import Use
from rl_train.config.sources import BASE_CONFIGS
from rl_train.metrics.jsonl import read_jsonl
from rlcore_cli.main import main

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "examples" / "addition" / "model")
PAGE = (ROOT / "docs" / "nemo_rl_names.md").read_text()
[DIRECT, PROXY, WEATHER, WEIGHT_UPDATES] = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the config and the data of the page."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo_direct_vllm.yaml").write_text(DIRECT.replace("path/to/model", MODEL))
    rows = [{"problem": f"{a}+{a}=", "expected_answer": str(2 * a)} for a in range(10, 18)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def rlcore(monkeypatch, capsys):
    """Runs the command in this process; returns its exit code, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rlcore", *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # otherwise the command sets it permanently
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return run


@pytest.mark.usefixtures("folder")
def test_the_direct_vllm_config_is_valid_over_the_packaged_base(rlcore):
    code, out, err = rlcore("validate", "--config", "grpo.yaml", "grpo_direct_vllm.yaml")
    assert (code, err) == (0, "")
    assert "grpo_direct_vllm.yaml is valid" in out
    assert "generation  vllm, up to 2048 new tokens" in out
    run = load_config(["grpo.yaml", "grpo_direct_vllm.yaml"]).run
    assert (run.policy.backend, run.policy.max_total_sequence_length) == ("hf", 4096)


@pytest.fixture
def server_files(folder, monkeypatch):
    """The configs with `backend: openai`, their data, and the keys with which the server receives weights."""
    monkeypatch.setenv("RLCORE_SERVE_ADMIN_KEY", "an-admin-key-of-a-test")
    (folder / "grpo_weather.yaml").write_text(WEATHER.replace("path/to/model", MODEL))
    (folder / "grpo_with_nemo_skills_proxy.yaml").write_text(PROXY.replace("path/to/model", MODEL))
    (folder / "weight_updates.yaml").write_text(WEIGHT_UPDATES)
    (folder / "val.jsonl").write_text((folder / "train.jsonl").read_text())
    for name in ("weather_train.jsonl", "weather_val.jsonl"):
        (folder / name).write_text('{"question": "Observations: a clear sky.", "expected_answer": "sunny"}\n')


@pytest.mark.usefixtures("server_files")
def test_the_weather_config_is_valid_over_the_packaged_base_with_weight_updates(rlcore):
    code, out, err = rlcore("validate", "--config", "grpo.yaml", "--config", "grpo_weather.yaml", "weight_updates.yaml")
    assert (code, err) == (0, "")
    assert "env         weather (rl_envs.weather.WeatherEnvironment)" in out
    assert "generation  openai, up to 512 new tokens" in out
    assert "an-admin-key" not in out


@pytest.mark.usefixtures("server_files")
def test_a_server_with_its_own_weights_is_refused_for_training_and_accepted_for_evaluation():
    with pytest.raises(
        InvalidConfigError, match=r"'openai' has its own weights.* Set policy\.generation\.openai_cfg\.weight_updates"
    ):
        load_config(["grpo.yaml", "grpo_weather.yaml"])
    assert load_config(["grpo.yaml", "grpo_weather.yaml"], use=Use.EVAL).run.policy.generation.has_own_weights


@pytest.mark.usefixtures("server_files")
def test_top_p_is_the_only_refused_line_of_the_proxy_config():
    files = ["grpo.yaml", "grpo_with_nemo_skills_proxy.yaml", "weight_updates.yaml"]
    with pytest.raises(InvalidConfigError) as caught:
        load_config(files)
    assert [problem.path for problem in caught.value.problems] == [("policy", "generation", "top_p")]
    generation = load_config(files, ["policy.generation.top_p=1.0"]).run.policy.generation
    assert (generation.openai_cfg.model, generation.refit_transport) == ("nemo-skills", "disk")


@pytest.mark.usefixtures("folder")
def test_top_p_is_the_only_refused_line():
    with pytest.raises(InvalidConfigError) as caught:
        load_config(["grpo.yaml", "grpo_direct_vllm.yaml"], ["++policy.generation.top_p=0.95"])
    [problem] = caught.value.problems
    assert problem.path == ("policy", "generation", "top_p")
    assert problem.message.startswith(
        "grpo cannot train on filtered samples here: the generation backend 'vllm' does not return the tokens that it sampled"
    )


@pytest.mark.usefixtures("folder")
def test_a_base_and_overrides_are_a_whole_config(rlcore):
    given = (f"++policy.model_name={MODEL}", "++data.train_data_path=train.jsonl", "++data.prompt.prompt_config=generic/math")
    for name in ("grpo.yaml", "configs/grpo.yaml"):
        code, out, err = rlcore("validate", "--config", name, *given)
        assert (code, err) == (0, "")
        assert f"{name} is valid" in out
    assert load_config("configs/grpo.yaml", [*given, "++env.math.num_workers=8"]).run.env["math"].num_workers == 8
    answers = ("++data.train.dataset_name=jsonl", "++data.train.path=train.jsonl", "++data.train.input_key=problem")
    code, out, err = rlcore("validate", "--config", "sft.yaml", given[0], *answers, "++data.train.response_key=expected_answer")
    assert (code, err) == (0, "")


@pytest.mark.parametrize("where", ["data.train_data_path", "data.train.path"])
@pytest.mark.usefixtures("folder")
def test_the_packaged_sft_config_reads_json_lines(where):
    given = [f"++policy.model_name={MODEL}", f"++{where}=train.jsonl", "++data.train.response_key=expected_answer"]
    train = load_config("configs/sft.yaml", [*given, "++data.train.input_key=problem"]).run.data.train
    assert (train.dataset_name, train.path.name, train.response_key) == ("jsonl", "train.jsonl", "expected_answer")


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"conversations": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]}, "sharegpt"),
        ({"instruction": "Add.", "input": "1+1=", "output": "2"}, "alpaca"),
    ],
)
def test_rows_of_well_known_forms_get_a_hint_that_works(folder, row, name):
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    given = [f"++policy.model_name={MODEL}", "++data.train_data_path=rows.jsonl"]
    with pytest.raises(InvalidConfigError, match=f"It has the fields of {name}: set `record_fn: {name}`"):
        load_config("sft.yaml", given)
    assert load_config("sft.yaml", [*given, f"++data.train.record_fn={name}"]).run.data.train.record_fn == name


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_data_file_fails_in_validate(folder, rlcore, content):
    (folder / "rows.jsonl").write_text(content)
    for more in ((), ("++data.train.on_bad_row=skip",), ("++data.train.record_fn=data_of_an_empty_file.row",)):
        given = (f"++policy.model_name={MODEL}", "++data.train_data_path=rows.jsonl", *more)
        (folder / "data_of_an_empty_file.py").write_text("def row(row): return row\n")
        code, _, err = rlcore("validate", "--config", "sft.yaml", *given)
        assert code == 2
        assert "rows.jsonl is empty: a dataset needs at least one row." in err


@pytest.mark.parametrize(
    ("source", "path", "file", "content"),
    [
        ("parquet", "rows.parquet", "rows.parquet", ""),
        ("parquet", "rows", "rows/0.parquet", ""),
        ("huggingface", "rows", "rows/train.jsonl", ""),
        ("huggingface", "rows", "rows/train.csv", ""),
        ("huggingface", "rows", "rows/train.csv", "question,expected_answer\r\n\r\n"),
    ],
)
def test_files_without_rows_fail_in_validate(folder, rlcore, source, path, file, content):
    written = folder / file
    written.parent.mkdir(exist_ok=True)
    given = [f"++policy.model_name={MODEL}", f"++data.train.dataset_name={source}", f"++data.train.path={path}"]
    given.append("++data.train.response_key=expected_answer")
    written.write_text(content)
    code, _, err = rlcore("validate", "--config", "sft.yaml", *given)
    assert code == 2
    assert f"data.train.path: {folder / path} is empty: a dataset needs at least one row." in err
    written.write_text("question,expected_answer\r1+1=,2\r")
    assert rlcore("validate", "--config", "sft.yaml", *given)[0] == 0


def test_a_path_and_a_short_path_are_refused(folder):
    given = [f"++policy.model_name={MODEL}", "++data.train.path=train.jsonl", "++data.train_data_path=train.jsonl"]
    with pytest.raises(InvalidConfigError, match="train and train_data_path both define the training data"):
        load_config("sft.yaml", given)


def test_environments_and_data_of_a_file_replace_those_of_the_packaged_configs(folder):
    (folder / "task.yaml").write_text(MY_TASK.replace("my_environment.MyEnvironment", "rl_envs.weather.WeatherEnvironment"))
    given = [f"++policy.model_name={MODEL}", "++data.train_data_path=train.jsonl", "++data.train.input_key=problem"]
    assert [*load_config(["grpo.yaml", "task.yaml"], given).run.env] == ["my_task"]
    row = {"dataset_name": "jsonl", "path": "train.jsonl", "input_key": "problem", "response_key": "expected_answer"}
    (folder / "mixed.yaml").write_text(f"data: {{mix: {{one: {json.dumps(row)}}}}}\n")
    data = load_config(["sft.yaml", "mixed.yaml"], given[:1]).run.data
    assert (data.train, [*data.mix]) == (None, ["one"])


def test_later_files_override_earlier_ones_and_name_the_run(folder):
    (folder / "over.yaml").write_text("grpo: {num_prompts_per_step: 4}\npolicy: {max_total_sequence_length: 3000}\n")
    loaded = load_config(["grpo.yaml", "grpo_direct_vllm.yaml", folder / "over.yaml"], ["grpo.seed=3"])
    assert loaded.path.name == "over.yaml"
    assert (loaded.run.algorithm.num_prompts_per_step, loaded.run.algorithm.num_generations_per_prompt) == (4, 8)
    assert str(loaded.source["grpo.num_prompts_per_step"]).endswith("over.yaml:1:30")
    assert str(loaded.source["policy.backend"]).startswith(str(BASE_CONFIGS / "grpo.yaml"))
    assert loaded.run.algorithm.seed == 3


def test_an_error_is_reported_in_the_file_of_its_value(folder, rlcore):
    (folder / "over.yaml").write_text("grpo: {num_prompts: 4}\n")
    code, _, err = rlcore("validate", "--config", "grpo.yaml", "--config", "grpo_direct_vllm.yaml", "over.yaml")
    assert code == 2
    assert "grpo.yaml + grpo_direct_vllm.yaml + over.yaml has 1 error" in err
    assert "over.yaml:1:8: grpo.num_prompts: grpo has no key 'num_prompts'" in err


def test_a_file_of_the_same_name_comes_before_the_packaged_one(folder):
    (folder / "own.yaml").write_text("defaults: grpo.yaml\n" + DIRECT.replace("path/to/model", MODEL))
    assert load_config("own.yaml").run.algorithm.num_prompts_per_step == 32
    (folder / "grpo.yaml").write_text(
        "grpo: {num_prompts_per_step: 5}\npolicy: {backend: hf, max_total_sequence_length: 4096}\n"
    )
    assert load_config("own.yaml").run.algorithm.num_prompts_per_step == 5
    assert load_config(["grpo.yaml", "grpo_direct_vllm.yaml"]).run.algorithm.num_prompts_per_step == 5


def test_a_command_without_a_config_says_what_is_missing(rlcore):
    code, _, err = rlcore("validate")
    assert code == 2
    assert "Invalid value for CONFIG: give a YAML file, or --config FILE." in err


DIGITS = {
    "policy.model_name": MODEL,
    "data.train_data_path": "train.jsonl",
    "data.prompt.prompt_config": "digits.yaml",
    "cluster.backend": "in_process",
}
SHORT_GRPO = {
    "policy.max_total_sequence_length": 16,
    "policy.generation.max_new_tokens": 5,
    "grpo.num_prompts_per_step": 4,
    "grpo.max_num_steps": 1,
}


def added(keys):
    return [f"++{key}={value}" for key, value in keys.items()]


def test_start_grpo_trains_with_the_printed_command(folder, rlcore):
    (folder / "digits.yaml").write_text('user: "{problem}"\n')
    code, out, err = rlcore("start_grpo", "--config", "configs/grpo.yaml", *added(DIGITS | SHORT_GRPO))
    assert code == 0, err
    assert "1 step done" in out
    assert (folder / "runs" / "grpo" / "metrics.jsonl").is_file()


def test_start_grpo_trains_with_a_grpo_file_as_the_only_file(folder, rlcore):
    (folder / "grpo.yaml").write_text("grpo: {num_prompts_per_step: 5}\n")  # of another run, and not the packaged one
    (folder / "digits.yaml").write_text('user: "{problem}"\n')
    in_process = {"policy.generation.backend": "hf", "env.math.num_workers": 1}
    (folder / "direct.yaml").write_text(re.sub(r"\n    vllm_cfg:(\n      .*)*", "", DIRECT.replace("path/to/model", MODEL)))
    code, out, err = rlcore("start_grpo", "--config", "direct.yaml", *added(DIGITS | SHORT_GRPO | in_process))
    assert code == 0, err
    assert "1 step done" in out


def test_start_sft_trains_with_the_printed_command(folder, rlcore):
    (folder / "digits.yaml").write_text('user: "{problem}"\n')
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"problem": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(10, 14))
    )
    short = {"policy.max_total_sequence_length": 16, "sft.global_batch_size": 4, "sft.max_num_steps": 1}
    code, out, err = rlcore(
        "start_sft", "--config", "configs/sft.yaml", *added(DIGITS | short), "++data.train.response_key=answer"
    )
    assert code == 0, err
    assert "1 step done" in out


def test_a_file_without_an_algorithm_is_an_error_that_names_the_packaged_configs(folder, rlcore):
    code, _, err = rlcore("validate", "grpo_direct_vllm.yaml")
    assert code == 2
    assert "The config has no algorithm section" in err
    assert "--config grpo.yaml" in err


MY_ENVIRONMENT = """
from typing import Any, TypedDict
import ray
import torch
from rl_core.data import BatchedDataDict
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn


class MyEnvConfig(TypedDict):
    num_workers: int


class MyEnvironmentMetadata(TypedDict):
    expected_answer: str
    # Add other fields as needed


@ray.remote(max_restarts=-1, max_task_retries=-1)
class MyEnvironment(EnvironmentInterface):
    def __init__(self, cfg: MyEnvConfig):
        self.cfg = cfg
        # Initialize workers for parallel reward computation

    def shutdown(self) -> None:
        # Cleanup workers
        pass

    def step(
        self,
        message_log_batch: list[list[dict[str, str]]],
        metadata: list[MyEnvironmentMetadata],
    ) -> EnvironmentReturn:
        # Extract assistant responses
        responses = []
        for conversation in message_log_batch:
            assistant_msgs = [m["content"] for m in conversation if m["role"] == "assistant"]
            responses.append("".join(assistant_msgs))

        # Compute rewards
        rewards = self._compute_rewards(responses, metadata)

        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "feedback"} for _ in responses],
            metadata=metadata,
            next_stop_strings=[None] * len(responses),
            rewards=torch.tensor(rewards),
            terminateds=torch.ones(len(rewards)),
            answers=responses,
        )

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        # Compute and return metrics
        metrics = {
            "accuracy": batch["rewards"].mean().item(),
        }
        return batch, metrics

    def _compute_rewards(self, responses, metadata):
        return [float(len(response)) for response in responses]
"""
"""The environment of the reference, with our import paths, and the one method that it leaves to its reader."""
MY_TASK = """
env:
  my_task:
    env_cls: my_environment.MyEnvironment
    num_workers: 8
"""


OVER_RAY = pytest.mark.full("starts Ray; the same environment is found next to the config in one process in CI")


@pytest.mark.parametrize("cluster", ["in_process", pytest.param("ray", marks=[OVER_RAY, pytest.mark.ray])])
def test_the_documented_environment_trains_by_its_path_next_to_the_config(folder, rlcore, cluster, monkeypatch):
    (folder / "my_environment.py").write_text(MY_ENVIRONMENT)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    (folder / "my_task.yaml").write_text(MY_TASK)
    (folder / "digits.yaml").write_text('user: "{problem}"\n')
    given = {
        "policy.model_name": MODEL,
        "data.train_data_path": folder / "train.jsonl",
        "data.prompt.prompt_config": folder / "digits.yaml",
        **SHORT_GRPO,
        "cluster.backend": cluster,
        "env.my_task.num_workers": 1,
        "logger.run_name": "run",
    }
    code, _, err = rlcore("train", "--config", "grpo.yaml", "--config", "../my_task.yaml", *added(given))
    assert code == 0, err
    [step] = [row for row in read_jsonl(folder / "elsewhere" / "runs" / "run" / "metrics.jsonl") if "loss" in row]
    assert 0.0 < step["reward/mean"] <= 5.0
    assert step["env/my_task/accuracy"] == pytest.approx(step["reward/mean"])
