"""Finished rollouts of unfinished groups survive a kill: a resumed run samples only the missing ones, with their seeds."""

import asyncio
import itertools
import json
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled_sources import scheduled_source

from rl_train.config.data_sections import SamplerConfig
from rl_train.data.curricula import make_sampled_prompts
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.rollouts.collect import RolloutLoop
from rl_train.rollouts.records import load_groups
from rl_train.rollouts.source import Selection

PROMPTS, GROUP, STEPS = 2, 3, 6
ROWS = 64


class Engine:
    """The part of an engine that a source calls."""

    version = 0

    def prepare_for_generation(self): ...

    def await_weights(self): ...


class Collector:
    """A process that plays each rollout in turns of its event loop, as many as `delays` has for the next one.

    The log-probability of the first token is the number of the process. The second token has the weights at the end.
    """

    def __init__(self, process, delays, failing=()):
        self.environments, self.generation, self.loop = {}, Engine(), RolloutLoop()
        self.process, self.delays, self.failing, self.played = process, delays, failing, []

    async def play(self, trajectories, *, stream):
        await asyncio.gather(*(self.play_one(row) for row in trajectories))

    async def play_one(self, row):
        name, began = (row.ordinal, row.sample), self.generation.version
        assert [message["role"] for message in row.message_log] == ["user"], "it begins from its prompt"
        self.played.append(name)
        await cycles(next(self.delays))
        ended = self.generation.version
        row.add_answer(
            "a",
            torch.tensor([1, 2]),
            torch.tensor([-float(self.process), -1.0 / 3]),
            weight_version=began,
            token_versions=torch.tensor([began, ended]),
        )
        row.add_rewards({"reward": float(row.sample)})
        if name in self.failing or row.ordinal in self.failing:
            row.fail("ConnectionError: no response", "")
        row.finished = True


async def cycles(number):
    for _ in range(number):
        await asyncio.sleep(0)


def loader():
    datums = [
        {
            "message_log": [{"role": "user", "content": "q", "token_ids": torch.tensor([index])}],
            "length": 1,
            "extra_env_info": {"answer": index},
            "task_name": "t",
            "idx": index,
            "loss_multiplier": 1.0,
        }
        for index in range(ROWS)
    ]
    return BatchedDataLoader(datums, batch_size=PROMPTS, seed=5, collate=list)


def source_of(collector, k, ahead, *, sampler=None, group_size=GROUP, greedy_baseline=False):
    prompts = loader()
    sampled = None
    if sampler is not None:
        sampled = make_sampled_prompts(SamplerConfig(name=sampler, delay=None), prompts, max_staleness=k)
    return scheduled_source(
        collector,
        prompts,
        weight_version=lambda: collector.generation.version,
        group_size=group_size,
        demand=PROMPTS,
        max_staleness=k,
        ahead=ahead,
        max_failed_share=1.0,
        sampled=sampled,
        greedy_baseline=greedy_baseline,
    )


def rows_in(folder):
    """The rows of a checkpoint: by ordinal and sample, the number of the process that sampled them."""
    if not (folder / "groups.json").exists():
        return {}
    limits = json.loads((folder / "groups.json").read_text())["limits"]
    return {name_of(row): process_of(row) for group in load_groups(folder, limits) for row in group.rows}


def name_of(row):
    return row.ordinal, row.sample


def process_of(row):
    return -int(row.sampled_messages[0]["generation_logprobs"][0])


