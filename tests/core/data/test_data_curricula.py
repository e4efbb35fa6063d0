"""Our prompt samplers against their formulas: bands of pass rates, shares of tasks, stages of values."""

import itertools
import json
from collections import Counter
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import ConfigError, DataError
from rl_train.data.curricula import PassRateBand, Stages, TaskMix
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.mixing import Mixture
from rl_train.data.prompt_sampler import PromptResult, PromptRows

BAND = {"low": 0.25, "high": 0.75, "exploration": 0.25, "rest": 0.5, "new_weight": 0.5}
MIX = {"temperature": 1.0, "min_share": 0.0, "new_weight": 0.5}
STAGES = {"key": "level", "bounds": [1, 2], "at_steps": (), "at_reward": None, "window": 3}


def rows_of(count, *, tasks=("a", "b", "c"), shuffle=True, **options):
    records = [
        {
            "messages": [{"role": "user", "content": "q" * (row + 1)}],
            "extra_env_info": {"level": 1 + row % 3},
            "task_name": tasks[row % len(tasks)],
        }
        for row in range(count)
    ]
    return PromptRows(BatchedDataLoader(records, seed=3, shuffle=shuffle, **options))


def show(sampler, step, rewards):
    sampler.observe([PromptResult(row=row, step=step, rewards=tuple(each)) for row, each in rewards])


class BandByDefinition:
    """The rule of `PassRateBand`, with lists that are searched."""

    def __init__(self, order):
        self.order, self.credit = order, 0.0
        self.estimates, self.ended, self.drawn, self.waiting = {}, {}, {}, Counter()
        self.draws, self.results = 0, 0

    def is_inside(self, row):
        return row in self.estimates and 0.25 <= self.estimates[row] <= 0.75

    def next(self, taken):
        unseen = [row for row in self.order if row not in self.drawn]
        share = fmean(map(self.is_inside, self.estimates)) if unseen and self.estimates else 0.0
        self.credit += max(BAND["exploration"], share)
        explores = self.credit >= 1
        self.credit -= explores
        ready = sorted((row for row in self.ended if not self.waiting[row]), key=self.ended.get)
        inside, outside = [row for row in ready if self.is_inside(row)], [row for row in ready if not self.is_inside(row)]
        rested = [row for row in inside if row not in taken][:1]
        rested = [row for row in rested if self.draws - self.drawn[row] >= BAND["rest"] * len(self.order)]
        late = sorted((row for row in self.waiting if self.waiting[row]), key=self.drawn.get)
        pools = [unseen, outside, rested] if explores else [rested, unseen, outside]
        row = next(row for row in itertools.chain(*pools, inside, late) if row not in taken)
        self.waiting[row] += 1
        self.drawn[row] = self.draws
        self.draws += 1
        return row

    def observe(self, row, rewards):
        if rewards:
            self.estimates[row] = fmean([self.estimates[row], fmean(rewards)]) if row in self.estimates else fmean(rewards)
        self.waiting[row] -= 1
        self.results += 1
        self.ended[row] = self.results


REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=4)


@given(data=st.data(), count=st.integers(4, 12), delay=st.integers(0, 2))
def test_the_band_draws_the_rows_of_its_definition_however_the_draws_are_divided(data, count, delay):
    rows = rows_of(count)
    sampler, expected, shown = PassRateBand(rows, **BAND), BandByDefinition(rows.order(0)), []
    for step in range(1, 9):
        taken = set()
        for part in data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=2)):
            chosen = sampler.choose(part, step=step, excluded=frozenset(taken))
            for row in chosen:
                assert row == expected.next(taken)
                taken.add(row)
                shown.append((step, row))
        state = json.loads(json.dumps(sampler.state_dict()))
        sampler = PassRateBand(rows, **BAND)
        sampler.load_state_dict(state)
        assert sampler.state_dict() == state
        while shown and shown[0][0] <= step - delay:
            row, rewards = shown.pop(0)[1], data.draw(REWARDS)
            show(sampler, step, [(row, rewards)])
            expected.observe(row, rewards)


def tried(sampler, rewards):
    chosen = sampler.choose(len(rewards), step=1, excluded=())
    show(sampler, 1, [(row, [reward]) for row, reward in zip(chosen, rewards, strict=True)])
    return chosen


