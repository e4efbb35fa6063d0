"""`rlcore serve` as a process, with the official client; and what it refuses to start."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import openai
import pytest
import torch
import yaml
from command_line import rlcore
from starlette.testclient import TestClient

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_serve.chat_service import open_chat_service
from rl_serve.engine import EngineThread
from rl_serve.sampling import Limits
from rl_serve.served_model import started_model
from rl_serve.serving import create_app
from rl_serve.settings import ChatSettings
from rl_train.launch.train import train

MODEL = Path(__file__).parents[2] / "examples/addition/model"
SERVE = [sys.executable, "-m", "rlcore_cli.main", "serve"]


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


@pytest.fixture
def start(tmp_path):
    """Starts `rlcore serve`, which logs to `log.txt`, and returns the process and the base URL."""
    running = []
    log = (tmp_path / "log.txt").open("w")

    def run(*arguments, **variables):
        command = [*SERVE, *map(str, arguments), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(**variables))
        running.append(server)
        line = server.stdout.readline()
        found = re.fullmatch(r"serving (\S+) on (http://127\.0\.0\.1:\d+/v1)\n", line)
        assert found, line
        return server, found[2]

    yield run
    for server in running:
        server.kill()
        server.wait()
        server.stdout.close()
    log.close()


@pytest.mark.slow
def test_the_official_client_gets_chats_completions_streams_models_and_errors(start, tmp_path):
    server, url = start(MODEL, "--backend", "hf", "policy.generation.max_new_tokens=16", RLCORE_SERVE_API_KEYS="sk-secret")
    client = openai.OpenAI(base_url=url, api_key="sk-secret", max_retries=0)
    assert [model.id for model in client.models.list()] == ["model"]
    assert client.models.retrieve("model").streams_tokens is True
    question = [{"role": "user", "content": "12+34="}]
    answer = client.chat.completions.create(model="model", messages=question, temperature=0, logprobs=True)
    assert answer.choices[0].message.content == "46"
    assert [entry.token for entry in answer.choices[0].logprobs.content][:2] == ["4", "6"]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    stream = client.chat.completions.create(model="model", messages=question, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in stream) == "46"
    completion = client.completions.create(model="model", prompt="12+34=", temperature=0, n=2)
    assert [choice.text for choice in completion.choices] == ["46", "46"]
    with pytest.raises(openai.BadRequestError, match="This model does not support tools"):
        client.chat.completions.create(
            model="model", messages=question, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with pytest.raises(openai.NotFoundError, match="There is no model 'other'"):
        client.completions.create(model="other", prompt="1")
    with pytest.raises(openai.AuthenticationError, match="A valid API key is required") as refused:
        client.with_options(api_key="sk-guess").models.list()
    with socket.create_connection(("127.0.0.1", int(re.search(r":(\d+)/", url)[1])), timeout=60) as broken:
        broken.sendall(b"no HTTP\r\nAuthorization: Bearer sk-secret\r\n\r\n")
        answer = broken.recv(65536)
        assert answer.startswith(b"HTTP/1.1 400")
    log = (tmp_path / "log.txt").read_text()
    assert "Invalid HTTP request received." in log
    assert "sk-" not in f"{refused.value.response.text} {answer} {log}"

    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 143
    with pytest.raises(ConnectionRefusedError), socket.socket() as probe:
        probe.connect(("127.0.0.1", int(re.search(r":(\d+)/", url)[1])))


@pytest.mark.slow
def test_a_server_of_a_model_in_one_process_does_not_import_ray(start, tmp_path):
    _, url = start(MODEL, "--backend", "hf", "policy.generation.max_new_tokens=16", PYTHONPROFILEIMPORTTIME="1")
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    assert client.completions.create(model="model", prompt="12+34=", temperature=0).choices[0].text == "46"
    imported = {line.rpartition("|")[2].strip() for line in (tmp_path / "log.txt").read_text().splitlines()}
    assert "torch" in imported
    assert "ray" not in imported


@pytest.mark.slow
def test_a_run_is_served_with_the_weights_of_its_checkpoint(tmp_path):
    config = {
        "defaults": str(MODEL.parents[1] / "grpo_addition.yaml"),
        "grpo": {"max_num_steps": 1, "num_prompts_per_step": 16, "num_generations_per_prompt": 4, "val_at_end": False},
        "cluster": {"backend": "in_process", "workers_per_node": 1},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    run = train(tmp_path / "config.yaml", [f"logger.log_dir={tmp_path / 'runs'}"], console=False).folder

    def logprobs(target, backend):
        with started_model(str(target), backend=backend) as model:
            batch = BatchedDataDict({"input_ids": torch.tensor([[4, 5, 13, 6, 7, 16]]), "input_lengths": torch.tensor([6])})
            return model.name, model.generation.generate(batch, greedy=True)["logprobs"]

    name, served = logprobs(run, None)
    assert name == "config"
    assert torch.equal(served, logprobs(run / "checkpoints/step_000001/policy/weights", "hf")[1])
    # The answer is graded as in the run, whose environment expects a number without a box.
    with started_model(str(run), backend=None) as model, open_chat_service(ChatSettings(), of_run=True) as service:
        service.use_tasks(model.tasks)
        thread = EngineThread(model.generation)
        with TestClient(create_app(model, thread, limits=Limits(), service=service)) as client:
            asked = {"question": "11+22=", "expected_answer": "33", "temperature": 0}
            found = client.post("/generate", json=asked).json()
        thread.close()
    assert (found["generation"], found["predicted_answer"], found["is_correct"]) == ("33", "33", True)
    # Otherwise the test would pass with the weights from before the step.
    assert not torch.equal(served, logprobs(MODEL, "hf")[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (MODEL,),
            "error: --backend is required, because it selects the generation plugin and several are installed: hf, openai, "
            "vllm.",
        ),
        (
            (MODEL, "--backend", "hf", "--host", "0.0.0.0"),
            "error: --host 0.0.0.0 is reachable from other machines, so API keys are required. Set RLCORE_SERVE_API_KEYS, or "
            "listen on 127.0.0.1.",
        ),
        (
            (MODEL, "--backend", "hf", "grpo.seed=1"),
            "error: override #1 `grpo.seed=1`: a model has no grpo.seed. Only keys of "
            "policy.generation and policy.tokenizer can be set.",
        ),
        (
            (MODEL, "--backend", "hf", "policy.generation.temprature=1"),
            "error: rlcore serve: policy.generation.temprature: policy.generation has no key 'temprature'. "
            "Did you mean 'temperature'?",
        ),
        (
            (MODEL, "--backend", "hf", "--best"),
            f"error: --best chooses among the checkpoints of a run, but {MODEL} is a model.",
        ),
    ],
)
def test_a_wrong_command_line_ends_with_exit_code_2_and_the_reason(arguments, message, monkeypatch, capsys):
    from rlcore_cli.main import main

    monkeypatch.delenv("RLCORE_SERVE_API_KEYS", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # otherwise the command sets it permanently
    monkeypatch.setattr(sys, "argv", ["rlcore", "serve", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(message)


def test_a_port_in_use_is_an_error_that_names_it(monkeypatch, capsys):
    from rlcore_cli.main import main

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
        monkeypatch.setattr(sys, "argv", ["rlcore", "serve", str(MODEL), "--backend", "hf", "--port", str(port)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"error: --host 127.0.0.1 --port {port} cannot be used: Address already in use. Choose another port.\n"
    )


@pytest.mark.slow
def test_sigterm_before_the_server_runs_shuts_down_what_has_been_started():
    program = """
