"""What engines and policies return is checked: errors name the class, its distribution, the row and the promise."""

import asyncio
import re
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rl_backends_hf.generation import HFGenerationWorker, HuggingFaceGeneration
from rl_backends_hf.policy import HuggingFacePolicy
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import RLCoreError
from rl_core.interfaces import GenerationInterface
from rl_core.testing.outputs.models import checked_generation, generated, right_row, scored
from rl_train.metrics.progress import RolloutCounts
from rl_train.rollouts.engines import BatchSampler, RowSampler, TurnRequest

MODEL = str(Path(__file__).parents[3] / "examples/addition/model")
LENGTHS = [4, 2, 3]


@pytest.fixture(scope="module")
def engine():
    engine = HuggingFaceGeneration(MODEL, max_new_tokens=6)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def policy():
    policy = HuggingFacePolicy(MODEL)
    yield policy
    policy.shutdown()


@pytest.fixture
def data():
    rows = [torch.tensor([3, 4, 5, 6])[:length] + row for row, length in enumerate(LENGTHS)]
    return BatchedDataDict(
        {
            "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            "input_lengths": torch.tensor(LENGTHS),
            "sample_seeds": torch.arange(3),
        }
    )


def changed(**columns):
    """Replaces or removes columns of an output."""

    def change(output):
        replaced = {key: value(output) for key, value in columns.items()}
        return {key: value for key, value in {**output, **replaced}.items() if value is not None}

    return change


def at(key, row, position, value):
    """Sets one entry of a column."""

    def change(output):
        column = output[key].clone()
        column[row, position] = value
        return {**output, key: column}

    return change


def rows(order):
    return lambda output: {key: column[torch.tensor(order)] for key, column in output.items()}


