"""Single rows of the Transformers engine: they join while others run, and are those of `generate`."""

import asyncio
import itertools

import pytest
import torch
import transformers

from rl_backends_hf.generation import HuggingFaceGeneration
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError, NonFiniteError

TEMPERATURE = 0.7
LIMIT = 40
"""Maximum number of sampled tokens per row."""
FORGETS = 7
"""Token whose embedding is NaN in the folder `one_bad_token`."""


@pytest.fixture(scope="module")
def folder(model_folder):
    return model_folder("qwen3")


@pytest.fixture(scope="module")
def engine(folder):
    engine = HuggingFaceGeneration(folder, max_new_tokens=LIMIT, temperature=TEMPERATURE)
    yield engine
    engine.shutdown()


def batch_of(*prompts, **columns):
    """Rows whose draws are at least 3e-5 from the boundaries between tokens, so that rounding cannot change them."""
    width = max(map(len, prompts))
    return BatchedDataDict(
        input_ids=torch.tensor([list(prompt) + [0] * (width - len(prompt)) for prompt in prompts]),
        input_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        **{"sample_seeds": torch.arange(len(prompts)) * 31 + 8, **columns},
    )


BATCH = batch_of([5, 6, 7], [9], [5, 6, 7], [11, 12], [9], [3, 4, 5, 6, 8, 9])


def rows_in(engine):
    return list(engine.group.worker._sampler._rows.values())


async def row_of(engine, batch, row, greedy=False):
    [item] = [output async for _, output in engine.generate_async(batch.slice(row, row + 1), greedy)]
    return item


async def wait_for_tokens(engine, tokens):
    """Wait until every row in the engine has that many tokens."""
    while not (rows := rows_in(engine)) or min(len(row.tokens) for row in rows) < tokens:
        await asyncio.sleep(0)


def assert_same_row(found, expected, row):
    """The float32 sums depend on the rows that are computed together, so log-probabilities are equal up to rounding."""
    length = int(found["unpadded_sequence_lengths"][0])
    assert found["output_ids"][0].tolist() == expected["output_ids"][row, :length].tolist()
    assert found["truncated"][0] == expected["truncated"][row]
    torch.testing.assert_close(found["logprobs"][0], expected["logprobs"][row, :length], atol=1e-5, rtol=0)


async def one_after_the_other(engine, batch, greedy=False):
    """Each row joins when the one before it has tokens."""
    tasks = []
    for row in range(batch.size):
        tasks.append(asyncio.create_task(row_of(engine, batch, row, greedy)))
        await asyncio.sleep(0)
        await wait_for_tokens(engine, 1)
    return await asyncio.gather(*tasks)


def test_the_engine_states_that_it_streams_rows(engine):
    from rl_backends_hf.plugin import rlcore_generations

    assert engine.streams_rows
    assert "async_rows" in rlcore_generations()[0].capabilities


@pytest.mark.parametrize("greedy", [False, True])
def test_rows_that_join_at_different_times_are_those_of_one_call(engine, greedy):
    expected = engine.generate(BATCH, greedy)
    for row, found in enumerate(asyncio.run(one_after_the_other(engine, BATCH, greedy))):
        assert_same_row(found, expected, row)
    assert rows_in(engine) == []


def test_greedy_and_sampled_rows_share_the_batch(engine):
    async def together():
        return await asyncio.gather(*(row_of(engine, BATCH, row, greedy=row % 2 == 0) for row in range(BATCH.size)))

    sampled, greedy = engine.generate(BATCH), engine.generate(BATCH, greedy=True)
    for row, found in enumerate(asyncio.run(together())):
        assert_same_row(found, greedy if row % 2 == 0 else sampled, row)


def test_more_rows_than_slots_are_completed(folder):
    engine = HuggingFaceGeneration(folder, max_new_tokens=12, temperature=TEMPERATURE, max_batch_rows=2)
    expected = engine.generate(BATCH)
    for row, found in enumerate(asyncio.run(one_after_the_other(engine, BATCH))):
        assert_same_row(found, expected, row)
    engine.shutdown()


