"""Sampling from a server: the tokens of its engine, failures of single rows, and what is sent."""

import asyncio
import logging

import pytest
import torch
from openai_servers import KEY, complete, engine_of, prompts
from starlette.responses import JSONResponse

from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import DataError, NotSupportedError, RLCoreError
from rl_core.http import HttpError

SUMS = ([4, 5, 13, 6, 7, 16], [5, 13, 6, 16])


@pytest.mark.parametrize("api", ["completions", "inference"])
def test_a_server_returns_the_tokens_and_log_probabilities_of_its_engine(served, api):
    url, engine = served
    batch = prompts(*SUMS)
    with engine_of(url, model="addition", api=api, max_new_tokens=16) as remote:
        found = remote.generate(batch, greedy=True)
        again = remote.generate(batch)
        assert torch.equal(again["output_ids"], remote.generate(batch)["output_ids"])
        assert remote.facts["max_model_len"] == 32
    expected = engine.generate(batch, greedy=True)
    for key in ("output_ids", "generation_lengths", "unpadded_sequence_lengths", "truncated", "weight_version"):
        assert torch.equal(found[key], expected[key]), key
    torch.testing.assert_close(found["logprobs"], expected["logprobs"], atol=1e-5, rtol=0)
    assert "failures" not in found
    assert remote.has_own_weights


def test_rows_are_yielded_one_by_one_and_cancelled_with_their_iterator(served):
    url, _ = served
    with engine_of(url, model="addition") as remote:
        assert remote.streams_rows

        async def run():
            rows = {}
            async for row, output in remote.generate_async(prompts(*SUMS), greedy=True):
                rows[row] = output["output_ids"][0].tolist()
            closed = remote.generate_async(prompts(*SUMS))
            await anext(closed)
            await closed.aclose()
            return rows

        rows = asyncio.run(run())
        whole = remote.generate(prompts(*SUMS), greedy=True)
    lengths = whole["unpadded_sequence_lengths"].tolist()
    assert rows == {row: whole["output_ids"][row, : lengths[row]].tolist() for row in (0, 1)}


def test_the_rows_that_have_ended_are_counted_while_others_are_sampled(script):
    async def last(body):
        while body["prompt"] == [9] and engine.batch_progress() != (2, 4):
            await asyncio.sleep(0.01)
        return complete(body)

    _, connect = script(last)
    engine = connect()
    engine.generate(prompts([5, 6], [9], [7]))
    assert engine.batch_progress() == (3, 6)


def test_a_row_whose_request_fails_has_a_reason_and_the_others_are_returned(script, caplog):
    _, connect = script(lambda body: JSONResponse({}, 503) if body["prompt"] == [9, 9] else complete(body))
    engine = connect(max_retries=1)
    with caplog.at_level(logging.WARNING):
        found = engine.generate(prompts([5, 6], [9, 9], [7]))
    assert found["generation_lengths"].tolist() == [2, 0, 2]
    assert [failure is None for failure in found["failures"]] == [True, False, True]
    assert "failed after 2 attempts" in found["failures"][1]
    assert "status 503" in found["failures"][1]
    assert found["unpadded_sequence_lengths"].tolist() == [4, 2, 3]
    with pytest.raises(HttpError, match="status 503"):
        engine.generate(prompts([9, 9]))
    assert KEY not in caplog.text + repr(engine.config)

    async def alone():
        return [output["failures"] async for _, output in engine.generate_async(prompts([9, 9]))]

    [[reason]] = asyncio.run(alone())
    assert "status 503" in reason


def test_texts_of_prompts_that_could_not_be_sampled_are_not_empty_strings_but_an_error(script):
    _, connect = script(lambda body: JSONResponse({}, 503) if body["prompt"] == [4] else complete(body))
    engine = connect()
    assert engine.generate_text(["1+1=", "2+2="]) == ["1", "1"]
    with pytest.raises(RLCoreError, match=r"1 of 2 prompts .* prompts\[1\]: .*status 503.*`failures`"):
        engine.generate_text(["1+1=", "1"])


def test_a_rejected_request_ends_the_call_without_the_key_in_the_error(script):
    _, connect = script(
        lambda body: JSONResponse({"error": f"bad, Bearer {KEY}"}, 400) if body["prompt"] == [9] else complete(body)
    )
    with pytest.raises(HttpError, match=r"status 400.*\[secret\]") as caught:
        connect().generate(prompts([5], [9]))
    assert KEY not in str(caught.value)


def test_a_completion_that_the_server_aborted_is_a_failed_row(script):
    _, connect = script(lambda body: {**complete(body), "finish_reason": "abort" if body["prompt"] == [9] else "stop"})
    found = connect().generate(prompts([5], [9]))
    assert "ended the completion with 'abort'" in found["failures"][1]


def test_sampling_parameters_are_sent_and_extra_fields_replace_or_remove_others(script):
    server, connect = script()
    engine = connect(
        temperature=0.7, top_p=0.9, top_k=5, stop_strings=["x"], extra_body={"max_tokens": None, "max_completion_tokens": 4}
    )
    engine.generate(prompts([5], stop_strings=[["y"]]))
    _, body = server.requests[-1]
    assert body == {
        "model": "m",
        "prompt": [5],
        "logprobs": 0,
        "return_token_ids": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 0,
        "stop": ["x", "y"],
        "max_completion_tokens": 4,
    }
    engine.generate(prompts([5]), greedy=True)
    assert {"temperature": 0.0}.items() <= server.requests[-1][1].items()
    assert not {"top_p", "top_k"} & server.requests[-1][1].keys()


def test_a_chat_server_renders_the_messages_and_its_text_becomes_tokens(script):
    server, connect = script(lambda body: {"message": {"content": "46"}, "finish_reason": "stop"})
    engine = connect(api="chat")
    conversation = [{"role": "user", "content": "12+34="}]
    found = engine.generate(prompts([4, 5], messages=[conversation]))
    assert server.requests[-1][0] == "/v1/chat/completions"
    assert server.requests[-1][1]["messages"] == conversation
    tokenizer = load_tokenizer(engine.config.model_name)
    sampled = found["output_ids"][0, 2:].tolist()
    assert sampled == [*tokenizer("46", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert not found["logprobs"].any()
    assert engine.reads_messages
    with pytest.raises(DataError, match="needs `messages` for each row"):
        engine.generate(prompts([4, 5]))


def test_an_engine_without_weight_updates_refuses_a_refit(script):
    _, connect = script()
    with pytest.raises(NotSupportedError, match="keeps its own weights"):
        connect().prepare_refit_info({})


def test_an_engine_that_was_shut_down_says_so(script):
    _, connect = script()
    engine = connect()
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(NotSupportedError, match="was shut down"):
        engine.generate(prompts([5]))