WRONG = {
    "versions of other tokens": (changed(token_versions=lambda found: found["token_versions"][:, 1:]), "`token_versions` "),
    "a version of a prompt": (
        changed(token_versions=lambda found: found["token_versions"] + 1),
        "whose `weight_version` is -1",
    ),
    "a missing column": (changed(truncated=lambda _: None), "returned no column `truncated`"),
    "no batch": (lambda output: list(output.values()), "returned list instead of a BatchedDataDict"),
    "a list": (changed(truncated=lambda o: o["truncated"].tolist()), "returned `truncated` as list.*bool"),
    "int32 tokens": (changed(output_ids=lambda o: o["output_ids"].int()), r"`output_ids` as a tensor .* int32"),
    "float64": (changed(logprobs=lambda o: o["logprobs"].double()), r"`logprobs` as a tensor .* float64.* \[B, T\] float32"),
    "another number of axes": (
        changed(weight_version=lambda o: o["weight_version"][:, None]),
        r"`weight_version` as a tensor \[3, 1\]",
    ),
    "a dropped row": (rows([0, 1]), "returned 2 rows of .* for a call with 3 rows"),
    "swapped rows": (rows([0, 2, 1]), "row 1 without its own prompt at the beginning: it begins with the prompt of row 2"),
    "completions without prompts": (
        changed(output_ids=lambda o: o["output_ids"].roll(-4, 1)),
        "row 0 without its own prompt at the beginning. `output_ids` must contain prompt and completion",
    ),
    "narrow log-probabilities": (changed(logprobs=lambda o: o["logprobs"][:, :-1]), "Their shapes must be equal"),
    "wrong lengths": (
        changed(generation_lengths=lambda o: o["generation_lengths"] + 1),
        "`generation_lengths` .* row|row 0 with",
    ),
    "a row beyond its limit": (None, "sampled 6 tokens in row 0, more than its limit .* of 5"),
    "no completion": (
        changed(
            generation_lengths=lambda o: o["generation_lengths"] * 0, unpadded_sequence_lengths=lambda _: torch.tensor(LENGTHS)
        ),
        "returned no token in row 0",
    ),
    "NaN": (at("logprobs", 1, 2, float("nan")), "log-probability of nan for token 0 of the completion of row 1"),
    "minus infinity": (at("logprobs", 1, 2, -float("inf")), "log-probability of -inf for token 0 of the completion of row 1"),
    "probabilities": (changed(logprobs=lambda o: o["logprobs"].exp()), "outside of the completion of row 0"),
    "a positive log-probability": (at("logprobs", 2, 3, 0.7), "0.7 for token 0 of the completion of row 2"),
    "log-probabilities of the prompt": (at("logprobs", 2, 1, -0.7), "-0.7 outside of the completion of row 2. It must be 0.0"),
    "a negative token id": (at("output_ids", 0, 4, -1), "returned the token id -1 in row 0"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_broken_promise_of_an_engine_is_named_with_class_distribution_and_row(engine, data, wrong):
    change, words = WRONG[wrong]
    if change is None:
        data["max_new_tokens"] = torch.tensor([6, 6, 6])
        output = engine.generate(data)
        data["max_new_tokens"] = output["generation_lengths"] - torch.tensor([1, 0, 0])
        words = words.replace("6 tokens", f"{int(output['generation_lengths'][0])} tokens").rpartition(" of ")[0]
    else:
        output = change(engine.generate(data))
    with pytest.raises(RLCoreError, match=words) as caught:
        checked_generation(output, data=data, generation=engine)
    assert re.search(
        r"^HuggingFaceGeneration\.generate .*rl_backends_hf\.generation\.HuggingFaceGeneration \(rl-backends-hf [\d.]+\), "
        r"with the workers rl_backends_hf\.generation\.HFGenerationWorker \(rl-backends-hf ",
        str(caught.value),
    )


def test_a_right_output_passes_unchanged_also_with_a_mask_of_the_prompts_and_rows_that_failed(engine, data):
    assert generated(engine, data, greedy=False)["logprobs"].equal(engine.generate(data)["logprobs"])
    mask = (torch.arange(4) < data["input_lengths"].unsqueeze(1)).long()
    generated(engine, BatchedDataDict({"input_ids": data["input_ids"], "attention_mask": mask}), greedy=True)
    output = engine.generate(data)
    output["logprobs"][1, 2] = float("nan")
    checked_generation({**output, "failures": [None, "no answer", None]}, data=data, generation=engine)


def test_the_joined_outputs_of_several_replicas_pass(engine, data):
    data["max_new_tokens"] = torch.tensor([1, 6, 6])
    replicas = [engine.generate(data.slice(row, row + 1)) for row in range(3)]
    assert len({output["output_ids"].shape[1] for output in replicas}) > 1  # so joining pads
    checked_generation(BatchedDataDict.from_batches(replicas), data=data, generation=engine)


def refused_rows(output, data, engine):
    """The rows that are refused if each is the output of a call by itself."""
    refused = []
    for row in range(len(LENGTHS)):
        one = BatchedDataDict({key: column[row : row + 1] for key, column in output.items()})
        request = data.slice(row, row + 1)
        is_right = right_row(one, request, engine) is not None
        try:
            assert checked_generation(one, data=request, generation=engine) is one
        except RLCoreError:
            assert not is_right
            refused.append(row)
        else:
            assert is_right
    return refused


@pytest.mark.parametrize("wrong", [name for name in WRONG if WRONG[name][0] and name not in ("no batch", "a dropped row")])
def test_a_wrong_row_by_itself_is_refused_and_a_right_one_is_not(engine, data, wrong):
    output = engine.generate(data)
    assert refused_rows(output, data, engine) == []
    refused = refused_rows(WRONG[wrong][0](output), data, engine)
    in_one_row = re.search(r"\brow (\d)", WRONG[wrong][1])
    assert refused
    assert in_one_row is None or int(in_one_row[1]) in refused


def test_a_right_row_has_the_values_of_its_columns_exactly(engine, data):
    output = engine.generate(data)
    for row, start in enumerate(LENGTHS):
        one = BatchedDataDict({key: column[row : row + 1] for key, column in output.items()})
        read = right_row(one, data.slice(row, row + 1), engine)
        end = int(output["unpadded_sequence_lengths"][row])
        assert read.token_ids == output["output_ids"][row, start:end].tolist()
        assert torch.tensor(read.logprobs).equal(output["logprobs"][row, start:end])
        assert (read.truncated, read.weight_version) == (bool(output["truncated"][row]), int(output["weight_version"][row]))
        assert read.token_versions is None  # all tokens have the version of the row
        if end - start > 1:
            one["token_versions"][0, end - 1] += 1
            read = right_row(one, data.slice(row, row + 1), engine)
            assert read.token_versions == one["token_versions"][0, start:end].tolist()


def test_outputs_of_several_rows_and_wide_rows_are_left_to_the_check_of_batches(engine, data):
    output = engine.generate(data)
    assert right_row(output, data, engine) is None
    wide = torch.nn.functional.pad
    one = BatchedDataDict({key: column[:1] for key, column in output.items()})
    for key in ("output_ids", "logprobs", "token_versions"):
        one[key] = wide(one[key], (0, 600))
    assert right_row(one, data.slice(0, 1), engine) is None
    checked_generation(one, data=data.slice(0, 1), generation=engine)


def test_a_single_row_beyond_its_limit_is_refused(engine, data):
    output = engine.generate(data)
    data["max_new_tokens"] = output["generation_lengths"] - torch.tensor([0, 1, 0])
    assert refused_rows(output, data, engine) == [1]


def test_a_streamed_row_is_checked_as_a_batch_is(engine):
    class Echoes(GenerationInterface):
        """Written from scratch; reports probabilities instead of their logarithms."""

        generate = prepare_for_generation = finish_generation = None

        async def generate_async(self, data, greedy=False):
            async for row, output in engine.generate_async(data, greedy):
                output["logprobs"] = output["logprobs"].exp()
                yield row, output

    request = TurnRequest(token_ids=torch.tensor([3, 4]), stop_strings=None, seed=1, prompt_id=0, position=0, messages=[])
    sampler = RowSampler(Echoes(), greedy=False, pad_token_id=0)
    with pytest.raises(
        RLCoreError, match=r"log-probability of 1 outside of the completion of row 0.*Echoes \(.*test_generation_output"
    ):
        asyncio.run(sampler.sample(request))


class CountsReadEntries(TorchFunctionMode):
    """Counts the entries of tensors that become Python numbers."""

    entries = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.tolist, torch.Tensor.item):
            self.entries += args[0].numel()
        return function(*args, **(kwargs or {}))


def test_a_call_reads_a_number_of_entries_that_grows_linearly_with_its_rows(engine):
    async def sample(rows):
        sampler = BatchSampler(Repeats(), rollouts=rows, greedy=True, pad_token_id=0, counts=RolloutCounts(), one_turn=True)
        requests = [
            TurnRequest(token_ids=torch.tensor([3]), stop_strings=None, seed=0, prompt_id=0, position=row, messages=[])
            for row in range(rows)
        ]
        return await asyncio.gather(*map(sampler.sample, requests))

    class Repeats(GenerationInterface):
        """Samples one row and repeats it."""

        prepare_for_generation = finish_generation = None

        def generate(self, data, greedy=False):
            return engine.generate(data.slice(0, 1), greedy).select_indices([0] * data.size)

    entries = {}
    for rows in (32, 256):
        with CountsReadEntries() as counted:
            turns = asyncio.run(sample(rows))
        assert len({tuple(turn.token_ids.tolist()) for turn in turns}) == 1
        entries[rows] = counted.entries
    assert 0 < entries[256] <= 8 * entries[32]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda output: output.slice(0, output.size - 1), "returned 2 rows of `weight_version` for a call with 3 rows"),
        (lambda output: BatchedDataDict({"output_ids": output["output_ids"]}), "returned no column `weight_version`"),
    ],
    ids=["dropped row", "missing column"],
)
def test_a_worker_that_drops_rows_or_columns_is_named(data, monkeypatch, change, words):
    generate = HFGenerationWorker.generate
    monkeypatch.setattr(HFGenerationWorker, "generate", lambda self, data, **options: change(generate(self, data, **options)))
    with pytest.raises(RLCoreError, match=words):
        HuggingFaceGeneration(MODEL, max_new_tokens=2).generate(data)


