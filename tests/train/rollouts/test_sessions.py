"""Environments that keep state between the steps of a rollout."""

import asyncio
import os
import signal
from concurrent.futures import Future

import pytest
import torch

from rl_core.errors import DataError, RLCoreError
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_core.interfaces.environment import keeps_sessions
from rl_train.pools.actor_pool import ActorPool
from rl_train.pools.pool import InProcessPool
from rl_train.rollouts.activity import ActivityLog, RolloutActivity
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.environment_pool import EnvironmentPool
from rl_train.rollouts.records import environment_times, rollout_records
from rl_train.rollouts.sessions import Session, StepQueue
from rl_train.rollouts.trajectory import SampleStream, Trajectory, to_batch


class Notebook(EnvironmentInterface):
    """Each session counts its steps in this object; `fails` steps of a record raise, over all sessions."""

    def __init__(self):
        self.open, self.closed, self.failures = {}, [], {}

    def reset(self, metadata):
        self.open[metadata["session_id"]] = 0
        if "greeting" not in metadata:
            return None
        return {"role": "environment", "content": metadata["greeting"]}

    def step(self, message_log_batch, metadata):
        for state in metadata:
            if self.failures.setdefault(state["name"], state.get("fails", 0)):
                self.failures[state["name"]] -= 1
                raise ValueError("the kernel is gone")
            self.open[state["session_id"]] += 1
        counts = [self.open[state["session_id"]] for state in metadata]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"{count}"} for count in counts],
            metadata=[{key: value for key, value in state.items() if key != "session_id"} for state in metadata],
            next_stop_strings=[None] * len(counts),
            rewards=torch.tensor([float(count) for count in counts]),
            terminateds=torch.tensor([count == state["turns"] for count, state in zip(counts, metadata, strict=True)]),
            answers=[str(os.getpid())] * len(counts),
        )

    def close(self, session):
        self.closed.append(session)
        del self.open[session]


def play(tokenizer, engine, environment, records, *, longest=200, retries=0, turns=4):
    rows = [
        Trajectory(
            message_log=[{"role": "user", "content": "q", "token_ids": torch.tensor(tokenizer("<u>q\n<a>")["input_ids"])}],
            metadata=record,
            task_name="notebook",
            group_id=number,
            index=number,
            ordinal=number,
            sample=0,
        )
        for number, record in enumerate(records)
    ]
    collector = Collector(
        generation=engine,
        environments={"notebook": environment},
        tokenizer=tokenizer,
        seed=7,
        max_turns={"notebook": turns},
        max_total_length=longest,
        retries=retries,
    )
    collector.collect(rows, stream=SampleStream.TRAINING)
    return rows


@pytest.fixture
def engine(engine_for):
    return engine_for(lambda _: ("ok[EOS]", False))


def test_only_classes_with_reset_or_close_keep_sessions(environments):
    assert keeps_sessions(Notebook)
    assert not keeps_sessions(type(environments["count"]))


def test_each_rollout_has_a_session_that_is_closed_when_it_ends(tokenizer, engine):
    notebook = Notebook()
    rows = play(tokenizer, engine, notebook, [{"name": "a", "turns": 2}, {"name": "b", "turns": 3}])
    assert [row.reward for row in rows] == [1 + 2, 1 + 2 + 3]
    assert [name.partition("-")[2] for name in notebook.closed] == ["training-0-0-0", "training-1-0-0"]
    again = Notebook()
    play(tokenizer, engine, again, [{"name": "a", "turns": 1}])
    assert not set(again.closed) & set(notebook.closed), "a resumed run must not use the sessions of a killed one"
    assert notebook.open == {}


def test_the_session_of_a_truncated_rollout_is_closed(tokenizer, engine):
    notebook = Notebook()
    [row] = play(tokenizer, engine, notebook, [{"name": "a", "turns": 4}], longest=12)
    assert row.truncated
    assert len(notebook.closed) == 1