def test_an_error_of_one_row_fails_that_row_only(folder, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.get_input_embeddings().weight.data[FORGETS] = float("nan")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().nan_to_num())
    model.save_pretrained(tmp_path)
    engine = HuggingFaceGeneration(str(tmp_path), max_new_tokens=20, stop_token_ids=[FORGETS])

    async def together(*prompts):
        batch = batch_of(*prompts)
        return await asyncio.gather(*(row_of(engine, batch, row) for row in range(len(prompts))), return_exceptions=True)

    good, bad, too_big = asyncio.run(together([5, 6], [5, FORGETS], [9, 160]))
    assert isinstance(bad, NonFiniteError)
    assert isinstance(too_big, DataError)
    assert_same_row(good, engine.generate(batch_of([5, 6])), 0)
    assert rows_in(engine) == []
    engine.shutdown()


CANCELLED = (0, 4)
"""Rows with the maximum number of tokens, so that they are in progress when they are cancelled."""


def test_cancelled_rows_leave_the_engine_and_others_continue(engine):
    async def cancel_some():
        tasks = [asyncio.create_task(row_of(engine, BATCH, row)) for row in range(BATCH.size)]
        await asyncio.sleep(0)
        await wait_for_tokens(engine, 2)
        for row in CANCELLED:
            tasks[row].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    expected = engine.generate(BATCH)
    assert expected["generation_lengths"][list(CANCELLED)].tolist() == [LIMIT, LIMIT]
    for row, found in enumerate(asyncio.run(cancel_some())):
        if row in CANCELLED:
            assert isinstance(found, asyncio.CancelledError)
        else:
            assert_same_row(found, expected, row)
    assert rows_in(engine) == []


def test_a_failed_step_fails_its_rows_and_the_engine_samples_the_next_ones(engine, monkeypatch):
    async def fail():
        task = asyncio.create_task(row_of(engine, BATCH, 0))
        await asyncio.sleep(0)
        await wait_for_tokens(engine, 2)
        with monkeypatch.context() as patch:
            patch.setattr(engine.group.worker.model, "forward", None)
            return await asyncio.gather(task, return_exceptions=True)

    [error] = asyncio.run(fail())
    assert "TypeError" in str(error)
    assert rows_in(engine) == []
    assert_same_row(asyncio.run(row_of(engine, BATCH, 1)), engine.generate(BATCH), 1)


@pytest.mark.parametrize("end", ["finish_generation", "shutdown"])
def test_packed_weights_are_freed_after_generation(folder, end):
    engine = HuggingFaceGeneration(folder, max_new_tokens=LIMIT)
    asyncio.run(row_of(engine, BATCH, 0))
    worker = engine.group.worker
    assert any("forward" in module.__dict__ for module in worker.model.modules())
    getattr(engine, end)()
    assert all("forward" not in module.__dict__ for module in worker.model.modules())
    engine.shutdown()


@pytest.fixture
def refitted(folder, tmp_path):
    """A policy, an engine with other weights, and the synchronizer of both."""
    from rl_backends_hf.policy import HuggingFacePolicy
    from rl_train.weight_sync.sender import WeightSender
    from rl_train.weight_sync.synchronizer import WeightSynchronizer
    from rl_train.weight_sync.transports import ByReferenceTransport

    with torch.random.fork_rng():
        torch.manual_seed(77)
        other = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    # No token ends a row, so that rows are still in progress at a refit at any time before their limit.
    other.config.eos_token_id = other.generation_config.eos_token_id = None
    other.save_pretrained(tmp_path)
    policy = HuggingFacePolicy(folder, generation={"temperature": TEMPERATURE, "backend": "hf"})
    engine = HuggingFaceGeneration(str(tmp_path), max_new_tokens=LIMIT, temperature=TEMPERATURE)
    sync = WeightSynchronizer(policy, engine, WeightSender(policy, ByReferenceTransport))
    yield policy, engine, sync
    engine.shutdown()
    policy.shutdown()