WRONG_SCORES = {
    "a missing column": (lambda scores: {}, "returned no column `logprobs`: it returned an empty batch"),
    "a shorter row axis": (lambda scores: {"logprobs": scores["logprobs"][:, 1:]}, r"\[3, 3\] for `input_ids` \[3, 4\]"),
    "bfloat16": (lambda scores: {"logprobs": scores["logprobs"].bfloat16()}, "bfloat16 on cpu. It must be .* float32"),
    "NaN": (at("logprobs", 1, 1, float("nan")), "returned nan at position 1 in `logprobs` of row 1, which has 2 tokens"),
    "probabilities": (lambda scores: {"logprobs": scores["logprobs"].exp()}, "returned 1 at position 0 in `logprobs` of row 0"),
}


@pytest.mark.parametrize("wrong", WRONG_SCORES)
def test_a_broken_promise_of_a_policy_is_named(policy, data, monkeypatch, wrong):
    change, words = WRONG_SCORES[wrong]
    scores = policy.get_logprobs(data)
    monkeypatch.setattr(type(policy), "get_logprobs", _returning(BatchedDataDict(change(scores))))
    with pytest.raises(RLCoreError, match=rf"^HuggingFacePolicy\.get_logprobs .*{words}.*rl-backends-hf"):
        scored(policy.get_logprobs, data)


def _returning(value):
    def get_logprobs(self, data):
        return value

    return get_logprobs


def test_right_scores_of_every_kind_pass(policy, data):
    assert scored(policy.get_logprobs, data)["logprobs"].shape == (3, 4)
    assert scored(policy.get_topk_logprobs, data, 3)["topk_logprobs"].shape == (3, 4, 3)
