"""Rollouts whose environment fails: steps are repeated, rows are masked, groups are replaced, and a broken run stops."""

import asyncio
import dataclasses
import json
import os
import signal
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.environments.scorer import environment_return
from rl_core.errors import ConfigError, DeadlineExceededError, RLCoreError, WorkerDiedError, WorkerError
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_core.testing.outputs.environment import checked_return, metrics_checked, step_checked
from rl_train.algorithms.estimators import group_advantages
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.pools.actor_pool import ActorPool
from rl_train.pools.pool import InProcessPool
from rl_train.rewards.environment import FunctionEnvironment, named_functions
from rl_train.rollouts.collect import Collector, gather_or_cancel
from rl_train.rollouts.drivers import RolloutDriver
from rl_train.rollouts.environment_pool import EnvironmentPool, FailureLimit, StepFailedError, may_be_retried
from rl_train.rollouts.records import rollout_records
from rl_train.rollouts.source import start_rollouts
from rl_train.rollouts.trajectory import SampleStream

GROUP = 4


def scheduled_source(*args, **kwargs):
    # Workers import this module too, and do not find the modules next to the folders of tests.
    from scheduled_sources import scheduled_source as make

    return make(*args, **kwargs)


class Fragile(EnvironmentInterface):
    """Rewards 1; metadata says how often a row fails, and with which exception."""

    def __init__(self, failures):
        self.failures, self.calls, self.seen = failures, [], {}

    def step(self, message_log_batch, metadata):
        questions = [log[0]["content"] for log in message_log_batch]
        self.calls.append(len(questions))
        for question in questions:
            times, error = self.failures.get(question, (0, None))
            self.seen[question] = self.seen.get(question, 0) + 1
            if self.seen[question] <= times:
                raise error
        n = len(questions)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * n,
            metadata=metadata,
            next_stop_strings=[None] * n,
            rewards=torch.ones(n),
            terminateds=torch.ones(n),
        )


ALWAYS = 10**6


def loader_of(tokenizer, rows=12):
    datums = [
        {
            "message_log": [
                {"role": "user", "content": f"q{n}", "token_ids": torch.tensor(tokenizer(f"<u>q{n}\n<a>")["input_ids"])}
            ],
            "length": 1,
            "extra_env_info": {},
            "task_name": "t",
            "idx": n,
            "loss_multiplier": 1.0,
            "stop_strings": None,
        }
        for n in range(rows)
    ]
    return BatchedDataLoader(datums, batch_size=2, shuffle=False, collate=list)


@pytest.fixture
def collector(tokenizer, engine_for):
    def make(environment, retries=2):
        return Collector(
            generation=engine_for(lambda _: ("ok[EOS]", False)),
            environments={"t": environment},
            tokenizer=tokenizer,
            seed=7,
            max_turns={"t": 1},
            max_total_length=200,
            retries=retries,
        )

    return make


@pytest.fixture
def source(tokenizer, collector):
    def make(environment, **options):
        options = {"group_size": GROUP, "min_scored": 2, **options}
        return scheduled_source(collector(environment), loader_of(tokenizer), **options)

    return make


def played(collector, tokenizer, environment, groups, group_size=1, **options):
    loader = loader_of(tokenizer)
    rows = start_rollouts(loader.rows_of(loader.draw(groups)), group_size)
    collector(environment, **options).collect(rows, stream=SampleStream.TRAINING)
    return rows


class Hangs(RolloutDriver):
    """Does not end in the first `hanging` attempts of each rollout."""

    def __init__(self, hanging):
        self.hanging, self.attempts = hanging, Counter()

    async def run(self, prompt, engine, session):
        self.attempts[prompt.index] += 1
        prompt.turns += 1
        if self.attempts[prompt.index] <= self.hanging:
            await asyncio.sleep(3600)
        return prompt


@pytest.mark.parametrize("with_environment", [True, False])
def test_a_rollout_beyond_its_timeout_starts_again_and_fails_after_the_last_retry(collector, tokenizer, with_environment):
    for hanging, failure in ((1, None), (ALWAYS, "RolloutTimeoutError")):
        made, driver = collector(Fragile({}), retries=2), Hangs(hanging)
        made = dataclasses.replace(
            made, drivers={"t": driver}, timeout_s=0.05, environments=made.environments if with_environment else {}
        )
        loader = loader_of(tokenizer)
        rows = start_rollouts(loader.rows_of(loader.draw(2)), 1)
        made.collect(rows, stream=SampleStream.TRAINING)
        assert [row.turns for row in rows] == [1, 1], "an attempt begins with the prompt alone"
        assert set(driver.attempts.values()) == {min(hanging, 2) + 1}
        for row in rows:
            assert (row.failure is None) if failure is None else str(row.failure).startswith(failure)
            assert row.retries == min(hanging, 2)