def plain_scores(folder, ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        scores = torch.log_softmax(model(ids[None]).logits[0, :-1] / TEMPERATURE, dim=-1)
    return torch.cat([torch.zeros(1), scores.gather(1, ids[1:, None])[:, 0]])


def test_rows_in_progress_at_a_refit_keep_their_tokens_and_continue_with_the_new_weights(refitted, folder, tmp_path):
    policy, engine, sync = refitted
    before = engine.generate(BATCH)

    async def refit_between_tokens():
        tasks = [asyncio.create_task(row_of(engine, BATCH, row)) for row in range(3)]
        await asyncio.sleep(0)
        await wait_for_tokens(engine, 4)
        engine.prepare_refit_info(policy.prepare_refit_info())  # no row gets tokens until the sync
        kept = [len(row.tokens) for row in rows_in(engine)]
        sync.sync()
        tasks.append(asyncio.create_task(row_of(engine, BATCH, 3)))
        return kept, await asyncio.gather(*tasks)

    kept, found = asyncio.run(refit_between_tokens())
    after = engine.generate(BATCH)
    assert_same_row(found[3], after, 3)
    assert [int(row["weight_version"][0]) for row in found] == [-1, -1, -1, 0]
    for row, (tokens, output) in enumerate(zip(kept, found[:3], strict=True)):
        prompt, ids = int(BATCH["input_lengths"][row]), output["output_ids"][0]
        assert 4 <= tokens < len(ids) - prompt == LIMIT
        assert ids[: prompt + tokens].tolist() == before["output_ids"][row, : prompt + tokens].tolist()
        # Every later token is scored by the new weights alone: no key or value of the old ones is left.
        new, old = plain_scores(folder, ids), plain_scores(tmp_path, ids)
        torch.testing.assert_close(output["logprobs"][0, prompt + tokens :], new[prompt + tokens :], atol=1e-4, rtol=0)
        drawn = slice(prompt, prompt + tokens)
        torch.testing.assert_close(output["logprobs"][0, drawn], old[drawn], atol=1e-4, rtol=0)


def test_each_token_of_a_row_that_spans_three_refits_has_the_version_whose_weights_score_it(folder, tmp_path):
    from rl_backends_hf import HuggingFacePolicy
    from rl_train.algorithms.losses import NLLLossFn
    from rl_train.weight_sync.sender import WeightSender
    from rl_train.weight_sync.synchronizer import WeightSynchronizer
    from rl_train.weight_sync.transports import SharedMemoryTransport

    policy = HuggingFacePolicy(folder, generation={"temperature": TEMPERATURE, "backend": "hf"})
    engine = HuggingFaceGeneration(folder, max_new_tokens=LIMIT, temperature=TEMPERATURE)
    engine.group.worker._sampler._loop._end_ids = frozenset()  # a row that ends early would not span three refits
    sync = WeightSynchronizer(policy, engine, WeightSender(policy, SharedMemoryTransport))
    noise, folders = torch.Generator().manual_seed(0), {}

    def change():
        """Other weights, with the next version."""
        data = BatchedDataDict({"input_ids": torch.tensor([[5, 6, 7]]), "input_lengths": torch.tensor([3])})
        policy.train(BatchedDataDict({**data, "token_mask": torch.ones(1, 3), "sample_mask": torch.ones(1)}), NLLLossFn())
        with torch.no_grad():
            for _, tensor in policy.group.worker.iter_weights():
                tensor += 0.02 * torch.randn(tensor.shape, generator=noise)
        folders[policy.weight_version] = tmp_path / str(policy.weight_version)
        policy.save_checkpoint(str(folders[policy.weight_version]))
        return sync.sync()

    async def refit_three_times():
        tasks = [asyncio.create_task(row_of(engine, BATCH, row)) for row in range(3)]
        await asyncio.sleep(0)
        metrics = []
        for tokens in (5, 12, 30):
            await wait_for_tokens(engine, tokens)
            metrics.append(change())
        return metrics, await asyncio.gather(*tasks)

    change()
    metrics, found = asyncio.run(refit_three_times())
    assert all(0.0 < each["refit/paused_s"] <= each["refit/total_s"] for each in metrics)
    for row, output in enumerate(found):
        prompt, versions = int(BATCH["input_lengths"][row]), output["token_versions"][0]
        logprobs = output["logprobs"][0, prompt:]
        assert versions[:prompt].tolist() == [-1] * prompt
        assert versions[prompt:].unique_consecutive().tolist() == [1, 2, 3, 4]
        assert int(output["weight_version"]) == 1
        scores = {version: plain_scores(path, output["output_ids"][0])[prompt:] for version, path in folders.items()}
        own = versions[prompt:]
        assert difference(scores, own, logprobs) < 1e-4
        assert difference(scores, torch.cat([own[:1], own[:-1]]), logprobs) > 1e-3
        assert difference(scores, torch.cat([own[1:], own[-1:]]), logprobs) > 1e-3
    engine.shutdown()
    policy.shutdown()


def difference(scores, versions, logprobs):
    """Largest difference between log-probabilities and the scores of their versions."""
    scored = torch.stack([scores[version][at] for at, version in enumerate(versions.tolist())])
    return float((scored - logprobs).abs().max())


def test_rows_that_arrive_during_a_refit_wait_for_its_weights(refitted):
    policy, engine, sync = refitted

    async def arrive():
        engine.prepare_refit_info(policy.prepare_refit_info())
        task = asyncio.create_task(row_of(engine, BATCH, 0))
        while not rows_in(engine):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
        sync.sync()
        return await task

    found = asyncio.run(arrive())
    assert found["weight_version"].tolist() == [0]
    assert_same_row(found, engine.generate(BATCH), 0)


@pytest.fixture
def widths(engine, monkeypatch):
    """Shapes of the model's inputs with more than one token."""
    found, model = [], engine.group.worker.model
    forward = model.forward

    def watched(*args, **kwargs):
        if kwargs["input_ids"].shape[1] > 1:
            found.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", watched)
    return found


def test_rows_of_one_prompt_that_arrive_together_share_a_prefill(engine, widths):
    async def together():
        return await asyncio.gather(*(row_of(engine, BATCH, row) for row in (0, 2, 3)))

    asyncio.run(together())
    assert widths == [(2, 3)]


def with_sessions(batch, names):
    return BatchedDataDict({**batch, "session_ids": names})


async def conversations(engine, prompts, names, turns):
    """Each row's turns: a turn adds three tokens to what was sampled. Returns the outputs of all turns by row."""

    async def converse(row):
        tokens, outputs = prompts[row], []
        for turn in range(turns):
            batch = batch_of(tokens, sample_seeds=torch.tensor([row * 7 + turn]), max_new_tokens=torch.tensor([6 + 3 * row]))
            outputs.append(await row_of(engine, with_sessions(batch, [names[row]]), 0))
            tokens = [*outputs[-1]["output_ids"][0].tolist(), 20 + row, 30 + turn, 41]
        return outputs

    return await asyncio.gather(*(converse(row) for row in range(len(prompts))))


PROMPTS = [[5, 6, 7, 8, 9, 10], [9, 4], [5, 6, 7, 8, 9, 10]]
NAMES = ["a", "b", "c"]


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "llama"])
def test_a_turn_that_continues_a_session_equals_a_full_prefill(model_folder, kind):
    engine = HuggingFaceGeneration(model_folder(kind), max_new_tokens=40, temperature=TEMPERATURE)
    with_cache = asyncio.run(conversations(engine, PROMPTS, NAMES, 3))
    assert len(engine.group.worker.sessions) == 3
    without = asyncio.run(conversations(engine, PROMPTS, [None] * 3, 3))
    for found, expected in zip(with_cache, without, strict=True):
        for turn in range(3):
            assert_same_row(found[turn], expected[turn], 0)
    engine.shutdown()