def test_the_messages_of_reset_are_part_of_the_prompt(tokenizer, engine):
    rows = play(tokenizer, engine, Notebook(), [{"name": "a", "turns": 1, "greeting": "hello"}, {"name": "b", "turns": 1}])
    assert engine.asked[0]["texts"] == ["<u>q\n<u>hello\n<a>", "<u>q\n<a>"]
    assert [message["role"] for message in rows[0].conversation()] == ["user", "environment", "assistant"]
    batch = to_batch(rows)
    assert batch["token_mask"].sum(-1).tolist() == [3, 3]


def test_a_prompt_that_leaves_no_space_after_reset_is_not_scored(tokenizer, engine):
    rows = play(
        tokenizer, engine, Notebook(), [{"name": "a", "turns": 1, "greeting": "h" * 40}, {"name": "b", "turns": 1}], longest=30
    )
    assert [row.scored for row in rows] == [False, True]
    assert "leaves no space for an answer within 30" in rows[0].failure


def test_a_rollout_whose_session_fails_starts_again_in_another_session(tokenizer, engine):
    notebook = Notebook()
    [row] = play(tokenizer, engine, notebook, [{"name": "a", "turns": 2, "fails": 1}], retries=1)
    assert (row.scored, row.reward, row.turns, row.retries) == (True, 3.0, 2, 1)
    assert [message["role"] for message in row.conversation()] == ["user", "assistant", "environment", "assistant"]
    assert [name.partition("-")[2] for name in notebook.closed] == ["training-0-0-0", "training-0-0-1"]
    # The same seeds as in the first attempt.
    assert engine.asked[0]["seeds"] == engine.asked[1]["seeds"]


def test_a_session_that_fails_in_every_attempt_is_not_scored_and_is_closed(tokenizer, engine):
    notebook = Notebook()
    rows = play(tokenizer, engine, notebook, [{"name": "a", "turns": 2, "fails": 9}, {"name": "b", "turns": 1}], retries=2)
    assert rows[0].failure == "ValueError: the kernel is gone"
    assert notebook.open == {}


def test_a_session_that_fails_in_every_attempt_fails_no_other_session_of_its_calls(tokenizer, engine):
    notebook = Notebook()
    records = [{"name": str(n), "turns": 2, "fails": 9 * (n % 8 == 1)} for n in range(16)]
    rows = play(tokenizer, engine, notebook, records, retries=1)
    assert [row.failure for row in rows].count(None) == 14
    assert [row.metadata["name"] for row in rows if not row.scored] == ["1", "9"]
    assert {row.restarts for row in rows} == {1}
    assert notebook.open == {}


def test_the_error_of_a_call_says_how_many_rows_shared_it(tokenizer, engine):
    records = [{"name": "a", "turns": 2, "fails": 9}, {"name": "b", "turns": 1}]
    rows = play(tokenizer, engine, Notebook(), records)
    assert {row.failure for row in rows} == {"ValueError: the kernel is gone"}
    assert all(
        row.failure_details.endswith("2 rows shared the call that failed; any of them may be the cause.") for row in rows
    )
    [alone, _] = play(tokenizer, engine, Notebook(), records, retries=1)
    assert "shared" not in alone.failure_details


def test_a_rollout_whose_reset_fails_in_every_attempt_is_stored_without_a_completion(tokenizer, engine):
    class Unreachable(Notebook):
        def reset(self, metadata):
            raise ConnectionError("no kernel")

    rows = play(tokenizer, engine, Unreachable(), [{"name": "a", "turns": 1}], retries=1)
    assert rows[0].failure == "ConnectionError: no kernel"
    [record] = rollout_records(rows)
    assert (record["prompt"], record["completion"], record["tokens"], record["turns"]) == ("q", "", [], 0)


class WithoutActors(InProcessPool):
    """All replacements of its actors failed."""

    @property
    def actors(self):
        return []


