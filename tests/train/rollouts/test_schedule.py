"""The staleness bound under adversarial schedules: dropped groups, restarts, kills, short steps, steps without demand."""

import random
from collections import Counter

import pytest

from rl_core.errors import RLCoreError
from rl_train.rollouts.schedule import Schedule

STEPS = 12
_MAX_WAITS = 3
"""Rounds without a running group and without a batch that are considered a stall."""


class FreesPlacesTooEarly(Schedule):
    """A mutation: a batch makes space when it is taken, before the refit of its step."""

    @property
    def space(self):
        limit = sum(self.demand(step) for step in range(self.next_step, self.next_step + self.ahead + 1))
        return max(limit - len(self._began), 0)


class Play:
    """One schedule, whose events are drawn from a seed.

    Attributes:
        staleness: of each group that was trained.
    """

    def __init__(self, seed, schedule):
        self.chance = chance = random.Random(seed)
        self.k = chance.choice([0, 1, 2, 3])
        size, without_demand = chance.choice([1, 2, 3]), chance.choice([0.0, 0.4])
        skipped = [chance.random() < without_demand for _ in range(STEPS + 2 * self.k + 20)]
        self.plan = schedule(
            max_staleness=self.k,
            ahead=chance.randint(0, self.k),
            demand=lambda step: 0 if skipped[step] or step > STEPS else size,
        )
        self.drops, self.restarts, self.kills = chance.choice([0.0, 0.3]), chance.choice([0.0, 0.2]), chance.choice([0.0, 0.05])
        self.plan.oversampling = chance.choice([1.0, 1.0, 1.5, 2.0])
        self.slow_newest, self.short, self.idle_trainer = chance.random() * 0.9, chance.choice([0.0, 0.3]), chance.random()
        self.began, self.sampled_with, self.used, self.staleness = 0, {}, set(), []

    def outcome(self):
        """What happened: "ok", "beyond" if a group exceeded the bound, "stall" or "infeasible"."""
        for step in range(1, STEPS + 1):
            self.plan.refit(step, self.plan.demand(step))
            try:
                batch = self.batch()
            except RLCoreError:
                return "infeasible"
            if batch is None:
                return "stall"
            self.train(step, batch)
        return "beyond" if max(self.staleness) > self.k else "ok"

    def begin(self):
        for _ in range(self.plan.space):
            self.sample(self.began)
            self.began += 1

    def sample(self, group):
        self.plan.begin(group)
        self.sampled_with[group] = self.plan.weights_step

    def batch(self):
        """The next batch; None if the schedule waits for nothing."""
        waits = 0
        while waits <= _MAX_WAITS:
            self.begin()
            running = self.plan.in_progress
            if running:
                self.advance(running)
            if self.chance.random() < self.kills:  # a resumed run restarts what had not ended
                for group in self.plan.in_progress:
                    self.sample(group)
            if running and self.chance.random() < self.idle_trainer:
                continue  # the trainer is late
            batch = self.plan.batch()
            if batch is not None:
                return batch
            waits += not running
        return None

    def advance(self, running):
        group = max(running) if self.chance.random() < self.slow_newest else self.chance.choice(running)
        event = self.chance.random()
        if event < self.drops:
            self.plan.drop(group)
            self.used.add(group)
        elif event < self.drops + self.restarts:  # its rows are sampled again from the start
            self.sample(group)
        else:
            self.plan.end(group)

    def train(self, step, batch):
        if batch and self.chance.random() < self.short:
            batch = self.plan._due() or batch[:1]  # a short batch still contains the groups that must be in it
        assert not self.used.intersection(batch)
        self.staleness += [step - self.sampled_with[group] for group in batch]
        self.used.update(batch)
        self.plan.take(batch)
        surplus = self.plan.surplus
        assert not surplus or self.plan.oversampling > 1
        assert not set(surplus) & set(self.plan.in_progress), "a slow group would be dropped because it is slow"
        for group in surplus:
            self.plan.drop(group)
            self.used.add(group)
        if self.chance.random() < 0.5:
            self.begin()  # during training, before the next refit


def outcomes(seeds, schedule=Schedule):
    return Counter(Play(seed, schedule).outcome() for seed in seeds)


def test_no_group_exceeds_the_staleness_bound_and_no_schedule_stalls():
    assert outcomes(range(1500)) == {"ok": 1500}


@pytest.mark.full("twenty thousand schedules take 10 s; the default run plays 1,500 of them")
def test_no_group_exceeds_the_staleness_bound_in_20_000_schedules():
    assert outcomes(range(20_000)) == {"ok": 20_000}


def test_a_batch_that_makes_space_before_its_refit_breaks_the_bound():
    broken = outcomes(range(600), FreesPlacesTooEarly)
    assert broken["beyond"] + broken["infeasible"] > 30


def test_the_schedules_reach_the_bound():
    reached = Counter()
    for seed in range(300):
        played = Play(seed, Schedule)
        played.outcome()
        reached[played.k] += max(played.staleness) == played.k
    assert all(reached[k] > 10 for k in range(4))


def begin_all(plan, first=0):
    """Begin as many groups as there is space for, numbered from `first`."""
    for group in range(first, first + plan.space):
        plan.begin(group)


def test_without_staleness_a_batch_has_all_groups_that_began_and_none_begins_during_training():
    plan = Schedule(max_staleness=0, ahead=0, demand=lambda step: 3)
    plan.refit(1, plan.demand(1))
    begin_all(plan)
    plan.end(2)
    plan.end(0)
    assert plan.batch() is None
    plan.end(1)
    assert sorted(plan.batch()) == [0, 1, 2]
    plan.take([0, 1, 2])
    assert plan.space == 0
    plan.refit(2, plan.demand(2))
    assert plan.space == 3


def test_a_batch_waits_for_the_groups_that_a_later_step_has_no_space_for():
    plan = Schedule(max_staleness=1, ahead=1, demand=lambda step: 2)
    plan.refit(1, plan.demand(1))
    begin_all(plan)
    assert plan.in_progress == [0, 1, 2, 3]
    plan.end(3)
    plan.end(2)
    plan.take(plan.batch())
    plan.refit(2, plan.demand(2))
    begin_all(plan, first=4)
    assert plan.in_progress == [0, 1, 4, 5]
    plan.end(4)
    plan.end(5)
    assert plan.batch() is None, "groups 0 and 1 began with the weights of step 1 and must be trained in step 2"
    plan.end(0)
    plan.end(1)
    assert plan.batch() == [0, 1]


def test_no_group_begins_that_no_step_would_train():
    plan = Schedule(max_staleness=2, ahead=2, demand=lambda step: 2 if step <= 2 else 0)
    plan.refit(1, plan.demand(1))
    assert plan.space == 4


def test_a_demand_that_shrinks_after_groups_have_begun_is_an_error():
    sizes = {1: 2, 2: 2}
    plan = Schedule(max_staleness=1, ahead=1, demand=lambda step: sizes.get(step, 0))
    plan.refit(1, 2)
    begin_all(plan)
    for group in range(4):
        plan.end(group)
    plan.take([0, 1])
    plan.refit(2, 1)
    with pytest.raises(RLCoreError, match="would exceed the staleness bound of 1 steps"):
        plan.batch()
