"""Prompts that a sampler draws: the same ones whatever ends first, ahead or resumed, and clear errors of wrong samplers."""

import asyncio
import hashlib
import json
import random

import pytest
import torch
from acme_sampler import LowestFirst
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled_sources import scheduled_source

from rl_core.errors import CheckpointError, ConfigError, DataError
from rl_train.config.data_sections import SamplerConfig
from rl_train.data.curricula import make_sampled_prompts
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.prompt_sampler import PromptSampler
from rl_train.rollouts.collect import RolloutLoop
from rl_train.rollouts.source import Selection

PROMPTS, GROUP, ROWS = 4, 4, 30
SAMPLERS = {
    "band": {"name": "pass_rate_band", "exploration": 0.3},
    "tasks": {"name": "task_mix", "new_weight": 0.4},
    "stages": {"name": "stages", "key": "level", "bounds": [1, 2], "at_reward": 0.4, "window": 6},
    "own": {"name": "acme_sampler.LowestFirst", "kwargs": {"initial": 0.4}},
}


class Engine:
    """The part of an engine that a source calls."""

    version = 0

    def prepare_for_generation(self): ...

    def await_weights(self): ...


class Collector:
    """Plays each rollout after a random time; its reward only depends on the row, the ordinal and the sample."""

    def __init__(self, delays=None, failing=()):
        self.environments, self.generation = {}, Engine()
        self.loop = RolloutLoop(threaded=True)
        self.delays, self.failing, self.drawn = delays, failing, {}

    async def play(self, trajectories, *, stream):
        for row in trajectories:
            self.drawn.setdefault(row.ordinal, row.index)
        if self.delays is not None:
            await asyncio.sleep(self.delays.random() * 0.004)
        for row in trajectories:
            row.add_answer("a", torch.tensor([1]), torch.tensor([-1.0]), weight_version=self.generation.version)
            digest = hashlib.blake2b(f"{row.ordinal} {row.sample}".encode(), digest_size=1).digest()[0]
            row.add_rewards({"reward": float(digest / 255 < row.index / ROWS)})
            row.scored = row.ordinal not in self.failing
            row.finished = True


def loader(rows=ROWS):
    datums = [
        {
            "message_log": [{"role": "user", "content": "q", "token_ids": torch.tensor([index])}],
            "length": 1,
            "extra_env_info": {"level": 1 + index % 3},
            "task_name": ("short", "long")[index % 2],
            "idx": index,
            "loss_multiplier": 1.0,
        }
        for index in range(rows)
    ]
    return BatchedDataLoader(datums, batch_size=PROMPTS, seed=5, collate=list)


def source_of(collector, sampler, k=0, *, ahead=None, exact=False, delay=None, rows=ROWS):
    prompts = loader(rows)
    sampled = None
    if sampler is not None:
        sampled = make_sampled_prompts(SamplerConfig(**sampler, delay=delay), prompts, max_staleness=k)
    return scheduled_source(
        collector,
        prompts,
        weight_version=lambda: collector.generation.version,
        group_size=GROUP,
        demand=PROMPTS,
        max_staleness=k,
        ahead=k if ahead is None else ahead,
        exact=exact,
        sampled=sampled,
        max_failed_share=1.0,
    )


def resumed(source, collector, folder, *arguments, **options):
    state = json.loads(json.dumps(source.state_dict()))
    source.save_files(folder)
    again = source_of(collector, *arguments, **options)
    again.load_state_dict(state)
    again.load_files(folder)
    return again


def drawn(sampler, k=0, *, steps=12, folder=None, failing=(), delays=None, selection=None, **options):
    """The row of each ordinal of the first steps, and the metrics of the last step."""
    collector = Collector(delays=delays, failing=failing)
    source, metrics = source_of(collector, sampler, k, **options), {}
    try:
        for step in range(1, steps + 1):
            metrics = source.take(step, PROMPTS, selection).metrics
            if source._schedule.exact:
                source.end_rollouts()
            collector.generation.version += 1
            if folder is not None:
                source = resumed(source, collector, folder / str(step), sampler, k, **options)
    finally:
        collector.loop.close()
    rows = [collector.drawn[ordinal] for ordinal in sorted(collector.drawn)]
    return rows[: steps * PROMPTS], {name: value for name, value in metrics.items() if name.startswith("data/")}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_sampler_draws_the_same_prompts_ahead_as_in_a_synchronous_run_with_its_delay(sampler):
    rows, _ = drawn(sampler, delay=2)
    assert rows != drawn(sampler)[0], "rewards that come earlier change nothing, so this test shows nothing"
    for seed, (k, ahead) in enumerate(((2, 2), (2, 1), (1, 1))):
        assert drawn(sampler, k, ahead=ahead, delay=2, delays=random.Random(seed))[0] == rows
    assert drawn(sampler, 2, exact=True, delays=random.Random(0))[0] == rows