def test_a_row_that_fails_once_is_scored_and_does_not_cost_the_others_their_score(collector, tokenizer):
    environment = Fragile({"q1": (1, KeyError("shape"))})
    rows = played(collector, tokenizer, environment, 4)
    assert [(row.scored, row.reward, row.failure) for row in rows] == [(True, 1.0, None)] * 4
    # The shared call failed for all four; then each row has a call without the others.
    assert environment.calls == [4, 1, 1, 1, 1]
    assert [row.retries for row in rows] == [1] * 4


def test_a_row_that_fails_in_every_attempt_is_masked_with_the_reason(collector, tokenizer):
    rows = played(collector, tokenizer, Fragile({"q1": (ALWAYS, KeyError("shape"))}), 3)
    assert [row.scored for row in rows] == [True, False, True]
    assert rows[1].failure == "KeyError: 'shape'"
    [_, record, _] = rollout_records(rows)
    assert (record["scored"], record["failure"], record["completion"]) == (False, "KeyError: 'shape'", "ok")


class Reporting(Fragile):
    """Reports failed rows in `failures` instead of raising, with a reward that must not count."""

    def step(self, message_log_batch, metadata):
        questions = [log[0]["content"] for log in message_log_batch]
        self.calls.append(len(questions))
        self.seen |= {question: self.seen.get(question, 0) + 1 for question in questions}
        failed = [self.seen[question] <= self.failures.get(question, 0) for question in questions]
        made = Fragile({}).step(message_log_batch, metadata)
        return made._replace(failures=["the service is down" if each else None for each in failed])


def test_only_the_rows_that_an_environment_reports_as_failed_are_repeated(collector, tokenizer):
    environment = Reporting({"q1": 1, "q2": ALWAYS})
    rows = played(collector, tokenizer, environment, 4)
    assert [(row.scored, row.reward, row.retries) for row in rows] == [
        (True, 1.0, 0),
        (True, 1.0, 1),
        (False, 0.0, 2),
        (True, 1.0, 0),
    ]
    assert rows[2].failure == "RowFailedError: the service is down"
    assert environment.calls == [4, 1, 1, 1]


def test_a_reported_failure_counts_as_not_scored_for_direct_callers_and_must_be_text():
    results = step_checked(Reporting({"q1": 1}), "t", [[{"role": "user", "content": q}] for q in ("q0", "q1")], [{}, {}])
    assert [result.scored for result in results] == [True, False]
    with pytest.raises(RLCoreError, match="returned 3 as failure of row 0"):
        checked_return(
            environment_return(results)._replace(failures=[3, None]), rows=2, task_name="t", environment_class="Reporting"
        )


def test_without_retries_a_failed_call_masks_its_rows(collector, tokenizer):
    rows = played(collector, tokenizer, Fragile({"q1": (1, KeyError("shape"))}), 3, retries=0)
    assert [row.scored for row in rows] == [False] * 3


def test_a_mistake_of_the_user_ends_the_run_at_once(collector, tokenizer):
    environment = Fragile({"q1": (ALWAYS, ConfigError("env.t.level is 7: choose 1 to 5"))})
    with pytest.raises(ConfigError, match="choose 1 to 5"):
        played(collector, tokenizer, environment, 3)
    assert environment.calls == [3]


@pytest.mark.timeout(240)
def test_a_call_that_cannot_be_started_ends_the_run_instead_of_leaving_its_rollouts_waiting(collector, tokenizer):
    class ClosedPool:
        num_actors, max_concurrency, worker_class, actors = 1, 1, Fragile, ()

        def submit(self, *args, **options):
            raise RLCoreError("pool 'env.t' was shut down")

    environment = EnvironmentPool(ClosedPool(), task_name="t")
    with pytest.raises(RLCoreError, match="was shut down"):
        played(collector, tokenizer, environment, 3)


@pytest.mark.timeout(240)
def test_an_output_without_a_promised_column_ends_the_run_instead_of_leaving_its_rollouts_waiting(collector, tokenizer):
    made = collector(Fragile({}))
    generate = made.generation.generate

    def without_logprobs(data, greedy=False):
        output = generate(data, greedy=greedy)
        del output["logprobs"]
        return output

    made.generation.generate = without_logprobs
    loader = loader_of(tokenizer)
    with pytest.raises(RLCoreError, match="returned no column `logprobs`"):
        made.collect(start_rollouts(loader.rows_of(loader.draw(2)), 1), stream=SampleStream.TRAINING)