def test_the_share_of_exploration_is_kept_and_reported():
    sampler = PassRateBand(rows_of(1000), **BAND | {"rest": 0.0})
    first = tried(sampler, [0.5] * 20 + [0.0] * 60 + [1.0] * 20)
    assert sampler.metrics()["explored_frac"] == 1.0
    chosen = sampler.choose(20, step=2, excluded=())
    assert [row for row in chosen if row in first] == first[:15]
    assert sampler.metrics() == {
        "tried_frac": 0.1,
        "below_band_frac": 0.6,
        "in_band_frac": 0.2,
        "above_band_frac": 0.2,
        "explored_frac": 0.25,
    }


def test_while_all_tried_rows_are_in_the_band_the_order_is_that_of_the_data():
    rows = rows_of(60)
    sampler, drawn = PassRateBand(rows, **BAND), []
    for step in range(1, 7):
        chosen = sampler.choose(10, step=step, excluded=())
        show(sampler, step, [(row, [0.4]) for row in chosen])
        drawn += chosen
    assert drawn == rows.order(0)


def test_a_row_of_the_band_rests_before_it_is_drawn_again():
    rows, drawn = rows_of(200), []
    sampler = PassRateBand(rows, **BAND | {"rest": 0.25})
    for step in range(1, 101):
        chosen = sampler.choose(10, step=step, excluded=())
        show(sampler, step, [(row, [0.5 if row < 10 else 0.0]) for row in chosen])
        drawn += chosen
    for row in range(10):
        numbers = [number for number, each in enumerate(drawn) if each == row]
        assert min(later - number for number, later in itertools.pairwise(numbers)) >= 50
    assert sum(row < 10 for row in drawn[200:]) == pytest.approx(4 * 800 * 10 / 200, abs=10), "four times as often as in epochs"


def test_the_band_tries_every_row_of_a_mixture_although_an_epoch_leaves_some_out():
    mixture = Mixture(sizes={"many": 12, "few": 6}, weights={"many": 16.0, "few": 2.0})
    assert len(set(rows_of(18, mixture=mixture).order(0))) < 18
    sampler = PassRateBand(rows_of(18, mixture=mixture), **BAND)
    assert set(sampler.choose(18, step=1, excluded=())) == set(range(18))


@given(
    spreads=st.lists(st.floats(0, 2), min_size=3, max_size=3),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    min_share=st.sampled_from([0.0, 0.1]),
)
def test_shares_of_tasks_follow_the_formula_and_draws_follow_the_shares(spreads, temperature, min_share):
    rows = rows_of(90)
    sampler = TaskMix(rows, temperature=temperature, min_share=min_share, new_weight=0.5)
    show(sampler, 0, [(row, [1 - spread, 1 + spread]) for row, spread in enumerate(spreads)])
    powers = [pstdev([1 - spread, 1 + spread]) ** (1 / temperature) for spread in spreads]
    expected = [1 / 3] * 3 if not any(powers) else [min_share + (1 - 3 * min_share) * each / sum(powers) for each in powers]
    assert list(sampler.shares().values()) == pytest.approx(expected)
    chosen = sampler.choose(30, step=1, excluded=())
    counts = Counter(rows.task_names[row] for row in chosen)
    # The task that is furthest behind is drawn, so each task is less than one draw from its share.
    assert all(abs(counts[task] - 30 * share) < 1 for task, share in zip("abc", expected, strict=True))


def test_the_spread_of_a_task_is_a_running_mean_over_its_groups():
    sampler = TaskMix(rows_of(9), **MIX)
    assert list(sampler.shares().values()) == pytest.approx([1 / 3] * 3)
    show(sampler, 1, [(0, [0.0, 1.0]), (3, [0.5, 0.5]), (1, [0.3]), (2, [0.0, 0.0])])
    assert sampler.metrics()["spread/a"] == 0.25
    assert "spread/b" not in sampler.metrics(), "one reward has no spread"
    # b has the largest spread of the others until it has one.
    assert list(sampler.shares().values()) == pytest.approx([0.5, 0.5, 0.0])


def test_rows_of_a_task_come_once_per_pass_and_rows_that_are_excluded_come_later():
    sampler = TaskMix(rows_of(12, tasks=("a", "b")), **MIX)
    first = sampler.choose(12, step=1, excluded=())
    assert sorted(first) == list(range(12))
    held = first[0]
    later = sampler.choose(11, step=2, excluded={held})
    assert sorted([*later, held]) == list(range(12))
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = TaskMix(rows_of(12, tasks=("a", "b")), **MIX)
    resumed.load_state_dict(state)
    rest = [row for _ in range(25) for row in sampler.choose(1, step=3, excluded=())]
    assert [row for _ in range(25) for row in resumed.choose(1, step=3, excluded=())] == rest
    assert Counter([*first, *later, *rest]) == dict.fromkeys(range(12), 4)