@pytest.mark.parametrize(("k", "exact"), [(0, False), (1, False), (2, True)])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_a_run_that_is_resumed_after_every_step_draws_the_same_prompts_with_the_same_metrics(sampler, k, exact, tmp_path):
    whole = drawn(sampler, k, exact=exact)
    assert drawn(sampler, k, exact=exact, folder=tmp_path, delays=random.Random(0)) == whole
    assert whole[1]["data/sampler/epochs"] == (12 + k) * PROMPTS / ROWS
    assert len(whole[1]) > 1


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_groups_that_are_replaced_are_seen_too_and_resumes_change_nothing(sampler, tmp_path):
    some = Selection(
        keep=lambda group: 0 < sum(row.reward for row in group) < GROUP, max_groups=40, oversampling=1.5, advice=""
    )
    failing = {3, 4, 17}
    whole = drawn(sampler, failing=failing, selection=some)
    assert len(whole[0]) > 12 * PROMPTS - 1
    assert drawn(sampler, failing=failing, selection=some, folder=tmp_path, delays=random.Random(1)) == whole


@pytest.mark.parametrize(("k", "delay"), [(0, 0), (0, 3), (1, 1), (2, 2), (2, 3)])
def test_before_the_draws_for_a_step_all_rewards_up_to_the_delay_are_seen_in_the_order_of_draws(k, delay):
    collector = Collector(delays=random.Random(3))
    source = source_of(collector, SAMPLERS["own"], k, delay=delay)
    sampler = source._sampled._sampler
    choose, log = sampler.choose, []

    def logged(count, *, step, excluded):
        log.append((step, [tuple(each) for each in sampler.seen]))
        chosen = choose(count, step=step, excluded=excluded)
        log[-1] += (list(chosen),)
        return chosen

    sampler.choose = logged
    for step in range(1, 9):
        source.take(step, PROMPTS)
    collector.loop.close()
    order = [(step, row) for step, _, chosen in log for row in chosen]
    assert [step for step, _, _ in log] == list(range(1, 9 + k))
    for step, seen, _ in log:
        assert seen == [each for each in order if each[0] <= step - 1 - delay]


def test_a_group_that_a_resumed_run_samples_again_counts_with_its_first_rewards(tmp_path):
    collector = Collector()
    source = source_of(collector, SAMPLERS["own"], 1)
    source.take(1, PROMPTS)
    while source._playing:
        source._await_groups()
    before = [draw.rewards for draw in source._sampled._draws.values()]
    assert None not in before
    again = source_of(collector, SAMPLERS["own"], 1)
    again.load_state_dict(json.loads(json.dumps(source.state_dict())))  # without the files of finished groups
    again._sampled.record(PROMPTS, [7.0])
    assert [draw.rewards for draw in again._sampled._draws.values()] == before
    taken = again.take(2, PROMPTS)
    assert {row.index for row in taken.trajectories} == {collector.drawn[n] for n in range(PROMPTS, 2 * PROMPTS)}
    collector.loop.close()