def test_a_session_for_which_no_worker_could_be_started_fails_only_its_rollout(tokenizer, engine):
    environment = EnvironmentPool(WithoutActors(Notebook), task_name="notebook", keeps_sessions=True)
    [row] = play(tokenizer, engine, environment, [{"name": "a", "turns": 1}])
    assert not to_batch([row])["sample_mask"].any()
    assert "no process of the environment could be started" in row.failure_details


def test_an_error_that_ends_the_run_closes_the_sessions_of_the_other_rollouts(tokenizer, engine):
    class Strict(Notebook):
        def step(self, message_log_batch, metadata):
            if len(self.open) == 3:
                raise DataError("the records have no solutions")
            return super().step(message_log_batch, metadata)

    notebook = Strict()
    with pytest.raises(DataError, match="no solutions"):
        play(tokenizer, engine, notebook, [{"name": str(n), "turns": 2} for n in range(3)], retries=2)
    assert notebook.open == {}
    assert len(notebook.closed) == 3


def test_an_error_of_close_is_logged(tokenizer, engine, caplog):
    class Stuck(Notebook):
        def close(self, session):
            raise OSError("device busy")

    [row] = play(tokenizer, engine, Stuck(), [{"name": "a", "turns": 1}])
    assert row.scored
    assert "env.notebook: close() failed for session " in caplog.text
    assert "-training-0-0-0: device busy" in caplog.text


def test_sessions_need_metadata_with_names(tokenizer, engine):
    with pytest.raises(DataError, match="must be a dictionary, found str"):
        play(tokenizer, engine, Notebook(), ["text"])


def test_what_reset_returns_is_checked(tokenizer, engine):
    with pytest.raises(RLCoreError, match=r"'notebook' returned 3 as content of the observation of reset\(\)"):
        play(tokenizer, engine, Notebook(), [{"name": "a", "turns": 1, "greeting": "x"}, {"name": "b", "greeting": 3}])


class Mortal(Notebook):
    """Kills its process in the second step of the first session of one record."""

    def step(self, message_log_batch, metadata):
        for state in metadata:
            if state.get("kills") and state["session_id"].endswith("-0") and self.open[state["session_id"]] == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(message_log_batch, metadata)


@pytest.mark.slow
@pytest.mark.ray
def test_all_steps_of_a_session_run_in_one_process_and_end_with_it(local_ray, tokenizer, engine_for):
    engine = engine_for(lambda _: ("ok[EOS]", False))
    with ActorPool(None, Mortal, 2, name="env.notebook") as pool:
        environment = EnvironmentPool(pool, task_name="notebook", keeps_sessions=True)
        plain = [{"name": str(n), "turns": 3} for n in range(4)]
        rows = play(tokenizer, engine, environment, plain, retries=1)
        # Two sessions per process, and each counts its own steps there.
        assert [row.reward for row in rows] == [6.0] * 4
        assert sorted(row.answer for row in rows) == sorted(str(pid) for pid in [*pool.pids()] * 2)
        rows = play(tokenizer, engine, environment, [{"name": "k", "turns": 3, "kills": 1}, *plain[1:]], retries=1)
        assert [row.reward for row in rows] == [6.0] * 4
        assert {row.retries for row in rows} == {0, 1}


class HeldPool(InProcessPool):
    """Calls end when the test lets them."""

    def __init__(self, max_concurrency):
        super().__init__(Notebook, max_concurrency=max_concurrency)
        self.calls = []

    def submit(self, method, *args, **options):
        self.calls.append((args, Future()))
        return self.calls[-1][1]

    def end(self, number):
        (_, metadata), future = self.calls[number]
        for state in metadata:
            self._group.worker.open.setdefault(state["session_id"], 0)
        future.set_result(self._run("step", self.calls[number][0]))