def worker_error(exit_code):
    error = WorkerError("actor 0 of pool 'env.t' failed in step()")
    error.exit_code = exit_code
    return error


@pytest.mark.parametrize(
    ("error", "retried"),
    [
        (ValueError("x"), True),
        (worker_error(1), True),
        (worker_error(2), False),
        (DeadlineExceededError("late"), True),
        (RLCoreError("the environment returned None"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_only_errors_that_concern_some_rows_are_retried(error, retried):
    assert may_be_retried(error) == retried


def test_equal_errors_of_different_workers_have_equal_headlines():
    errors = []
    for actor in range(2):
        error = WorkerError(f"actor {actor} of pool 'env.t', pid {actor}, failed in step()\n--- its traceback ---")
        error.__cause__ = ZeroDivisionError("division by zero")
        errors.append(StepFailedError(error).headline)
    assert errors == ["ZeroDivisionError: division by zero"] * 2


def test_a_group_with_too_few_scored_rows_is_replaced_by_the_next_prompt(source):
    rollouts = source(Fragile({"q1": (ALWAYS, KeyError("shape"))})).take(1, 3)
    assert [row.ordinal for row in rollouts.trajectories] == [0] * 4 + [2] * 4 + [3] * 4
    assert rollouts.batch["group_ids"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert rollouts.batch["scored"].all()
    counted = {name: rollouts.metrics[f"rollout/{name}"] for name in ("failed_rows", "replaced_groups", "repeated_steps")}
    # The first call has all 12 rows; the 8 good ones succeed in the next attempt, the 4 others need both.
    assert counted == {"failed_rows": 4.0, "replaced_groups": 1.0, "repeated_steps": 8 + 4 * 2}


class HalfFails(Fragile):
    """Every second sample of q0 cannot be scored."""

    def step(self, message_log_batch, metadata):
        found = super().step(message_log_batch, metadata)
        return found._replace(scored=[float(i % 2) for i in range(len(metadata))])


def test_a_group_with_enough_scored_rows_is_kept(source):
    rollouts = source(HalfFails({})).take(1, 1)
    assert rollouts.batch["scored"].tolist() == [False, True, False, True]
    assert rollouts.batch["sample_mask"].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert "rollout/failed_rows" not in rollouts.metrics


def test_data_whose_rows_are_never_scored_stop_the_run(source):
    with pytest.raises(RLCoreError, match=r"Step 1: \d+ rollouts were replaced, and too few could be scored for 2 groups"):
        source(HalfFails({}), min_scored=3).take(1, 2)


def test_an_environment_that_fails_for_every_row_stops_the_run_in_the_first_step(source):
    environment = Fragile({f"q{n}": (ALWAYS, KeyError("shape")) for n in range(12)})
    with pytest.raises(RLCoreError, match=r"None of 8 rollouts could be scored. The most frequent error \(8 of 8\):\n'shape'"):
        source(environment).take(1, 2)


def failed(count, text):
    """Ten finished rows, some of them failed."""
    rows = [
        type("Row", (), {"failure": f"KeyError: {text}", "failure_details": f"traceback of {text}"})() for _ in range(count)
    ]
    return [*rows, *(type("Row", (), {"failure": None})() for _ in range(10 - count))]


def test_failures_above_the_share_stop_the_run_and_fewer_do_not():
    limit = FailureLimit(0.1)
    for step in range(1, 41):  # one row in ten, for ever
        limit.expect(step, 10)
        limit.count(step, failed(1, "a"))
    with pytest.raises(RLCoreError, match=r"21 rollouts of the last 20 steps could not be scored: 10% .*\n.*traceback of a"):
        limit.count(40, failed(1, "b"))
    new = FailureLimit(0.1)
    new.expect(1, 10)
    new.count(1, failed(10, "a"))
    new.count(1, failed(10, "a"))
    with pytest.raises(RLCoreError, match="15%"):
        new.count(1, failed(10, "a"))


def test_the_failures_of_the_last_steps_are_counted_after_a_resume():
    limit = FailureLimit(0.1)
    for step in range(1, 21):
        limit.expect(step, 10)
        limit.count(step, failed(1, "a"))
    resumed = FailureLimit(0.1)
    resumed.load_state_dict(json.loads(json.dumps(limit.state_dict())))
    resumed.expect(21, 10)
    resumed.count(21, failed(1, "a"))
    with pytest.raises(RLCoreError, match="21 rollouts of the last 20 steps"):
        resumed.count(21, failed(1, "b"))


def test_a_source_keeps_its_failures_in_its_state():
    def source():
        return scheduled_source(None, LoaderState(), group_size=GROUP)

    whole = source()
    whole._failures.expect(1, 10)
    whole._failures.count(1, failed(1, "a"))
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = source()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert state["failures"]["steps"] == [{"number": 1, "rows": 10, "errors": {"KeyError: a": 1}}]


class LoaderState:
    """The state of a loader."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0]), st.booleans()), min_size=1, max_size=16),
    normalize=st.booleans(),
    leave_one_out=st.booleans(),
)
def test_statistics_of_groups_are_those_of_the_scored_rows_alone(rows, normalize, leave_one_out):
    groups, rewards, scored = (torch.tensor(values) for values in zip(*rows, strict=True))
    options = {"normalize": normalize, "leave_one_out": leave_one_out}
    found = group_advantages(rewards, groups, scored=scored, **options)
    assert (found.values[~scored] == 0).all()
    if scored.any():
        alone = group_advantages(rewards[scored], groups[scored], **options)
        assert torch.equal(found.values[scored], alone.values)
        assert found.equal_group_frac == pytest.approx(alone.equal_group_frac)
        assert found.mean_group_std == pytest.approx(alone.mean_group_std)


class Deadly(EnvironmentInterface):
    """Kills its own process for one question."""

    def step(self, message_log_batch, metadata):
        if any(log[0]["content"] == "q1" for log in message_log_batch):
            os.kill(os.getpid(), signal.SIGKILL)
        return Fragile({}).step(message_log_batch, metadata)


@pytest.mark.slow
@pytest.mark.ray
def test_a_row_that_kills_its_worker_is_masked_and_the_rows_next_to_it_are_scored(local_ray, collector, tokenizer):
    with ActorPool(None, Deadly, 1, name="env.t") as pool:
        environment = EnvironmentPool(pool, task_name="t")
        rows = played(collector, tokenizer, environment, 3, retries=1)
    assert [row.scored for row in rows] == [True, False, True]
    assert rows[1].failure == "WorkerDiedError: the environment's worker died"
    assert "died in step()" in rows[1].failure_details


class DiesInMetrics(Fragile):
    """Kills its own process the first times that metrics are computed."""

    def __init__(self, folder, deaths):
        super().__init__({})
        self.folder, self.deaths = folder, deaths

    def global_post_process_and_metrics(self, batch):
        tries = len(list(self.folder.iterdir()))
        if tries < self.deaths:
            (self.folder / str(tries)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch, {"tries": tries}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("deaths", [2, 3])
def test_metrics_whose_worker_dies_are_computed_again_at_most_twice(local_ray, tmp_path, deaths):
    with ActorPool(None, DiesInMetrics, 1, {"folder": tmp_path, "deaths": deaths}, name="env.t") as pool:
        environment = EnvironmentPool(pool, task_name="t")
        if deaths == 2:
            assert metrics_checked(environment, "t", {}) == {"tries": 2.0}
        else:
            with pytest.raises(WorkerDiedError, match=r"global_post_process_and_metrics\(\) failed"):
                metrics_checked(environment, "t", {})


async def cancelled_reward(completion):
    """Waits for a call that something else has cancelled, as a client does whose connections are closed."""
    call = asyncio.ensure_future(asyncio.sleep(60))
    call.cancel()
    await call


@pytest.mark.timeout(240)
@pytest.mark.parametrize("in_pool", [False, True])
def test_a_reward_function_whose_own_call_is_cancelled_masks_its_rows(collector, tokenizer, in_pool):
    environment = FunctionEnvironment(functions=named_functions(cancelled_reward))
    if in_pool:
        pool = InProcessPool(FunctionEnvironment, {"functions": named_functions(cancelled_reward)}, name="env.t")
        environment = EnvironmentPool(pool, task_name="t")
    rows = played(collector, tokenizer, environment, 2)
    environment.shutdown()
    assert [(row.done, row.scored) for row in rows] == [(True, False)] * 2
    assert all("CancelledError" in row.failure for row in rows)


@pytest.mark.timeout(240)
def test_a_step_that_raises_cancelled_error_masks_its_row_instead_of_leaving_the_rollouts_waiting(collector, tokenizer):
    rows = played(collector, tokenizer, Fragile({"q1": (ALWAYS, asyncio.CancelledError())}), 3)
    assert [(row.done, row.scored) for row in rows] == [(True, True), (True, False), (True, True)]


def test_a_rollout_that_ends_as_cancelled_without_being_cancelled_ends_the_run():
    async def cancelled():
        raise asyncio.CancelledError

    with pytest.raises(RLCoreError, match="did not cancel it"):
        asyncio.run(gather_or_cancel([cancelled(), asyncio.sleep(0)]))