import contextlib, signal
from rl_serve.edge import exit_on_sigterm
with exit_on_sigterm(), contextlib.ExitStack() as exits:
    exits.callback(print, "shut down", flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("still running")
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (finished.returncode, finished.stdout, finished.stderr) == (143, "shut down\n", "")


@pytest.mark.slow
def test_sigterm_that_python_loses_in_a_finalizer_still_shuts_down():
    program = """
import contextlib, signal, time
from rl_serve.edge import exit_on_sigterm
class Stopped:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
with exit_on_sigterm(), contextlib.ExitStack() as exits:
    exits.callback(print, "shut down", flush=True)
    lost = Stopped()
    del lost
    time.sleep(60)
    print("still running")
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (finished.returncode, finished.stdout, finished.stderr) == (143, "shut down\n", "")


def test_sigterm_while_a_model_loads_is_reported_in_one_line():
    program = f"""
import logging, signal
from rl_serve import served_model
from rl_serve.edge import exit_on_sigterm
def load(*arguments, **limits):
    arguments[-1].callback(logging.warning, "did not shut down by itself")
    signal.raise_signal(signal.SIGTERM)
served_model._of_model = load
with exit_on_sigterm(), served_model.started_model({str(MODEL)!r}, backend="hf"):
    print("loaded")
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (finished.returncode, finished.stdout, finished.stderr) == (143, "", "stopped while loading model\n")


def test_a_signal_that_follows_the_address_at_once_ends_the_server():
    program = """
import builtins, signal
from rl_serve.edge import Address, listening, run_server
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job of a script
builtins.print = lambda *_, **__: signal.raise_signal(signal.SIGINT)
address = Address(host="127.0.0.1", port=0, api_keys=())
with listening(address) as listener:
    run_server(None, listener, address, name="model")
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("chat",)])
def test_a_path_that_does_not_exist_is_reported_before_a_backend_is_required(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    name, *options = command
    for missing in ("./nope", "runs/nope", str(tmp_path / "nope")):
        result = rlcore(name, missing, *options)
        assert result.returncode == 2
        assert f"{missing!r} does not exist" in result.stderr