def test_a_turn_computes_only_its_new_tokens_until_its_session_is_closed(engine, widths):
    asyncio.run(conversations(engine, PROMPTS[:1], ["a"], 2))
    assert widths == [(1, 6), (1, 4)]  # the last sampled token has not been computed yet
    sessions = engine.group.worker.sessions
    assert sessions.num_bytes > 0
    engine.close_sessions(["a", "unknown"])
    assert (len(sessions), sessions.num_bytes) == (0, 0)
    engine.finish_generation()


def test_a_session_whose_history_was_rewritten_keeps_the_common_prefix(engine, widths):
    changed = [5, 6, 7, 8, 50, 51, 52]
    asyncio.run(conversations(engine, PROMPTS[:1], ["a"], 1))
    found = asyncio.run(row_of(engine, with_sessions(batch_of(changed), ["a"]), 0))
    assert widths[1:] == [(1, 3)]
    assert_same_row(found, engine.generate(batch_of(changed)), 0)
    # The same prompt again: one token is computed for the logits after it.
    again = asyncio.run(row_of(engine, with_sessions(batch_of(changed), ["a"]), 0))
    assert_same_row(again, found, 0)
    engine.finish_generation()


def test_sessions_stay_within_their_memory_and_the_oldest_are_discarded(folder):
    engine = HuggingFaceGeneration(folder, max_new_tokens=40, session_cache_mb=0)
    asyncio.run(conversations(engine, PROMPTS, NAMES, 1))
    sessions = engine.group.worker.sessions
    assert len(sessions) == 0
    sessions._max_bytes = 5000  # two layers, two heads of 8 numbers: 256 bytes a token
    for row in range(3):
        asyncio.run(conversations(engine, PROMPTS[row : row + 1], NAMES[row : row + 1], 1))
        assert 0 < sessions.num_bytes <= 5000
    assert sorted(sessions._prefixes) == ["b", "c"]
    engine.shutdown()