class Run:
    """A run whose processes are killed after steps of the test's choice, and continue from the last checkpoint."""

    def __init__(self, folder, delays, failing, selection, **options):
        self.folder, self.delays, self.failing = folder, itertools.cycle(delays), failing
        self.selection, self.options = selection, options
        self.processes, self.trained, self.checkpoint, self.expected = 0, {}, None, {}
        self.start()

    def start(self):
        self.processes += 1
        self.collector = Collector(self.processes, self.delays, self.failing)
        self.source = source_of(self.collector, **self.options)

    def step(self, number, pause):
        self.collector.generation.version = 10 * (number - 1)  # a step takes several optimizer steps
        taken = self.source.take(number, PROMPTS, self.selection)
        assert taken.metrics["staleness/steps_max"] <= self.options["k"]
        self.trained[number] = taken.trajectories
        self.collector.loop.run(cycles(pause))

    def save(self, number):
        folder = self.folder / f"{self.processes}-{number}"
        state = json.dumps(self.source.state_dict())
        self.source.save_files(folder)
        self.checkpoint = number, state, folder, rows_in(folder)

    def kill_and_resume(self):
        """Returns the step of the checkpoint."""
        self.end()
        number, state, folder, self.expected = self.checkpoint
        self.trained = {step: rows for step, rows in self.trained.items() if step <= number}
        self.start()
        self.source.load_state_dict(json.loads(state))
        self.source.load_files(folder)
        return number

    def end(self):
        self.collector.loop.close()
        assert len(set(self.collector.played)) == len(self.collector.played), "a rollout was sampled twice by one process"
        assert not self.expected.keys() & set(self.collector.played), "a saved rollout was sampled again"
        for rows in self.trained.values():
            for row in rows:
                assert process_of(row) == self.expected.get(name_of(row), process_of(row)), "a saved rollout was replaced"


def check(run):
    """Every group is trained once and whole with its baseline, and failed rows stay failed."""
    rows = [row for step in run.trained.values() for row in step]
    names = [name_of(row) for row in rows]
    assert len(set(names)) == len(names)
    ordinals = {ordinal for ordinal, _ in names}
    assert set(names) == set(itertools.product(ordinals, range(GROUP)))
    assert all((row.failure is not None) == (name_of(row) in run.failing) for row in rows)
    assert all(row.metadata == {"answer": row.index} for row in rows)
    assert {row.baseline_reward for row in rows} == {-1.0 if run.options.get("greedy_baseline") else None}
    return ordinals


NEVER, SAVE, SAVE_AND_KILL, KILL = range(4)
CASES = {
    "k": st.integers(1, 3),
    "ahead": st.integers(1, 3),
    "delays": st.lists(st.integers(0, 60), min_size=1, max_size=12),
    "after_steps": st.lists(st.tuples(st.integers(NEVER, KILL), st.integers(0, 80)), min_size=3, max_size=12),
    "failing": st.sets(st.one_of(st.integers(0, 15), st.tuples(st.integers(0, 15), st.integers(0, GROUP - 1))), max_size=6),
    "failing_baselines": st.sets(st.integers(0, 15), max_size=3),
    "greedy_baseline": st.booleans(),
    "dull": st.sets(st.integers(0, 15), max_size=4),
    "oversampling": st.sampled_from([1.0, 1.5]),
    "sampler": st.sampled_from([None, "pass_rate_band"]),
}


@settings(max_examples=50, deadline=None)
@given(**CASES)
def test_each_rollout_is_trained_once_and_no_saved_one_is_sampled_again_however_often_a_run_is_killed(
    k, ahead, delays, after_steps, failing, failing_baselines, greedy_baseline, dull, oversampling, sampler
):
    without_baseline = failing_baselines if greedy_baseline else set()
    failing |= {(ordinal, -1) for ordinal in without_baseline}
    select = Selection(keep=lambda group: group[0].ordinal not in dull, max_groups=1000, oversampling=oversampling, advice="")
    selection = select if dull or oversampling > 1 else None
    plan, number = iter(after_steps), 0
    with tempfile.TemporaryDirectory() as folder:
        options = {"k": k, "ahead": min(ahead, k), "sampler": sampler, "greedy_baseline": greedy_baseline}
        run = Run(Path(folder), delays, failing, selection, **options)
        while number < STEPS:
            action, pause = next(plan, (NEVER, 0))
            run.step(number := number + 1, pause)
            if action in (SAVE, SAVE_AND_KILL):
                run.save(number)
            if action in (SAVE_AND_KILL, KILL) and run.checkpoint is not None:
                number = run.kill_and_resume()
        run.end()
    trained = check(run)
    assert not trained & without_baseline, "a group without the reward of its greedy rollout was trained"
    if oversampling == 1:
        lost = {ordinal for ordinal in failing if isinstance(ordinal, int)} | dull | without_baseline
        alive = set(run.source.state_dict()["again"])
        assert trained | alive | lost >= set(range(max(trained) + 1)), "a prompt was lost"


