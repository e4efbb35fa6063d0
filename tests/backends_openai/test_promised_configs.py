"""The configs of the page on NeMo RL train as printed: only paths and ports are replaced, and the rest are overrides."""

import json
import re
from pathlib import Path

import pytest
from openai_servers import ADMIN, updatable
from readable_model import make_readable_model

from rl_train.metrics.jsonl import read_jsonl

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "nemo_rl_names.md").read_text()
[DIRECT, PROXY, WEATHER, WEIGHT_UPDATES] = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
SHORT = (
    "++grpo.num_prompts_per_step=2",
    "++grpo.num_generations_per_prompt=2",
    "++grpo.max_num_steps=2",
    "++policy.max_total_sequence_length=1024",
    "++policy.generation.max_new_tokens=8",
    "++logger.run_name=run",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_readable_model(tmp_path_factory.mktemp("model"), chat_template=CHAT)


@pytest.fixture
def folder(tmp_path, model, monkeypatch):
    """A working directory with the configs of the page and their data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLCORE_SERVE_ADMIN_KEY", ADMIN)
    (tmp_path / "updates").mkdir()
    files = {
        "grpo_direct_vllm.yaml": DIRECT,
        "grpo_with_nemo_skills_proxy.yaml": PROXY,
        "grpo_weather.yaml": WEATHER,
        "weight_updates.yaml": WEIGHT_UPDATES,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("path/to/model", model))
    problems = [{"problem": f"What is {a} + {a}?", "expected_answer": str(2 * a)} for a in range(10, 14)]
    days = [{"question": "Observations: a clear sky.", "expected_answer": "sunny"}] * 4
    for prefix, rows in (("", problems), ("weather_", days)):
        for part in ("train", "val"):
            (tmp_path / f"{prefix}{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def steps_of(folder):
    """The metrics of the steps, after checks that hold for every run."""
    steps = [row for row in read_jsonl(folder / "runs" / "run" / "metrics.jsonl") if "loss" in row]
    assert [row["refit/weight_version"] for row in steps] == [0.0, 1.0]
    for row in steps:
        assert row["refit/canary_error"] < 1e-3
        assert row["rollout/rows"] == 4.0
        assert row["mismatch/max"] < 1e-3
    return steps


WITH_SERVER = pytest.mark.parametrize(
    ("file", "task", "overrides", "prompt"),
    [
        ("grpo_with_nemo_skills_proxy.yaml", "math", ("++policy.generation.top_p=1.0",), "Solve the following math problem."),
        ("grpo_weather.yaml", "weather", (), "Predict the weather from the observations below."),
    ],
)


@pytest.fixture
def trained_with_server(folder, model, rlcore):
    """Trains with a config over `grpo.yaml` and a server that receives the weights; returns the rollouts of the second step."""

    def train(file, *overrides):
        with updatable(folder / "updates", model=model, name="nemo-skills", api_keys=()) as (url, _):
            port = f"++policy.generation.openai_cfg.base_url={url}/v1"
            layers = ("--config", "grpo.yaml", "--config", file, "weight_updates.yaml")
            code, output = rlcore("train", *layers, *SHORT, *overrides, port, folder=folder)
        assert code == 0, output
        steps_of(folder)
        return read_jsonl(folder / "runs" / "run" / "rollouts" / "step_000002.jsonl")

    return train


@pytest.mark.slow
@WITH_SERVER
def test_the_configs_with_a_server_train_in_one_process(trained_with_server, file, task, overrides, prompt):
    records = trained_with_server(file, *overrides, "++cluster.backend=in_process", f"++env.{task}.num_workers=1")
    assert [record["weight_version"] for record in records] == [1] * 4
    assert all(record["messages"][0]["content"].startswith(prompt) for record in records)


@WITH_SERVER
@pytest.mark.full("starts eight environment workers, as printed; the same configs train in one process in CI")
@pytest.mark.usefixtures("local_ray")
def test_the_configs_with_a_server_train_over_ray(trained_with_server, file, task, overrides, prompt):
    records = trained_with_server(file, *overrides)
    assert [record["weight_version"] for record in records] == [1] * 4


@pytest.mark.full("starts vLLM and eight environment workers over Ray; runs on vLLM are in e2e/test_vllm_runs.py")
@pytest.mark.vllm
@pytest.mark.usefixtures("local_ray")
def test_the_direct_vllm_config_trains(folder, rlcore):
    code, output = rlcore("train", "--config", "grpo.yaml", "grpo_direct_vllm.yaml", *SHORT, folder=folder)
    assert code == 0, output
    steps_of(folder)