@pytest.mark.parametrize(("max_concurrency", "waits", "steps"), [(1, [0.0, 7.0], [10.0, 5.0]), (2, [0.0, 0.0], [10.0, 12.0])])
def test_the_time_in_which_a_row_waits_for_its_worker_is_measured_apart_from_its_steps(
    monkeypatch, max_concurrency, waits, steps
):
    now = [0.0]
    monkeypatch.setattr("rl_train.rollouts.sessions.perf_counter", lambda: now[0])
    pool = HeldPool(max_concurrency)
    queue = StepQueue(EnvironmentPool(pool, task_name="notebook", keeps_sessions=True), "notebook")
    log = ActivityLog()
    rows = [
        Trajectory(message_log=[], metadata=None, task_name="notebook", group_id=0, index=0, ordinal=0, sample=number)
        for number in range(2)
    ]
    sessions = [Session(queue, row, activity=RolloutActivity(log, "row", "driver"), name=str(row.sample)) for row in rows]

    def waiting_rows():
        return [row for rows in queue._waiting.values() for row in rows]

    async def begin(number):
        sessions[number]._worker = pool.actors[0]
        step = asyncio.ensure_future(sessions[number].step([], {"name": number, "turns": 1}))
        await until(
            lambda: step.done() or any(row.metadata["name"] == number for row in waiting_rows()) or len(pool.calls) > number
        )
        return step

    async def until(holds):
        for _ in range(100):
            if holds() and not queue._is_scheduled:
                return
            await asyncio.sleep(0)
        raise AssertionError("it did not happen")

    async def play():
        first = await begin(0)
        now[0] = 3.0
        second = await begin(1)
        now[0] = 10.0
        pool.end(0)
        await until(lambda: first.done() and len(pool.calls) == 2)
        now[0] = 15.0
        pool.end(1)
        await until(second.done)

    asyncio.run(play())
    assert [row.environment_wait_s for row in rows] == waits
    assert [row.environment_step_s for row in rows] == steps


def test_the_times_of_a_rollouts_steps_are_metrics_and_survive_a_restart(tokenizer, engine):
    rows = play(tokenizer, engine, EnvironmentPool(InProcessPool(Notebook), task_name="notebook"),
                [{"name": "a", "turns": 2}, {"name": "b", "turns": 1}])  # fmt: skip
    assert all(row.environment_step_s > 0.0 for row in rows)
    rows[0].environment_wait_s, rows[0].environment_step_s, rows[1].environment_wait_s, rows[1].environment_step_s = 1, 2, 3, 4
    assert environment_times(rows) == {"env/notebook/wait_s": 2.0, "env/notebook/step_s": 3.0}
    prompt = Trajectory(message_log=[], metadata=None, task_name="notebook", group_id=0, index=0, ordinal=0, sample=0)
    rows[0].restart(prompt)
    assert (rows[0].retries, rows[0].environment_wait_s, rows[0].environment_step_s) == (1, 1, 2)
    assert environment_times([prompt]) == {}


class CountedFuture(asyncio.Future):
    """Counts how often a future of any row is asked whether it is done."""

    asked = 0

    def done(self):
        CountedFuture.asked += 1
        return super().done()


def test_a_call_of_a_concurrent_environment_reads_only_the_rows_that_it_starts(environments, monkeypatch):
    monkeypatch.setattr(asyncio.BaseEventLoop, "create_future", lambda loop: CountedFuture(loop=loop))
    asked = {}

    async def play(queue, number):
        rows = [
            Trajectory(message_log=[], metadata=None, task_name="count", group_id=0, index=0, ordinal=0, sample=sample)
            for sample in range(number)
        ]
        await asyncio.gather(*(queue.step(row, [], {"turns": 1}) for row in rows))

    for number in (32, 256):
        with InProcessPool(type(environments["count"]), max_concurrency=2) as pool:
            CountedFuture.asked = 0
            asyncio.run(play(StepQueue(EnvironmentPool(pool, task_name="count"), "count"), number))
        asked[number] = CountedFuture.asked
    # Eight times as many rows; if each call read all waiting rows, 64 times as often.
    assert 0 < asked[256] <= 16 * asked[32]
