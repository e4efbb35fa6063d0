"""The HTTP client against a real server: retries, pauses, deadlines, concurrency, and no secrets in errors."""

import asyncio
import logging
import sys
import time

import pytest
from loopback_judge import serving, until

from rl_core.errors import ConfigError
from rl_core.event_loop import EventLoopThread
from rl_core.http import HttpClient, HttpError, RequestLimits

SECRET = "sk-a-very-secret-key"


def post(url, *, count=1, sleep=None, headers=None, **limits):
    """The results or errors of requests at the same time, and the client."""
    pauses = []

    async def wait(seconds):
        pauses.append(seconds)
        await (sleep or asyncio.sleep)(0)

    async def run():
        client = HttpClient(base_url=url, api_key=SECRET, headers=headers or {}, limits=RequestLimits(**limits), sleep=wait)
        found = await asyncio.gather(*(client.post_json("x", {"n": n}) for n in range(count)), return_exceptions=True)
        await client.close()
        return found, client, pauses

    return asyncio.run(run())


def test_a_request_is_sent_as_json_with_the_key_and_further_headers():
    with serving(lambda body, number: (200, {}, {"got": body})) as (url, script):
        [found], client, _ = post(url + "/", headers={"X-Team": "blue"})
    assert (found.status, found.body, found.attempts) == (200, {"got": {"n": 0}}, 1)
    path, headers, _ = script.requests[0]
    assert (path, headers["Authorization"], headers["X-Team"]) == ("/v1/x", f"Bearer {SECRET}", "blue")
    assert len(script.requests) == 1
    assert SECRET not in repr(client)


@pytest.mark.parametrize("character", ["\n", "\r\nX-Other: 1", "\u2026", "\x00", " "])
def test_a_key_or_header_that_cannot_be_sent_is_refused_without_showing_it(character):
    with pytest.raises(ConfigError, match="The API key has a control character") as error:
        HttpClient(base_url="http://localhost/v1", api_key=SECRET + character)
    with pytest.raises(ConfigError, match="The value of the header 'X-Token'") as other:
        HttpClient(base_url="http://localhost/v1", headers={"X-Token": SECRET + character})
    assert not any(SECRET in repr(each.value) or each.value.__cause__ for each in (error, other))


def test_temporary_failures_are_retried_with_growing_pauses():
    with serving(lambda body, number: (503, {}, "busy") if number < 4 else (200, {}, {})) as (url, script):
        [found], _, pauses = post(url, backoff_s=1.0, max_backoff_s=2.0)
    assert (found.attempts, len(script.requests)) == (4, 4)
    assert [0.5 * longest <= pause <= longest for pause, longest in zip(pauses, (1.0, 2.0, 2.0), strict=True)] == [True] * 3


def test_the_pause_that_a_server_requests_is_kept_and_ends_the_request_if_it_is_too_long():
    with serving(lambda body, number: (429, {"Retry-After": "7"}, "") if number == 1 else (200, {}, {})) as (url, _):
        [found], _, pauses = post(url)
    assert (found.attempts, pauses) == (2, [7.0])
    with serving(lambda body, number: (429, {"Retry-After": "7"}, "slow down")) as (url, script):
        [error], _, pauses = post(url, deadline_s=5.0)
    assert (pauses, len(script.requests)) == ([], 1)
    assert (error.status, error.is_temporary) == (429, True)
    assert "status 429: slow down" in str(error)


def test_retries_end_with_an_error_that_names_the_attempts_and_the_last_reason():
    with serving(lambda body, number: (500, {}, f"failure {number}")) as (url, _):
        [error], _, _ = post(url, max_retries=2)
    assert isinstance(error, HttpError)
    assert f"POST {url}/x failed after 3 attempts in " in str(error)
    assert "status 500: failure 3" in str(error)


def test_a_conflict_is_refused_unless_the_server_asks_to_wait():
    with serving(lambda body, number: (409, {}, "the shapes differ")) as (url, script):
        [error], _, pauses = post(url)
    assert (len(script.requests), pauses, error.status, error.is_temporary) == (1, [], 409, False)
    with serving(lambda body, number: (409, {"Retry-After": "3"}, "locked") if number == 1 else (200, {}, {})) as (url, script):
        [found], _, pauses = post(url)
    assert (len(script.requests), pauses, found.attempts) == (2, [3.0], 2)


def test_a_refused_request_is_not_repeated_and_its_error_has_no_secret():
    def refuse(body, number):
        return 401, {}, f"wrong key {SECRET} of team blue-team-token" + "x" * 280 + SECRET

    with serving(refuse) as (url, script):
        [error], _, _ = post(url, headers={"X-Team": "blue-team-token"})
    assert len(script.requests) == 1
    assert (error.status, error.is_temporary) == (401, False)
    assert "wrong key [secret] of team [secret]" in str(error)
    assert "sk-a-very" not in str(error)


def test_a_response_that_is_not_json_is_an_error_without_retries():
    with serving(lambda body, number: (200, {}, "<html>")) as (url, script):
        [error], _, _ = post(url)
    assert "a response that is not JSON: <html>" in str(error)
    assert len(script.requests) == 1


def test_an_attempt_without_a_response_times_out_and_is_retried():
    holder = {}

    def answer(body, number):
        if number == 1:
            holder["script"].stopping.wait(20)
        return 200, {}, {}

    with serving(answer) as (url, holder["script"]):
        started = time.monotonic()
        [found], _, _ = post(url, timeout_s=0.3)
    assert found.status == 200
    assert found.attempts >= 2  # on a busy machine, a later attempt may take too long as well
    assert time.monotonic() - started >= 0.3


def test_a_server_that_does_not_exist_is_a_temporary_failure():
    with serving(lambda body, number: (200, {}, {})) as (url, _):
        pass
    [error], _, _ = post(url, max_retries=1)
    assert (error.status, error.is_temporary) == (None, True)
    assert "ConnectError" in str(error)


def test_at_most_as_many_requests_run_as_the_limit_allows():
    holder = {}

    def slow(body, number):
        script = holder["script"]
        # Each request waits until three run at the same time, or all have been received.
        until(lambda: script.now >= 3 or len(script.requests) >= 9)
        return 200, {}, {}

    with serving(slow) as (url, script):
        holder["script"] = script
        found, _, _ = post(url, count=9, concurrency=3)
    assert [each.status for each in found] == [200] * 9
    assert script.most_at_once == 3


def test_urls_with_secrets_and_urls_of_other_kinds_are_refused_without_showing_them():
    for url in ("http://user:hidden@host/v1", "http://host/v1?key=hidden", "ftp://hidden", "hidden:8000"):
        with pytest.raises(ConfigError, match="`base_url`") as caught:
            HttpClient(base_url=url)
        assert "hidden" not in str(caught.value)


def test_without_httpx_the_error_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ConfigError, match=r"pip install 'rl-core\[http\]'"):
        HttpClient(base_url="http://host")


def test_logs_have_no_secrets(caplog):
    with serving(lambda body, number: (503, {}, SECRET) if number == 1 else (200, {}, {})) as (url, _), caplog.at_level(0):
        post(url)
    assert "next attempt in" in caplog.text
    assert SECRET not in caplog.text
    assert logging.getLogger("rl_core.http").level == logging.NOTSET


def test_a_loop_thread_runs_coroutines_until_it_is_closed():
    thread = EventLoopThread("test")
    assert thread.run(asyncio.sleep(0, "done")) == "done"
    assert [future.result() for future in [thread.start(asyncio.sleep(0, n)) for n in range(3)]] == [0, 1, 2]
    thread.close()
    thread.close()
