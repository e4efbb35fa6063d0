"""Engines that define only their model: without a cache, with keys and values of each row, and with a recurrent state."""

import asyncio
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, DynamicCache

from rl_backends_base import DistributedGeneration, TokenwiseWorker
from rl_backends_base.config import TokenwiseConfig
from rl_core.backend import BatchedDataDict, GenerationRequest
from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.errors import DataError, NonFiniteError, WorkerError
from rl_core.testing import GenerationConformance, reference
from rl_core.testing.reference import ReferenceSender

CAPABILITIES = (
    *("in_process", "top_p", "top_k", "top_logprobs", "async_rows", "refit_in_flight", "held_weight_digests"),
    *("by_reference", "shared_memory", "disk", "collective"),
)


class EngineOf(DistributedGeneration):
    """An engine of `Worker`."""

    capabilities = CAPABILITIES

    def __init__(self, *, config, cluster=None, deadlines=None):
        super().__init__(worker_class=self.Worker, config=config, cluster=cluster, deadlines=deadlines)


class Plain(EngineOf):
    """Computes every token of a row again for each new one."""

    class Worker(TokenwiseWorker):
        def build(self):
            return AutoModelForCausalLM.from_pretrained(self.config.model_name, dtype=torch.float32)

        def facts(self):
            config = self.model.config
            return {"vocab_size": config.vocab_size, "max_model_len": config.max_position_embeddings}

        def prefill(self, rows):
            ids = pad_sequence([torch.tensor(row.sequence) for row in rows], batch_first=True)
            return self.model(ids).logits[torch.arange(len(rows)), torch.tensor([row.num_tokens - 1 for row in rows])]


class Cached(EngineOf):
    """Keeps keys and values of each row."""

    class Worker(Plain.Worker):
        max_batch_rows = 7

        def prefill(self, rows):
            for row in rows:
                row.state = DynamicCache()
            return torch.cat([self.computed(row, row.sequence) for row in rows])

        def decode(self, rows):
            return torch.cat([self.computed(row, row.tokens[-1:]) for row in rows])

        def computed(self, row, tokens):
            return self.model(torch.tensor([tokens]), past_key_values=row.state, use_cache=True).logits[:, -1]


class TestPlain(GenerationConformance):
    component = f"{__name__}.Plain"


class TestCached(GenerationConformance):
    component = f"{__name__}.Cached"


