"""`rlcore train` with an agent: the endpoint comes from the installed plugin, and the records have what the agent sampled."""

from e2e_runs import ROOT

from rl_train.metrics.jsonl import read_jsonl


def test_an_agent_trains_through_its_openai_client(train_here, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    changes = {
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 2, "val_period": 0},
        "policy": {"train_global_batch_size": 8},
        "env": {"arithmetic": None, "sums": {"agent": "examples.agents.adder:add"}},
        "cluster": {"backend": "in_process"},
        "checkpointing": {"enabled": False, "save_period": None, "keep_latest_k": None},
    }
    code, output = train_here(changes)
    assert code == 0, output
    [folder] = (tmp_path / "runs").glob("*")
    records = read_jsonl(folder / "rollouts" / "step_000002.jsonl")
    assert len(records) == 16
    for record in records:
        assert record["scored"], record["failure"]
        assert record["turn_versions"] == [2, 2]
        assert len(record["segments"]) == 2
        assert record["reward"] == float(record["completion"] == 2 * record["expected_answer"])
    metrics = read_jsonl(folder / "metrics.jsonl")
    assert [step["num_optimizer_steps"] for step in metrics if "loss" in step] == [2, 2]