def test_stages_begin_at_their_steps_and_a_step_that_needs_more_rows_takes_those_of_the_next_stage():
    rows = rows_of(30)
    sampler = Stages(rows, **STAGES | {"at_steps": [3, 5]})
    levels = lambda chosen: Counter(rows.values("level")[row] for row in chosen)  # noqa: E731
    for step, known in ((1, {1}), (2, {1}), (3, {1, 2}), (4, {1, 2}), (5, {1, 2, 3})):
        assert levels(sampler.choose(10 * len(known), step=step, excluded=())) == dict.fromkeys(known, 10)
        assert sampler.metrics() == {"stage": len(known)}
    again = Stages(rows, **STAGES | {"at_steps": [3, 5]})
    assert levels(again.choose(14, step=1, excluded=())) == {1: 10, 2: 4}


def test_a_stage_ends_when_the_mean_reward_of_its_last_groups_is_reached():
    rows = rows_of(30)
    sampler = Stages(rows, **STAGES | {"at_reward": 0.6})
    first = sampler.choose(4, step=1, excluded=())
    show(sampler, 1, zip(first, [[0.0], [0.5], [0.5], [0.7]], strict=True))
    assert sampler.metrics() == {"stage": 1.0, "stage_reward": pytest.approx((0.5 + 0.5 + 0.7) / 3)}
    second = sampler.choose(2, step=2, excluded=())
    show(sampler, 2, [(second[0], [0.6]), (second[1], [])])
    assert sampler.metrics() == {"stage": 2.0}
    sampler.choose(2, step=3, excluded=())
    show(sampler, 2, [(second[1], [1.0])] * 3)
    assert sampler.metrics() == {"stage": 2.0}, "rewards of the stage before do not count"
    resumed = Stages(rows, **STAGES | {"at_reward": 0.6})
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    show(resumed, 3, [(0, [1.0])] * 3)
    assert resumed.metrics() == {"stage": 3.0}


def test_without_a_key_stages_are_those_of_the_length_of_the_prompt():
    rows = rows_of(12, shuffle=False)
    sampler = Stages(rows, **STAGES | {"key": None, "bounds": [4.0, 8.0], "at_steps": [2, 3]})
    assert sampler.choose(4, step=1, excluded=()) == [0, 1, 2, 3]
    assert sampler.choose(4, step=2, excluded=()) == [0, 1, 2, 3]
    assert sampler.choose(5, step=2, excluded={0, 1, 2, 3}) == [4, 5, 6, 7, 8]


def test_the_length_of_a_prompt_is_that_of_its_text_without_images_and_without_the_answer():
    image = {"type": "image", "image": "a.png"}
    messages = [
        {"role": "user", "content": [image, {"type": "text", "text": "four"}, image]},
        {"role": "assistant", "content": "an answer"},
    ]
    rows = PromptRows(BatchedDataLoader([{"messages": messages}]))
    assert rows.values(None) == [4]
    with pytest.raises(DataError, match="record 0 has no `messages`"):
        PromptRows(BatchedDataLoader([{"text": "q"}])).values(None)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: TaskMix(rows_of(6, tasks=("a",)), **MIX), ConfigError, "all rows have the task 'a'"),
        (lambda: TaskMix(rows_of(6), **MIX | {"min_share": 0.4}), ConfigError, "there are 3 tasks: at most 0.333"),
        (
            lambda: Stages(rows_of(6), **STAGES | {"key": "depth"}),
            DataError,
            "record 0: 'depth' is not in its metadata (level)",
        ),
        (lambda: Stages(rows_of(6), **STAGES | {"bounds": [0]}), DataError, "stage 1 of data.sampler has no rows"),
        (lambda: Stages(rows_of(6), **STAGES | {"bounds": [1, 1.5]}), DataError, "values of level are from 1 to 3"),
        (lambda: Stages(rows_of(6), **STAGES | {"bounds": [1, 3]}), DataError, "stage 3 of data.sampler has no rows"),
    ],
)
def test_data_that_a_sampler_cannot_use_are_an_error(make, error, says):
    with pytest.raises(error) as raised:
        make()
    assert says in str(raised.value)
