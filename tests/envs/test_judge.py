"""The judge against a real server on the loopback interface."""

import pickle

import pytest
from loopback_judge import reply, serving

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError, DataError, RLCoreError
from rl_core.http import HttpError
from rl_envs.judge.environment import JudgeEnvironment
from rl_train.rollouts.environment_checks import step_checked


def judge(url, answers, rows=None, **config):
    """The checked result and the metrics of the scored rows."""
    environment = JudgeEnvironment({"model": "big", "base_url": url, **config})
    logs = [
        [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": answer}]
        for answer in answers
    ]
    try:
        made = step_checked(environment, "judge", logs, rows or [{"expected_answer": "4"} for _ in answers])
        scored = [info for info, is_scored in zip(made.metadata, made.scored, strict=True) if is_scored]
        metrics = environment.global_post_process_and_metrics(BatchedDataDict({"extra_env_info": scored}))[1] if scored else {}
    finally:
        environment.shutdown()
        environment.shutdown()
    return made, metrics


def by_answer(scores):
    """A judge that replies by the answer in the prompt."""

    def answer(body, number):
        prompt = body["messages"][-1]["content"]
        return reply(
            next(text for key, text in scores.items() if f"grade:\n{key}" in prompt), prompt_tokens=10, completion_tokens=4
        )

    return answer


def test_scores_are_read_from_the_replies_and_mapped_to_rewards():
    replies = {
        "four": "It is right.\nScore: 10",
        "5": "score: 3, no: **Score:** 2.5/10",
        "six": "I refuse.",
        "seven": "Score: 11",
        "eight": "",
    }
    with serving(by_answer(replies)) as (url, script):
        made, metrics = judge(
            url, list(replies), correct_above=0.5, input_price=2.0, output_price=5.0, system_prompt="Be fair."
        )
    assert made.rewards.tolist() == [1.0, 0.25, 0.0, 0.0, 0.0]
    assert made.scored.tolist() == [True, True, False, False, False]
    assert made.metadata[1]["judge"] == {
        "reply": replies["5"],
        "score": 2.5,
        "input_tokens": 10,
        "output_tokens": 4,
        "retries": 0,
    }
    assert metrics == {
        "score_mean": 6.25,
        "input_tokens": 20,
        "output_tokens": 8,
        "retries": 0,
        "cost": pytest.approx((2 * 20 + 5 * 8) / 1e6),
        "accuracy": 0.5,
    }
    path, _, body = script.requests[0]
    assert (path, body["model"], body["temperature"], body["max_tokens"]) == ("/v1/chat/completions", "big", 0.0, 1024)
    assert body["messages"][0] == {"role": "system", "content": "Be fair."}
    assert "Correct answer:\n4\n" in body["messages"][1]["content"]
    assert "from 0 (worst) to 10 (best)" in body["messages"][1]["content"]


def test_a_reply_that_was_cut_is_not_scored_because_its_number_may_be_cut():
    def answer(body, number):
        status, headers, content = reply("Almost perfect.\nScore: 1")
        content["choices"][0]["finish_reason"] = "length" if "grade:\ncut" in body["messages"][-1]["content"] else "stop"
        return status, headers, content

    with serving(answer) as (url, _):
        made, _ = judge(url, ["cut", "whole"])
    assert (made.scored.tolist(), made.rewards.tolist()) == ([False, True], [0.0, pytest.approx(0.1)])


def test_braces_in_an_answer_are_not_replaced_and_rows_without_a_reference_have_none():
    with serving(lambda body, number: reply("Score: 1")) as (url, script):
        made, _ = judge(url, ["{reference} {question} {0}"], [None], min_score=-1, max_score=1, extra_body={"seed": 3})
        judge(url, ["a"], prompt="Q {question} A {answer} R {reference} {{}}")
    assert made.rewards.tolist() == [1.0]
    prompt = script.requests[0][2]["messages"][0]["content"]
    assert "{reference} {question} {0}" in prompt
    assert "Correct answer" not in prompt
    assert script.requests[0][2]["seed"] == 3
    assert script.requests[1][2]["messages"][0]["content"] == "Q 2+2? A a R 4 {{}}"


def test_a_temporary_failure_is_retried_and_then_leaves_the_row_unscored():
    def answer(body, number):
        return (
            (503, {"Retry-After": "0.01"}, "busy")
            if "grade:\nbad" in str(body["messages"][0]["content"])
            else reply("Score: 5")
        )

    with serving(answer) as (url, script):
        made, metrics = judge(url, ["good", "bad"], max_retries=1, deadline_s=20)
    assert made.scored.tolist() == [True, False]
    assert made.metadata[1]["judge"]["reply"] is None
    assert len(script.requests) == 3
    assert metrics["score_mean"] == 5.0


def test_a_server_that_refuses_or_always_fails_is_an_error_without_the_key():
    refusing = serving(lambda body, number: (401, {}, "wrong key my-secret-key"))
    with refusing as (url, _), pytest.raises(HttpError, match="status 401: wrong key") as caught:
        judge(url, ["a"], api_key="my-secret-key")
    assert "my-secret-key" not in str(caught.value)
    with serving(lambda body, number: (503, {}, "busy")) as (url, _), pytest.raises(HttpError, match="status 503"):
        judge(url, ["a", "b", "c"], max_retries=0, max_failures=3)


def test_a_server_of_another_kind_is_named():
    for body in ({"answer": "Score: 1"}, [], {"choices": []}):
        with serving(lambda request, number, body=body: (200, {}, body)) as (url, _), pytest.raises(RLCoreError) as caught:
            judge(url, ["a"])
        assert "needs a server with OpenAI's chat completions" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"prompt": "{answer} {reply}"}, r"placeholder \{reply\}"),
        ({"prompt": "{question}"}, r"has no \{answer\}"),
        ({"score_pattern": "("}, "not a regular expression"),
        ({"score_pattern": r"\d+"}, "has 0 groups"),
        ({"min_score": 10}, "must be below max_score"),
        ({"base_url": "judge"}, "is not an HTTP URL"),
    ],
)
def test_wrong_settings_are_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        JudgeEnvironment({"model": "big", "base_url": "http://127.0.0.1:9/v1", **config})


def test_a_prompt_with_a_reference_needs_rows_with_an_expected_answer():
    with pytest.raises(DataError, match="a row has no `expected_answer`"):
        judge("http://127.0.0.1:9/v1", ["a"], [{}], prompt="{answer} {reference}")


def test_the_key_is_not_shown_with_the_config():
    from rl_envs.judge.config import JudgeEnvironmentConfig

    config = JudgeEnvironmentConfig(model="m", base_url="http://h", api_key="my-secret-key")
    assert "my-secret-key" not in repr(config)
    assert pickle.loads(pickle.dumps(config)).api_key == "my-secret-key"