FIRST_BATCH = [0] * PROMPTS * GROUP
SLOW = 1000


def started(folder, rest=(0, 0, SLOW)):
    """A run with a checkpoint of step 1, when the two batches of later steps are in progress, with these delays of rows."""
    run = Run(folder, [*FIRST_BATCH, *(2 * PROMPTS * rest)], (), None, k=2, ahead=2)
    run.step(1, pause=100)
    run.save(1)
    return run


def test_a_restored_group_keeps_its_age_and_is_trained_within_the_bound(tmp_path):
    run = started(tmp_path)
    saved = run.checkpoint[-1]
    assert len(saved) == 2 * PROMPTS * (GROUP - 1), "each group in progress misses its last row"
    run.delays = itertools.cycle([*[SLOW] * 2 * PROMPTS, *FIRST_BATCH])  # the groups that begin now end first
    run.kill_and_resume()
    run.step(2, pause=0)
    run.save(2)
    run.kill_and_resume()
    run.step(3, pause=0)
    run.end()
    restored = {ordinal for ordinal, _ in saved}
    late = [name for step in (2, 3) for name in map(name_of, run.trained[step]) if name[0] in restored]
    assert len(late) == 2 * PROMPTS * GROUP, "groups of step 1 are trained until step 3"


def test_unfinished_groups_begin_again_if_the_config_has_changed(tmp_path, caplog):
    run = started(tmp_path)
    number, state, folder, saved = run.checkpoint
    run.end()
    run.start()
    run.source.load_state_dict(json.loads(state))
    with caplog.at_level("INFO", "rlcore"):
        run.source.load_files(folder, config_changed=True)
    assert "unfinished groups of the checkpoint are sampled again, because the config has changed" in caplog.text
    run.step(number + 1, pause=0)
    run.end()
    assert {process_of(row) for row in run.trained[number + 1]} == {2}
    assert saved.keys() <= set(run.collector.played)


def test_finished_groups_are_sampled_again_if_one_of_their_rows_becomes_a_greedy_one(tmp_path):
    run = started(tmp_path, rest=(0, 0, 0))
    number, state, folder, saved = run.checkpoint
    run.end()
    run.options |= {"group_size": GROUP - 1, "greedy_baseline": True}
    run.start()
    run.source.load_state_dict(json.loads(state))
    run.source.load_files(folder, config_changed=True)
    run.step(number + 1, pause=0)
    run.end()
    assert {row.baseline_reward for row in run.trained[number + 1]} == {-1.0}
    assert {ordinal for ordinal, _ in saved} & {ordinal for ordinal, _ in run.collector.played}


def test_a_checkpoint_written_before_rows_were_marked_as_finished_is_restored(tmp_path):
    run = started(tmp_path, rest=(0, 0, 0))
    number, _, folder, saved = run.checkpoint
    content = json.loads((folder / "groups.json").read_text())
    for group in content["groups"]:
        for row in group["rows"]:
            del row["finished"]
    (folder / "groups.json").write_text(json.dumps(content))
    run.kill_and_resume()
    assert len(saved) == 2 * PROMPTS * GROUP
    run.save(number)
    assert run.checkpoint[-1] == saved, "the next checkpoint has them too"
    run.step(number + 1, pause=0)
    run.end()
    check(run)


def test_rows_in_progress_are_not_saved(tmp_path):
    run = started(tmp_path, rest=(SLOW, SLOW, SLOW))
    assert run.checkpoint[-1] == {}
    assert not run.checkpoint[2].exists()
    run.end()
