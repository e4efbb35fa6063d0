"""A run served over Ray with the Transformers engine: streams, and a replica that exits, with and without a policy."""

from pathlib import Path

import pytest
import torch
import yaml
from killed_processes import kill
from readable_model import make_readable_model
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient

from rl_serve.engine import EngineThread
from rl_serve.sampling import Limits
from rl_serve.served_model import started_model
from rl_serve.serving import create_app
from rl_train.launch.train import train

pytestmark = [
    pytest.mark.full(
        "trains and starts workers over Ray; test_dead_replicas.py and backends_base/dispatch have restarts of replicas"
    ),
    pytest.mark.usefixtures("local_ray"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"
CHAT = "{% for message in messages %}question {{ message['content'] }}{% endfor %}"
"""The vocabulary has no digits, so that a prompt of digits alone would be empty."""
LONG = 1500
"""Tokens of a streamed answer. No machine samples them within one poll, which takes 50 ms."""
GREEDY = {"prompt": "some words to begin", "temperature": 0, "max_tokens": 30, "logprobs": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one step whose model folder has other weights than its checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    model = make_readable_model(folder / "model", chat_template=CHAT)
    config = {
        "defaults": str(EXAMPLES / "grpo_addition.yaml"),
        "grpo": {"max_num_steps": 1, "num_prompts_per_step": 2, "num_generations_per_prompt": 2, "val_at_end": False},
        "policy": {"model_name": model, "max_total_sequence_length": 64, "generation": {"max_new_tokens": 4}},
        "cluster": {"backend": "in_process", "workers_per_node": 1},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    found = train(folder / "config.yaml", [f"logger.log_dir={folder / 'runs'}"], console=False).folder
    weights = folder / "model" / "model.safetensors"
    torch.manual_seed(1)
    changed = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in load_file(weights).items()}
    save_file(changed, weights, metadata={"format": "pt"})
    return found, model


@pytest.fixture(scope="module")
def served(run):
    """A client of the served run, and its engine."""
    overrides = [
        "cluster.backend=ray",
        "policy.max_total_sequence_length=2048",
        f"policy.generation.max_new_tokens={LONG}",
        "policy.generation.max_restarts=2",
    ]
    with started_model(str(run[0]), backend=None, overrides=overrides, name="run") as model:
        thread = EngineThread(model.generation)
        try:
            with TestClient(create_app(model, thread, limits=Limits())) as client:
                yield client, model.generation
        finally:
            thread.close()


def answered(client):
    response = client.post("/v1/completions", json=GREEDY)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def test_tokens_are_streamed_over_ray(served):
    client, _ = served
    assert client.get("/v1/models").json()["data"][0]["streams_tokens"] is True
    asked = {"prompt": ["first words", "other words"], "seed": 5, "max_tokens": LONG, "return_token_ids": True}
    whole = client.post("/v1/completions", json=asked).json()["choices"]
    response = client.post("/v1/completions", json={**asked, "stream": True})
    *events, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert done == "[DONE]"
    choices = [choice for event in events for choice in yaml.safe_load(event)["choices"]]
    for expected in whole:
        found = [choice for choice in choices if choice["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in found) == expected["text"]
        assert [token for choice in found for token in choice["token_ids"]] == expected["token_ids"]
        assert len(found) > 2
        assert (found[0]["finish_reason"], found[-1]["finish_reason"]) == (None, expected["finish_reason"])


def test_a_restarted_replica_answers_with_the_weights_of_the_checkpoint(served, run):
    from transformers import LlamaForCausalLM

    client, engine = served
    [before] = answered(client)
    prompt = torch.tensor([before["prompt_token_ids"]])
    with torch.no_grad():
        first = LlamaForCausalLM.from_pretrained(run[1])(prompt).logits[0, -1].log_softmax(-1)
    assert abs(float(first[before["token_ids"][0]]) - before["logprobs"]["token_logprobs"][0]) > 0.1, "the same weights"

    kill(engine.group.pids()[0])
    [after] = answered(client)
    assert engine.restarts == 1
    assert (after["token_ids"], after["weight_version"]) == (before["token_ids"], 0)
    assert after["logprobs"]["token_logprobs"] == pytest.approx(before["logprobs"]["token_logprobs"], abs=1e-5)
    assert client.get("/health").json() == {"status": "ok", "model": "run"}


def test_a_replica_that_cannot_receive_the_weights_again_is_not_restarted(served):
    client, engine = served
    kill(engine.weight_owner._policy.group.pids()[0])
    answered(client)  # the policy is not needed to sample
    kill(engine.group.pids()[0])
    for _ in range(2):
        assert client.post("/v1/completions", json=GREEDY).status_code == 503
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "engine failed")
    reason = health.json()["reason"]
    assert reason.startswith("1 of 1 generation replicas exited, and restarting them failed: rank 0 (data=0) of 'policy'")
    assert engine.restarts == 1, "counted, but not restarted"
