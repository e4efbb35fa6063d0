"""Steps with answers from the dataset: their number, no repetition after a resume, and their rows."""

import json
from pathlib import Path

import pytest
import torch

from rl_core.data.tokenizer import load_tokenizer
from rl_envs.arithmetic import ArithmeticDataset
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.processors import conversation_datum
from rl_train.rollouts.batches import TrainingBatches
from rl_train.rollouts.source import MixedRolloutSource, Rollouts, RolloutSource, SampledSteps

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"


class Numbered(RolloutSource):
    """Rollouts that consist of their number, instead of an engine: the test is about which source is used."""

    def __init__(self):
        self.drawn = 0

    def take(self, step, groups, selection=None):
        self.drawn += 1
        return Rollouts(batch={"drawn": self.drawn}, metrics={"rollout/rows": 4.0}, trajectories=[])

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL)


@pytest.fixture
def source(tokenizer):
    def make(fraction, seed=3):
        sums = ArithmeticDataset({"num_samples": 12, "with_response": True})
        rows = [conversation_datum(sums[i], idx=i, tokenizer=tokenizer) for i in range(len(sums))]
        loader = BatchedDataLoader(rows, batch_size=4, seed=seed, drop_last=True, collate=list)
        given = TrainingBatches(loader, pad_token_id=tokenizer.pad_token_id)
        return MixedRolloutSource(Numbered(), given, group_size=2, samples=SampledSteps(seed=seed, fraction=fraction))

    return make


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.9, 1.0])
def test_the_policy_samples_in_the_configured_fraction_of_steps(fraction):
    samples = SampledSteps(seed=3, fraction=fraction)
    drawn = [samples(step) for step in range(4000)]
    # Four standard deviations of a draw of 4000; 0 if it is certain.
    assert sum(drawn) / 4000 == pytest.approx(fraction, abs=4 * (fraction * (1 - fraction) / 4000) ** 0.5)


def test_the_choice_of_on_policy_steps_depends_only_on_the_seed():
    one, again, other = (SampledSteps(seed=seed, fraction=0.5) for seed in (3, 3, 4))
    drawn = [one(step) for step in range(50)]
    assert drawn == [again(step) for step in range(50)]
    assert drawn != [other(step) for step in range(50)]


def test_steps_with_dataset_answers_train_on_them_and_have_no_trajectory(source, tokenizer):
    rollouts = source(0.0).take(1, 2)
    assert (rollouts.metrics, rollouts.trajectories) == ({"rollout/sampled": 0.0}, [])
    batch = rollouts.batch
    assert batch.size == 4
    for ids, length, mask in zip(batch["input_ids"], batch["input_lengths"], batch["token_mask"], strict=True):
        text = tokenizer.decode(ids[:length])
        answer = tokenizer.decode(ids[mask > 0], skip_special_tokens=True)
        question, _, rest = text.partition("=")
        assert answer.strip() == rest.removesuffix(tokenizer.eos_token).strip(), question
    assert torch.equal(batch["sample_mask"], torch.ones(4))


def test_a_resume_continues_with_the_next_rows_of_both_sources(source):
    def batches_of(steps):
        return [
            (r.metrics["rollout/sampled"], r.batch["drawn"] if r.metrics["rollout/sampled"] else r.batch["input_ids"].tolist())
            for r in steps
        ]

    never_stopped = source(0.5)
    whole = batches_of(never_stopped.take(step, 2) for step in range(1, 21))
    assert {sampled for sampled, _ in whole[:9]} == {sampled for sampled, _ in whole[9:]} == {0.0, 1.0}
    first = source(0.5)
    for step in range(1, 10):
        first.take(step, 2)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = source(0.5)
    resumed.load_state_dict(state)
    assert batches_of(resumed.take(step, 2) for step in range(10, 21)) == whole[9:]
