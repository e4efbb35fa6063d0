"""The seed of a row depends only on the seed of the run, the prompt's ordinal, the sample and the turn."""

import itertools

import pytest
import torch
from scheduled_sources import scheduled_source

from rl_train.data.dataloader import BatchedDataLoader
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.evaluation import Evaluation
from rl_train.rollouts.trajectory import SampleStream, rollout_seed

ROWS, GROUP, TURNS = 6, 2, 2


@pytest.fixture
def prompts(tokenizer):
    """A shuffled loader of six prompts with the given batch size."""

    def datum(index):
        ids = torch.tensor(tokenizer(f"<u>q{index}\n<a>")["input_ids"])
        return {
            "message_log": [{"role": "user", "content": f"q{index}", "token_ids": ids}],
            "length": len(ids),
            "extra_env_info": {"turns": TURNS},
            "task_name": "count",
            "idx": index,
            "loss_multiplier": 1.0,
            "stop_strings": None,
        }

    rows = [datum(index) for index in range(ROWS)]
    return lambda batch_size, shuffle=True: BatchedDataLoader(
        rows, batch_size=batch_size, shuffle=shuffle, seed=3, drop_last=shuffle, collate=list
    )


@pytest.fixture
def collector(tokenizer, engine_for, environments):
    """A collector, and the seeds its engine got by turn."""

    def make():
        engine = engine_for(lambda text: ("ok[EOS]", False))
        made = Collector(
            generation=engine,
            environments=environments,
            tokenizer=tokenizer,
            seed=7,
            max_turns={"judge": 1, "count": TURNS},
            max_total_length=200,
        )
        return made, lambda: [seed for call in engine.asked for seed in call["seeds"]]

    return make


def drawn(collector, loader, draws, *, steps=None):
    made, seeds = collector()
    source = scheduled_source(made, loader, group_size=GROUP)
    for step, _ in zip(steps or itertools.repeat(1), range(draws), strict=False):
        source.take(step, loader.batch_size)
    return seeds(), source


def expected(ordinals, stream=SampleStream.TRAINING):
    return {
        rollout_seed(7, stream, ordinal=ordinal, sample=sample, turn=turn)
        for ordinal in ordinals
        for sample in range(GROUP)
        for turn in range(TURNS)
    }


def test_several_draws_of_one_step_have_different_seeds(collector, prompts):
    # As dynamic sampling draws: again and again for step 1, past the end of the epoch.
    seeds, _ = drawn(collector, prompts(2), 5)
    assert len(set(seeds)) == 5 * 2 * GROUP * TURNS
    assert set(seeds) == expected(range(10))


def test_seeds_do_not_depend_on_the_step_that_draws_or_on_how_many_prompts_it_draws(collector, prompts):
    first, _ = drawn(collector, prompts(2), 3)
    assert drawn(collector, prompts(2), 3, steps=itertools.count(40))[0] == first
    assert set(drawn(collector, prompts(3), 2)[0]) == set(first)


def test_a_resumed_source_continues_with_the_seeds_of_one_that_was_never_stopped(collector, prompts):
    whole, _ = drawn(collector, prompts(2), 4)
    before, source = drawn(collector, prompts(2), 1)
    made, after = collector()
    resumed = scheduled_source(made, prompts(2), group_size=GROUP)
    resumed.load_state_dict(source.state_dict())
    for step in range(2, 5):
        resumed.take(step, 2)
    assert before + after() == whole


def test_a_resume_with_another_number_of_prompts_repeats_no_seed(collector, prompts):
    before, source = drawn(collector, prompts(2), 2)
    made, after = collector()
    resumed = scheduled_source(made, prompts(5), group_size=GROUP)
    # Two rows are left, but the batch of five in this epoch has only one of them; the others are from the next epoch.
    resumed.load_state_dict(source.state_dict())
    resumed.take(1, 5)
    assert set(after()) == expected([4, *range(ROWS, ROWS + 4)])
    assert not set(after()) & set(before)


def test_validation_has_the_same_seeds_each_time_and_none_of_training(collector, prompts):
    made, seeds = collector()
    evaluation = Evaluation(
        collector=made, prompts=prompts(4, shuffle=False), max_samples=None, samples_per_prompt=GROUP, greedy=False
    )
    evaluation.play()
    once = seeds()
    evaluation.play()
    assert seeds() == once + once
    assert set(once) == expected(range(ROWS), SampleStream.VALIDATION)
    assert not set(once) & expected(range(100))


def test_the_seeds_of_rollouts_are_fixed_for_good():
    # Another value would make every earlier run irreproducible.
    assert rollout_seed(42, SampleStream.TRAINING, ordinal=0, sample=0, turn=0) == 3583828936680256475
    assert rollout_seed(42, SampleStream.VALIDATION, ordinal=10**12, sample=7, turn=3) == 5821040224604380593