def test_a_run_that_gets_a_sampler_continues_after_its_ordinals_and_one_that_loses_it_is_refused():
    collector = Collector()
    plain = source_of(collector, None)
    plain.take(1, PROMPTS)
    assert "sampled" not in plain.state_dict()
    sampled = source_of(collector, SAMPLERS["own"])
    sampled.load_state_dict(plain.state_dict())
    assert {row.ordinal for row in sampled.take(2, PROMPTS).trajectories} == {4, 5, 6, 7}
    with pytest.raises(CheckpointError, match=r"drawn by the prompt sampler acme_sampler\.LowestFirst"):
        source_of(collector, None).load_state_dict(sampled.state_dict())
    with pytest.raises(DataError, match=r"of the prompt sampler acme_sampler\.LowestFirst, but data\.sampler is task_mix"):
        source_of(collector, SAMPLERS["tasks"]).load_state_dict(sampled.state_dict())
    collector.loop.close()


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(sorted(SAMPLERS)),
    rows=st.integers(6, 9),
    steps=st.lists(st.integers(1, 12), min_size=1, max_size=5),
)
def test_a_step_draws_no_row_twice_until_it_has_drawn_all(name, rows, steps):
    prompts = loader(rows)
    sampled = make_sampled_prompts(SamplerConfig(**SAMPLERS[name]), prompts, max_staleness=0)
    for step, count in enumerate(steps, start=1):
        ordinals = sampled.draw([step] * count, alive=())
        indices = [datum["idx"] for datum in sampled.rows_of(ordinals)]
        for start in range(0, count, rows):
            part = indices[start : start + rows]
            assert len(set(part)) == len(part)
        for ordinal, index in zip(ordinals, indices, strict=True):
            sampled.record(ordinal, [float(index % 2), 0.0])


def test_a_prompt_keeps_its_row_while_its_group_is_alive():
    sampled = make_sampled_prompts(SamplerConfig(**SAMPLERS["tasks"]), loader(), max_staleness=0)
    [first] = sampled.draw([1], alive=())
    row = sampled.rows_of([first])[0]["idx"]
    sampled.record(first, [1.0])
    for step in (2, 3):
        sampled.draw([step], alive=[first])
        assert sampled.rows_of([first])[0]["idx"] == row


class Wrong(PromptSampler):
    """Returns the given rows, state and metrics."""

    def __init__(self, rows, *, returns=None, state=None, metrics=None, refuses=False):
        super().__init__(rows)
        if refuses:
            raise ValueError("there are no rows for me")
        self.returns, self.state, self.numbers = returns, state or {}, metrics or {}

    def choose(self, count, *, step, excluded):
        if self.returns is None:
            raise KeyError("level")
        return self.returns

    def metrics(self):
        return self.numbers

    def state_dict(self):
        return self.state

    def load_state_dict(self, state): ...


FOUR = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"returns": [0, 1, 2, ROWS]}, "`choose` returned 30, but the rows are 0 to 29 (step 1)"),
        ({"returns": [0, 1, 2, True]}, "`choose` returned True, but the rows are 0 to 29"),
        ({"returns": [0, 1, 2, 1]}, "`choose` returned row 1 twice for step 1, before all 30 rows were drawn for it"),
        ({"returns": [0, 1, 2]}, "`choose` returned 3 rows instead of 4 (step 1)"),
        ({}, "`choose` raised KeyError at "),
        ({"returns": FOUR, "metrics": {"share": float("nan")}}, "its metric 'share' is nan, not a finite number"),
        ({"returns": FOUR, "metrics": {"share": "high"}}, "`metrics` raised ValueError"),
        ({"returns": FOUR, "state": {1: 2}}, "`state_dict` raised TypeError"),
        ({"returns": FOUR, "state": {"rows": (1, 2)}}, "use strings as keys, and lists, not tuples"),
        ({"refuses": True}, "raised ValueError at "),
    ],
)
def test_a_wrong_sampler_stops_the_run_with_an_error_that_names_it(kwargs, says, monkeypatch):
    monkeypatch.setattr("acme_sampler.Wrong", Wrong, raising=False)
    collector = Collector()
    with pytest.raises(ConfigError) as raised:
        source_of(collector, {"name": "acme_sampler.Wrong", "kwargs": kwargs}).take(1, PROMPTS)
    collector.loop.close()
    assert says in str(raised.value)
    assert "The prompt sampler acme_sampler.Wrong" in str(raised.value)
    assert raised.value.key == "data.sampler.name"


def test_a_path_that_is_not_a_sampler_is_refused():
    with pytest.raises(Exception, match=r"is not a PromptSampler\. It has no choose, load_state_dict, state_dict"):
        source_of(Collector(), {"name": "collections.OrderedDict"})
    assert issubclass(LowestFirst, PromptSampler)