def test_a_refit_discards_sessions(refitted):
    _, engine, sync = refitted
    before = asyncio.run(conversations(engine, PROMPTS[:1], ["a"], 1))[0][0]
    sync.sync()
    assert len(engine.group.worker.sessions) == 0
    turn = batch_of([*before["output_ids"][0].tolist(), 20, 30])
    assert_same_row(asyncio.run(row_of(engine, with_sessions(turn, ["a"]), 0)), engine.generate(turn), 0)


async def streamed(engine, batch):
    """All outputs of each row, in the order in which they came."""
    found = {row: [] for row in range(batch.size)}
    async for row, output in engine.generate_async(batch):
        found[row].append(output)
    return found


def test_rows_that_stream_are_returned_while_they_are_sampled_and_others_only_at_their_end(engine):
    assert engine.streams_tokens
    asked = torch.tensor([True, False, True, False, False, True])
    found = asyncio.run(streamed(engine, BatchedDataDict({**BATCH, "stream_tokens": asked})))
    expected = engine.generate(BATCH)
    several = 0
    for row, outputs in found.items():
        assert_same_row(outputs[-1], expected, row)
        assert "unfinished" not in outputs[-1]
        assert all(output["unfinished"].tolist() == [True] for output in outputs[:-1])
        assert asked[row] or len(outputs) == 1
        several += len(outputs) > 2
        lengths = [int(output["generation_lengths"][0]) for output in outputs]
        assert lengths == sorted(set(lengths))
        for output, whole in itertools.pairwise(outputs):
            length = int(output["unpadded_sequence_lengths"][0])
            assert output["output_ids"][0].tolist() == whole["output_ids"][0, :length].tolist()
            assert output["logprobs"][0].tolist() == whole["logprobs"][0, :length].tolist()
    assert several
    assert rows_in(engine) == []
