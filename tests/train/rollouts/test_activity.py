"""What rollouts wait for: counted over time, and listed if none of them continues."""

import asyncio
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import DeadlineExceededError
from rl_train.metrics.progress import Progress
from rl_train.rollouts import activity
from rl_train.rollouts.activity import ENGINE, ENVIRONMENT, ActivityLog, StalledError
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.drivers import RolloutDriver
from rl_train.rollouts.trajectory import SampleStream, Trajectory

CHANGES = st.lists(st.tuples(st.integers(0, 400), st.sampled_from([1, -1])), max_size=30)


def log_of(changes, now):
    """A log in which rollouts began (1) or ended (-1) to wait for the engine at these times, and their number over time."""
    log, number, steps = ActivityLog(), 0, []
    for at, by in sorted(changes):
        by = by if number + by >= 0 else 1
        now[0], number = at / 10, number + by
        log.count(ENGINE, by)
        steps.append((at / 10, number))
    return log, steps


def number_at(steps, time):
    return next((number for at, number in reversed(steps) if at <= time), 0)


@given(CHANGES, st.integers(0, 300), st.integers(1, 100))
def test_waiting_rollouts_and_idle_time_are_those_of_a_fine_grid(changes, start, length):
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activity, "perf_counter", lambda: now[0])
        log, steps = log_of(changes, now)
    start, end = start / 10, (start + length) / 10
    # Numbers change at multiples of 0.1 only, so the middles of such intervals have them exactly.
    grid = [number_at(steps, start + (index + 0.5) / 10) for index in range(length)]
    means = log.waiting(ENGINE, start, end, bins=7)
    assert sum(means) / 7 == pytest.approx(sum(grid) / length, abs=1e-9)
    assert log.idle_s(ENGINE, start, end) == pytest.approx(grid.count(0) / 10, abs=1e-9)
    log.forget_before(start)
    assert log.waiting(ENGINE, start, end, bins=7) == pytest.approx(means)


def test_rollouts_count_where_they_wait_and_leave_the_log(tokenizer, engine_for, environments):
    made = collector(tokenizer, engine_for(lambda text: ("yes[EOS]", False)), environments)
    made.collect([row(tokenizer, "count", {"turns": 2})], stream=SampleStream.TRAINING)
    log = made.activities
    assert [count for _, count in log._changes[ENGINE]] == [1, 0, 1, 0]
    assert [count for _, count in log._changes[ENVIRONMENT]] == [1, 0, 1, 0]
    assert log.describe() == "Rollouts in progress (0):"


@pytest.mark.parametrize(("turns", "shown"), [(1, ("1/2 rollouts",)), (2, ("0/2 rollouts", "1/2 in this turn"))])
def test_the_progress_of_a_batch_is_that_of_its_engine(tokenizer, engine_for, environments, turns, shown):
    engine, progress, lines = engine_for(lambda text: ("yes[EOS]", False)), Progress(), []
    made = replace(collector(tokenizer, engine, environments), max_turns={"count": turns})
    progress.rollouts = made.activities.counts
    progress.begin("rollout")
    sample, engine.batch_progress = engine.generate, lambda: (1, 1000)

    def generate(data, greedy=False):
        lines.append(str(progress))
        return sample(data, greedy=greedy)

    engine.generate = generate
    made.collect([row(tokenizer, "count", {"turns": turns}, ordinal=n) for n in (7, 8)], stream=SampleStream.TRAINING)
    assert len(lines) == turns
    for line in lines:
        _, *texts = line.split("  ")
        assert tuple(texts[: len(shown)]) == shown
        assert texts[len(shown)].endswith("tokens/s")
    assert progress.rollouts.batch is None
    assert "  2/2 rollouts  " in str(progress)


class Stuck(RolloutDriver):
    """Samples a turn, then waits for something that never comes."""

    async def run(self, prompt, engine, session):
        await engine.sample(prompt.token_ids())
        await asyncio.Event().wait()


def test_rollouts_that_do_not_continue_are_listed_with_turn_and_place(tokenizer, engine_for, environments):
    engine = engine_for(lambda text: ("yes[EOS]", False))
    made = replace(collector(tokenizer, engine, environments), drivers={"judge": Stuck(), "count": Stuck()}, deadline_s=0.05)
    rows = [row(tokenizer, "judge", {}, ordinal=4), row(tokenizer, "count", {}, ordinal=5)]
    with pytest.raises(StalledError, match=r"No rollout has continued for 0\.05 s") as raised:
        made.collect(rows, stream=SampleStream.TRAINING)
    text = str(raised.value)
    assert "Rollouts in progress (2):" in text
    for name in ("training prompt 4, sample 0, task judge", "training prompt 5, sample 0, task count"):
        assert f"{name}: turn 1, waits for Stuck, " in text
    assert made.activities.describe() == "Rollouts in progress (0):"


def test_time_without_a_thread_that_waits_for_rollouts_is_not_counted():
    async def late():
        log = ActivityLog()
        log.last_change -= 1000.0
        await log.watch(asyncio.sleep(0.01), 0.05, lambda: None)  # no thread waits
        with pytest.raises(StalledError):
            await log.watch(asyncio.Event().wait(), 0.05, lambda: log.last_change)

    asyncio.run(late())


def test_the_error_of_an_expired_deadline_lists_the_other_rollouts(tokenizer, engine_for, environments):
    engine = engine_for(lambda text: ("yes[EOS]", False))

    def generate(data, greedy=False):
        raise DeadlineExceededError("replica 0 has finished none of its 2 rows for 9 s.")

    engine.generate = generate
    rows = [row(tokenizer, "count", {"turns": 2}, ordinal=number) for number in (7, 8)]
    with pytest.raises(DeadlineExceededError) as raised:
        collector(tokenizer, engine, environments).collect(rows, stream=SampleStream.TRAINING)
    text = str(raised.value)
    assert text.startswith("replica 0 has finished none of its 2 rows for 9 s.\nRollouts in progress (2):")
    assert text.count("waits for") == 2
    assert "training prompt 8, sample 0, task count: turn 1, waits for the engine" in text


def collector(tokenizer, engine, environments):
    return Collector(
        generation=engine,
        environments=environments,
        tokenizer=tokenizer,
        seed=7,
        max_turns={"judge": 1, "count": 4},
        max_total_length=200,
    )


def row(tokenizer, task, metadata, *, ordinal=0):
    ids = torch.tensor(tokenizer("<u>q\n<a>")["input_ids"])
    return Trajectory(
        message_log=[{"role": "user", "content": "q", "token_ids": ids}],
        metadata=metadata,
        task_name=task,
        group_id=0,
        index=0,
        ordinal=ordinal,
        sample=0,
    )
