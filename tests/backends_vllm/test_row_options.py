"""Options of single rows: alternatives to the sampled tokens, and JSON schemas. `tests/serve` has them over HTTP."""

import asyncio

import pytest
import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError, NotSupportedError, WorkerError

pytestmark = pytest.mark.vllm


def rows(*options):
    return BatchedDataDict(
        {
            "input_ids": torch.tensor([[5, 6, 7]] * len(options)),
            "input_lengths": torch.tensor([3] * len(options)),
            "sample_seeds": torch.arange(len(options)),
            "max_new_tokens": torch.tensor([4] * len(options)),
            "sampling": list(options),
        }
    )


@pytest.fixture(params=["in this process", "in another process"], scope="module")
def engine(request, engines):
    """All tests of one kind run before those of the other, because an engine in another process starts slowly."""
    return engines(max_new_tokens=8, async_engine=request.param == "in another process")


def test_a_row_has_the_most_likely_tokens_if_it_asks_for_them(engine, plain):
    output = engine.generate(rows({"top_logprobs": 3}, None, {"top_logprobs": 1}))
    assert [top and [len(position) for position in top] for top in output["top_logprobs"]] == [[3] * 4, None, [1] * 4]
    with torch.no_grad():
        logits = plain(output["output_ids"][:1, :7]).logits[0, 2:6]
    expected = logits.log_softmax(-1).topk(3)
    assert [[token for token, _ in position] for position in output["top_logprobs"][0]] == expected.indices.tolist()
    found = torch.tensor([[logprob for _, logprob in position] for position in output["top_logprobs"][0]])
    torch.testing.assert_close(found, expected.values, rtol=0, atol=1e-4)  # two float32 implementations
    assert engine.generate(rows(None))["top_logprobs"] == [None]
    without = rows(None)
    del without["sampling"]
    assert "top_logprobs" not in engine.generate(without)


def test_stop_tokens_of_a_row_end_only_that_row(engine):
    free = engine.generate(rows(None, None))
    stop = int(free["output_ids"][0, 4])
    ended = engine.generate(rows({"stop_token_ids": [stop]}, {"stop_token_ids": None}))
    assert ended["generation_lengths"].tolist() == [free["output_ids"][0, 3:].tolist().index(stop) + 1, 4]
    assert ended["truncated"].tolist() == [False, True]


@pytest.mark.parametrize(
    ("schema", "reason"), [({"type": "nonsense"}, "nonsense"), ({"type": "object"}, "the tokenizer cannot write JSON")]
)
def test_a_schema_that_cannot_be_used_is_an_error_of_its_row(engine, schema, reason):
    with pytest.raises(WorkerError, match=f"DataError: vLLM .*{reason}"):
        engine.generate(rows(None, {"json_schema": schema}))
    assert len(engine.generate(rows(None))["output_ids"]) == 1


@pytest.mark.slow
def test_a_schema_that_cannot_be_used_leaves_the_rows_of_other_requests(engines):
    engine = engines(max_new_tokens=8)

    async def sample():
        other = engine.generate_async(rows(None))
        with pytest.raises(DataError, match="nonsense"):
            async for _ in engine.generate_async(rows({"json_schema": {"type": "nonsense"}})):
                pass
        return [row async for row, _ in other]

    assert asyncio.run(sample()) == [0]


def test_unknown_options_are_refused(engines):
    with pytest.raises(
        NotSupportedError,
        match=r"does not support min_p .*Supported: json_schema, prompt_logprobs, stop_token_ids, top_logprobs\.",
    ):
        engines(max_new_tokens=8).generate(rows({"min_p": 0.1}))
    with pytest.raises(NotSupportedError, match="samples all rows at one temperature"):
        engines(max_new_tokens=8).generate(rows({"temperature": 0.1}))


def test_a_row_has_the_log_probabilities_of_its_prompt_if_it_asks_for_them(engine, plain):
    output = engine.generate(rows({"prompt_logprobs": 2}, None, {"prompt_logprobs": 0}))
    assert [scores and [len(position) for position in scores] for scores in output["prompt_logprobs"]] == [
        [0, 3, 3],
        None,
        [0, 1, 1],
    ]
    with torch.no_grad():
        expected = plain(torch.tensor([[5, 6, 7]])).logits[0, :2].log_softmax(-1)
    top = expected.topk(2)
    for at, (own, *likely) in enumerate(output["prompt_logprobs"][0][1:]):
        assert (own[0], [token for token, _ in likely]) == (6 + at, top.indices[at].tolist())
        found = torch.tensor([own[1], *(logprob for _, logprob in likely)])
        exact = torch.cat([expected[at, 6 + at].reshape(1), top.values[at]])
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-4)  # two float32 implementations