class Recurrence(nn.Module):
    """A language model that Transformers does not have; its state [N, 24] is all that it keeps of a row."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(reference.VOCABULARY, 24)
        self.cell = nn.GRUCell(24, 24)
        self.head = nn.Linear(24, reference.VOCABULARY)

    def forward(self, tokens, states):
        states = self.cell(self.embedding(tokens), states)
        return self.head(states), states

    def logits(self, tokens):
        """[T, V] after each token, from the first on."""
        state, logits = torch.zeros(1, 24), []
        for token in tokens:
            after, state = self(torch.tensor([token]), state)
            logits.append(after)
        return torch.cat(logits), state


class Recurrent(EngineOf):
    """Keeps the state of each row."""

    class Worker(TokenwiseWorker):
        def build(self):
            model = Recurrence()
            model.load_state_dict(load_file(f"{self.config.model_name}/recurrence.safetensors"))
            return model

        def facts(self):
            return {"vocab_size": reference.VOCABULARY, "max_model_len": 1000}

        def prefill(self, rows):
            return torch.cat([self.started(row) for row in rows])

        def started(self, row):
            logits, row.state = self.model.logits(row.sequence)
            return logits[-1:]

        def decode(self, rows):
            tokens = torch.tensor([row.tokens[-1] for row in rows])
            logits, states = self.model(tokens, torch.cat([row.state for row in rows]))
            for row, state in zip(rows, states.split(1), strict=True):
                row.state = state
            return logits


TEMPERATURE, LIMIT = 0.8, 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    reference.Llama().save(folder, reference.Llama().make_weights())
    save_file(make_weights(), folder / "recurrence.safetensors")
    return folder


def make_weights():
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in Recurrence().state_dict().items()}
    return {name: 0.6 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def start(folder):
    with ExitStack() as exits:

        def started(**fields):
            settings = {
                "backend": "x",
                "model_name": str(folder),
                "temperature": TEMPERATURE,
                "max_new_tokens": LIMIT,
                **fields,
            }
            engine = Recurrent(config=GenerationConfig(**settings))
            exits.callback(engine.shutdown)
            return engine

        yield started


@pytest.fixture
def engine(start):
    return start()


def rows_of(*prompts, **columns):
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    seeds = torch.arange(len(prompts)) * 31 + 8
    return BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([*map(len, prompts)]), sample_seeds=seeds, **columns)


ROWS = rows_of([5, 6, 7], [9], [5, 6, 7], [11, 12], [9], [3, 4, 5, 6, 8, 9])


def row_of(output, row):
    end, count = int(output["unpadded_sequence_lengths"][row]), int(output["generation_lengths"][row])
    return output["output_ids"][row, :end], output["logprobs"][row, end - count : end], end - count


def scores(engine, ids, *, weights=None, temperature=TEMPERATURE):
    """[T, V] log-probabilities after each token, by the whole recurrence from the first token on."""
    model = Recurrence()
    model.load_state_dict(weights or engine.group.worker.model.state_dict())
    with torch.no_grad():
        return torch.log_softmax(model.logits(ids.tolist())[0] / temperature, dim=-1)


async def collected(engine, data, greedy=False):
    """All outputs of each row, in the order in which they came."""
    found = {row: [] for row in range(data.size)}
    async for row, output in engine.generate_async(data, greedy):
        found[row].append(output)
    return found


def rows_in(engine):
    return list(engine.group.worker._sampler._rows.values())


async def wait_for_tokens(engine, count):
    while not (rows := rows_in(engine)) or min(len(row.tokens) for row in rows) < count:
        await asyncio.sleep(0)


def assert_same(found, expected, row):
    for one, other in zip(row_of(found, 0)[:2], row_of(expected, row)[:2], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert found["truncated"][0] == expected["truncated"][row]


def test_an_engine_reports_what_the_base_supports(engine):
    facts = engine.facts
    assert (facts["vocab_size"], facts["max_model_len"], facts["device"]) == (reference.VOCABULARY, 1000, "cpu")
    assert all(facts[name] for name in ("reads_text", "reads_sampling", "streams_tokens"))
    assert "top_logprobs" in facts["row_options"]
    assert facts["num_parameters"] == sum(tensor.numel() for tensor in make_weights().values())


def test_the_section_lowers_the_limit_and_names_the_tokenizer_of_stop_strings(folder, tmp_path):
    reference.byte_tokenizer().save_pretrained(tmp_path)
    policy = PolicyConfig(backend="x", model_name=str(folder), max_total_sequence_length=7, tokenizer={"name": str(tmp_path)})
    section = TokenwiseConfig(backend="x", max_new_tokens=LIMIT).for_policy(policy)
    engine = Recurrent(config=section)
    assert engine.facts["max_model_len"] == 7
    assert int(engine.generate(ROWS)["unpadded_sequence_lengths"].max()) == 7
    assert engine.group.worker.find_tokenizer().name_or_path == str(tmp_path)
    assert engine.tokenizer_section.name == str(tmp_path)
    engine.shutdown()


def test_log_probabilities_are_those_of_the_whole_recurrence(engine):
    output = engine.generate(ROWS)
    for row in range(ROWS.size):
        ids, logprobs, start = row_of(output, row)
        expected = scores(engine, ids)[start - 1 : -1].gather(1, ids[start:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    assert engine.group.worker.batch_progress() == (ROWS.size, int(output["generation_lengths"].sum()))


@pytest.mark.parametrize("most", [1, 4, 256])
def test_rows_that_join_late_and_wait_are_those_of_one_call(engine, monkeypatch, most):
    expected = engine.generate(ROWS)
    monkeypatch.setattr(engine.group.worker, "max_batch_rows", most)

    async def one_after_the_other():
        tasks = []
        for row in range(ROWS.size):
            tasks.append(asyncio.create_task(collected(engine, ROWS.slice(row, row + 1))))
            await asyncio.sleep(0)
            if most > ROWS.size:
                await wait_for_tokens(engine, 1)
        return await asyncio.gather(*tasks)

    for row, found in enumerate(asyncio.run(one_after_the_other())):
        assert_same(found[0][0], expected, row)


def test_memory_of_rows_is_also_updated_without_gradients_when_a_refit_begins_or_rows_are_cancelled(engine, monkeypatch):
    worker, modes = engine.group.worker, []
    monkeypatch.setattr(worker, "keep", lambda rows: modes.append((len(rows), torch.is_inference_mode_enabled())))
    requests = [GenerationRequest(name=str(row), row=ROWS.slice(row, row + 1)) for row in range(3)]
    worker._sampler._loop._end_ids = frozenset()
    worker.poll(requests, wait_s=0.0)
    worker.poll([], cancelled=["1"], wait_s=0.0)
    worker.refit_begins()
    assert modes == [(2, True), (0, True)]


def test_a_refit_in_flight_keeps_tokens_and_continues_with_a_state_of_the_new_weights(start, folder):
    engine, sender = start(), ReferenceSender(make_weights(), folder)
    engine.group.worker._sampler._loop._end_ids = frozenset()  # a row that ends early would not span the refit
    old = dict(sender.weights)
    sender.refit(engine, ("shared_memory",))
    engine.invalidate_kv_cache()

    async def refit_between_tokens():
        task = asyncio.create_task(collected(engine, ROWS))
        await asyncio.sleep(0)
        await wait_for_tokens(engine, 4)
        sender.train(seed=1)
        sender.refit(engine, ("shared_memory",))
        kept = [len(row.tokens) for row in engine.group.worker._sampler._rows.values()]
        await asyncio.sleep(0.03)
        assert kept == [len(row.tokens) for row in engine.group.worker._sampler._rows.values()], (
            "paused until the cache is empty"
        )
        engine.generate(ROWS.slice(0, 2))  # such as the comparison of a refit; does not change rows in flight
        engine.invalidate_kv_cache()
        return await task

    for row, [output] in asyncio.run(refit_between_tokens()).items():
        ids, logprobs, first = row_of(output, 0)
        versions = output["token_versions"][0, first : len(ids)]
        assert versions.unique_consecutive().tolist() == [0, 1]
        for version, weights in enumerate((old, sender.weights)):
            expected = scores(engine, ids, weights=weights)[first - 1 : -1].gather(1, ids[first:, None])[:, 0]
            torch.testing.assert_close(logprobs[versions == version], expected[versions == version], atol=1e-5, rtol=0)
        assert int(ROWS["input_lengths"][row]) == first


def test_stop_strings_and_stop_tokens_of_section_and_rows_end_a_row_and_stay_in_it(start):
    plain = start()
    ids, _, first = row_of(plain.generate(ROWS), 5)
    text = plain.group.worker.find_tokenizer().decode(ids[first + 1 : first + 3])
    assert len(text) == 2
    strings = BatchedDataDict({**ROWS, "stop_strings": [None] * 5 + [[text]]})
    outputs = plain.generate(strings), start(stop_token_ids=[int(ids[first + 2])]).generate(ROWS)
    for output in (*outputs, start(stop_strings=[text]).generate(ROWS)):
        assert row_of(output, 5)[0].tolist() == ids[: first + 3].tolist()
        assert not output["truncated"][5]


def test_top_k_and_options_of_single_rows_shape_the_distribution(start):
    options = [{"top_k": 2, "top_logprobs": 5}, None, {"temperature": 2.0, "top_k": 260}, {"frequency_penalty": 100.0}]
    engine = start(top_k=3)
    output = engine.generate(rows_of([5, 6], [5, 6], [5, 6], [5, 6], sampling=options))
    for row, (kept, temperature) in enumerate([(2, TEMPERATURE), (3, TEMPERATURE), (260, 2.0)]):
        ids, logprobs, first = row_of(output, row)
        whole = scores(engine, ids, temperature=temperature)[first - 1 : -1]
        best = whole.topk(kept, dim=-1)
        assert all(token in allowed for token, allowed in zip(ids[first:].tolist(), best.indices.tolist(), strict=True))
        expected = whole.gather(1, ids[first:, None])[:, 0] - best.values.logsumexp(dim=-1)
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    assert [len(alternatives) for alternatives in output["top_logprobs"][0]] == [2] * int(output["generation_lengths"][0])
    ids, _, first = row_of(output, 3)
    assert len(set(ids[first:].tolist())) == len(ids) - first, "no token is sampled twice"


def test_a_row_that_streams_is_returned_while_it_is_sampled(engine):
    streams = torch.tensor([True, False, False, False, False, True])
    found = asyncio.run(collected(engine, BatchedDataDict({**ROWS, "stream_tokens": streams})))
    expected = engine.generate(ROWS)
    for row, outputs in found.items():
        *parts, last = outputs
        assert bool(parts) == bool(streams[row])
        assert all(bool(part["unfinished"]) for part in parts)
        counts = [int(part["generation_lengths"]) for part in outputs]
        assert counts == sorted(set(counts[:-1])) + counts[-1:]
        assert_same(last, expected, row)


def test_cancelled_rows_and_rows_with_errors_leave_the_others_alone(start, folder):
    engine = start()
    expected = engine.generate(ROWS)
    engine.group.worker.model.embedding.weight.data[200] = float("nan")

    async def together():
        data = [ROWS.slice(0, 1), rows_of([5, 200]), rows_of([9, 260]), ROWS.slice(4, 5), ROWS.slice(5, 6)]
        tasks = [asyncio.create_task(collected(engine, row)) for row in data]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks[3].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    good, bad, outside, cancelled, last = asyncio.run(together())
    assert [type(each) for each in (bad, outside, cancelled)] == [NonFiniteError, DataError, asyncio.CancelledError]
    for row, found in ((0, good), (5, last)):
        assert_same(found[0][0], expected, row)
    assert not rows_in(engine)
    with pytest.raises(WorkerError, match="NonFiniteError: Row 1: the logits after 2 tokens"):
        engine.generate(rows_of([5, 6], [5, 200]))
    assert_same(engine.generate(ROWS.slice(0, 1)), expected, 0)


def test_logits_of_another_shape_are_an_error_that_names_the_engine(engine, monkeypatch):
    monkeypatch.setattr(engine.group.worker, "prefill", lambda rows: torch.zeros(len(rows), 3, reference.VOCABULARY))
    with pytest.raises(WorkerError, match=r"Worker returned a Tensor of shape \[6, 3, 260\] for 6 rows\. .* \[6, V\]"):
        engine.generate(ROWS)


def test_logits_of_padding_are_not_sampled(engine, monkeypatch):
    """Embeddings are often padded to a multiple; their last rows have no token."""
    monkeypatch.setattr(engine.group.worker, "prefill", lambda rows: torch.zeros(len(rows), reference.VOCABULARY + 4))
    with pytest.raises(WorkerError, match=r"shape \[6, 264\] for 6 rows\. .* beyond the 260 tokens of the vocabulary"):
        engine.generate(ROWS)


def test_an_engine_that_starts_no_row_is_an_error_and_does_not_hang(engine, monkeypatch):
    monkeypatch.setattr(engine.group.worker, "max_batch_rows", 0)
    with pytest.raises(WorkerError, match=r"Worker\.admit took no row, .* and `max_batch_rows` is 0\."):
        engine.generate(ROWS)
    with pytest.raises(WorkerError, match=r"Worker\.admit took no row"):
        asyncio.run(collected(engine, ROWS))


@pytest.mark.parametrize(
    ("method", "value", "error"),
    [
        ("build", {}, r"Worker\.build must return a torch module, not dict\."),
        ("facts", {"vocab_size": 260}, r"Worker\.facts must have an int as `max_model_len`, not None\."),
        ("facts", {"vocab_size": "260", "max_model_len": 9}, r"Worker\.facts must have an int as `vocab_size`, not '260'\."),
    ],
)
def test_wrong_values_of_an_author_name_the_method(start, monkeypatch, method, value, error):
    monkeypatch.setattr(Recurrent.Worker, method, lambda self: value)
    with pytest.raises(WorkerError, match=error):
        start().generate(ROWS)


def test_an_option_of_a_row_that_is_none_is_absent(engine):
    sampling = [{"top_logprobs": None, "top_p": None}] * ROWS.size
    assert_same(engine.generate(BatchedDataDict({**ROWS, "sampling": sampling})).slice(0, 1), engine.generate(ROWS), 0)


def test_a_failed_step_fails_its_rows_and_the_engine_samples_the_next_ones(engine, monkeypatch):
    async def fail():
        task = asyncio.create_task(collected(engine, ROWS))
        await asyncio.sleep(0)
        await wait_for_tokens(engine, 2)
        with monkeypatch.context() as patch:
            patch.setattr(engine.group.worker, "decode", None)
            return await asyncio.gather(task, return_exceptions=True)

    [error] = asyncio.run(fail())
    assert "TypeError" in str(error)
    assert not rows_in(engine)
    assert_same(asyncio.run(collected(engine, ROWS))[2][0], engine.generate(ROWS), 2)
