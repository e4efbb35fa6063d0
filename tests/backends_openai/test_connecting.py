"""What a server must return, and how a config is checked."""

import logging

import pytest
from openai_servers import KEY, complete, section
from pydantic import ValidationError
from starlette.responses import JSONResponse

from rl_core.errors import ConfigError

TRAINING = {"weight_updates": "vllm", "refit_folder": "/tmp"}


@pytest.mark.parametrize(
    ("answer", "keys", "message"),
    [
        (lambda body: {**complete(body), "token_ids": None}, TRAINING, r"no `token_ids`.*return_token_ids"),
        (lambda body: {**complete(body), "logprobs": None}, TRAINING, r"no log-probability for each token.*--logprobs-mode"),
        (
            lambda body: {**complete(body), "logprobs": {"token_logprobs": [-0.7, -0.1]}},
            TRAINING,
            "with top_k 1, the token has -0.700 nats.*--logprobs-mode processed_logprobs",
        ),
        (complete, {"model": "other"}, "has no model 'other'. It has: m."),
        (
            lambda body: JSONResponse({"error": "Scale-out endpoints are disabled"}, 403),
            {"api": "inference"},
            "--enable-scale-out",
        ),
    ],
    ids=["no token ids", "no log-probabilities", "raw log-probabilities", "no such model", "no endpoint"],
)
def test_a_server_that_lacks_something_is_refused_and_the_flag_is_named(script, answer, keys, message):
    _, connect = script(answer)
    with pytest.raises(ConfigError, match=message):
        connect(**keys)


def test_a_server_that_only_returns_text_is_accepted_for_evaluation(script):
    server, connect = script(lambda body: {"text": "4", "finish_reason": "stop"}, models=None)
    assert connect().facts["max_model_len"] == 32
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"base_url": "localhost:7000"}, "base_url is not an HTTP URL"),
        ({"base_url": "http://user:pw@host/v1"}, "must not have a password"),
        ({"weight_updates": "vllm"}, "refit_folder is required"),
        ({"weight_updates": "rlcore", "refit_folder": "/tmp"}, "admin_key is required"),
        ({**TRAINING, "api": "chat"}, "requires token ids"),
        ({"extra_body": {"seed": 1}}, "extra_body cannot set seed"),
        ({"num_workers": 2}, "num_workers has no effect"),
    ],
)
def test_a_wrong_setting_is_refused(keys, message):
    with pytest.raises(ValidationError, match=message) as caught:
        section("http://127.0.0.1:1", model="m", **keys)
    assert KEY not in str(caught.value)


def test_weight_updates_travel_by_disk_and_determine_whose_weights_they_are():
    updated = section("http://127.0.0.1:1", model="m", **TRAINING)
    assert (updated.refit_transport, updated.has_own_weights) == ("disk", False)
    own = section("http://127.0.0.1:1", model="m")
    assert (own.refit_transport, own.has_own_weights) == (None, True)


def test_a_key_must_come_from_the_environment(monkeypatch):
    found = section("http://127.0.0.1:1", model="m", admin_key="EMPTY")
    assert [(path, KEY in reason) for path, reason in found.conflicts(None)] == [(("openai_cfg", "api_key"), False)]
    monkeypatch.setenv("A_KEY", KEY)
    assert not list(found.conflicts(None))


def test_no_key_is_logged_while_connecting(script, caplog):
    with caplog.at_level(logging.DEBUG):
        script()[1]()
    assert KEY not in caplog.text
