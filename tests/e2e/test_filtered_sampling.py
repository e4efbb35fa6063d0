"""Runs that sample with top-p, top-k and min-p: engine and policy agree to rounding, and a resumed run repeats them."""

import json

import pytest
from e2e_runs import metrics_of, without_speed

from rl_train.rollouts.records import load_groups

FILTERED = {"generation": {"top_p": 0.9, "top_k": 20, "min_p": 0.05}}
IN_PROCESS = {"cluster": {"backend": "in_process"}}


def check_agreement(folder, steps):
    metrics = metrics_of(folder)
    assert sorted(metrics) == [*range(1, steps + 1)]
    for step in metrics.values():
        # float32 on both sides, in another order; ignoring the sets changes the mean by more than 0.01.
        assert step["agreement/mean"] < 2e-6
        assert step["agreement/worst_row"] < 2e-5
    return metrics


def test_grpo_trains_with_top_p_top_k_and_min_p(train_here, tmp_path):
    code, output = train_here({"policy": FILTERED, "grpo": {"max_num_steps": 2}, **IN_PROCESS})
    assert code == 0, output
    metrics = check_agreement(tmp_path, 2)
    # The second optimizer step of a batch trains other weights than those that scored it.
    assert all(abs(step["ratio/mean"] - 1) < 0.05 for step in metrics.values())
    assert all(step["mismatch/max"] < 1e-4 for step in metrics.values())


def test_recorded_rollouts_are_not_replayed_with_filters(train_here, tmp_path):
    (tmp_path / "recorded" / "rollouts").mkdir(parents=True)
    (tmp_path / "recorded" / "rollouts" / "step_000001.jsonl").write_text("{}\n")
    code, output = train_here({"policy": FILTERED, **IN_PROCESS}, "--replay", str(tmp_path / "recorded"))
    assert code == 2
    assert "--replay: recorded rollouts do not have the tokens that top_p, top_k and min_p kept" in output


VARIANTS = {
    "adapters": {"policy": {**FILTERED, "hf_cfg": {"lora": {"rank": 4}}}, **IN_PROCESS},
    "a reference policy and scores before the step": {
        "policy": {**FILTERED, "train_global_batch_size": 4},
        "loss_fn": {"reference_policy_kl_penalty": 0.05},
        **IN_PROCESS,
    },
    "packed rows": {
        "policy": {**FILTERED, "sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}},
        **IN_PROCESS,
    },
    "two ranks": {"policy": FILTERED, "cluster": {"workers_per_node": 2}},
    "shards": {"policy": {**FILTERED, "hf_cfg": {"data_parallel": "fsdp2"}}, "cluster": {"workers_per_node": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_engine_and_policy_agree_in_every_kind_of_run(train, tmp_path, variant):
    run = train({**VARIANTS[variant], "grpo": {"max_num_steps": 3}})
    code, output = run.wait()
    assert code == 0, output
    check_agreement(tmp_path, 3)


@pytest.mark.slow
def test_an_asynchronous_run_with_several_turns_saves_the_sets_of_finished_groups(train, tmp_path, slow_turns):
    changes = slow_turns(4)
    changes["policy"]["generation"] |= FILTERED["generation"]
    run = train({**changes, "rollout": {"max_staleness": 1}, "checkpointing": {"save_period": 1}})
    code, output = run.wait()
    assert code == 0, output
    for step in metrics_of(tmp_path).values():
        assert step.get("agreement/mean", 0.0) < 2e-6
    saved = [json.loads(path.read_text()) for path in tmp_path.rglob("groups.json")]
    groups = [group for each in tmp_path.rglob("groups.json") for group in load_groups(each.parent, saved[0]["limits"])]
    messages = [message for group in groups for row in group.rows for message in row.sampled_messages]
    assert messages
    assert all(len(message["sampled_sets"]["counts"]) == len(message["token_ids"]) for message in messages)


@pytest.mark.slow
def test_a_resumed_run_repeats_filtered_samples(train, tmp_path):
    changes = {"policy": FILTERED, **IN_PROCESS}
    whole = train(changes, folder=tmp_path / "whole")
    code, output = whole.wait()
    assert code == 0, output
    for last in (2, 6):
        part = train({**changes, "grpo": {"max_num_steps": last}}, folder=tmp_path / "parts")
        code, output = part.wait()
        assert code == 0, output
    expected, found = (without_speed([metrics_of(tmp_path / name)[step] for step in (3, 6)]) for name in ("whole", "parts"))
    assert found == expected
