"""Rollouts of several turns with the Transformers engine: two runs, and both ways to sample, give equal tokens in float32."""

import asyncio
import itertools
from pathlib import Path

import pytest
import torch

from rl_backends_hf.generation import HuggingFaceGeneration
from rl_backends_hf.policy import HuggingFacePolicy
from rl_core.data.generation_io import SETS
from rl_core.data.tokenizer import load_tokenizer
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.trajectory import SampleStream, Trajectory, to_batch

MODEL = Path(__file__).parents[2] / "examples" / "addition" / "model"
TURNS = (1, 3, 2, 3, 1, 2)


class Sums(EnvironmentInterface):
    """Asks for another sum until a row has had its turns."""

    def step(self, message_log_batch, metadata):
        left = [state["turns"] - 1 for state in metadata]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"1{n}+2="} for n in left],
            metadata=[{"turns": n} for n in left],
            next_stop_strings=[None] * len(left),
            rewards=torch.ones(len(left)),
            terminateds=torch.tensor([n == 0 for n in left]),
        )


class Batches(HuggingFaceGeneration):
    """Samples complete batches only."""

    streams_rows = False


class Unsteady(HuggingFaceGeneration):
    """Turns begin in another order than they are requested."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.delays = itertools.cycle([7, 0, 3, 11, 1])

    async def generate_async(self, data, greedy=False):
        for _ in range(next(self.delays)):
            await asyncio.sleep(0)
        async for row, output in super().generate_async(data, greedy):
            yield row, output


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL)


def rollouts_of(engine_class, tokenizer, **filters):
    rows = []
    for number, turns in enumerate(TURNS):
        text = f"{number + 3}+{number}="
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        row = {"group_id": number, "index": number, "ordinal": number, "sample": 0, "task_name": "sums"}
        log = [{"role": "user", "content": text, "token_ids": ids}]
        rows.append(Trajectory(message_log=log, metadata={"turns": turns}, **row))
    engine = engine_class(str(MODEL), max_new_tokens=6, max_model_len=64, torch_dtype="float32", **filters)
    collector = Collector(
        generation=engine,
        environments={"sums": Sums()},
        tokenizer=tokenizer,
        seed=5,
        max_turns={"sums": 4},
        max_total_length=64,
        with_sets=bool(filters),
    )
    collector.collect(rows, stream=SampleStream.TRAINING)
    engine.shutdown()
    assert [row.turns for row in rows] == list(TURNS)
    return to_batch(rows)


def test_rows_have_the_same_tokens_whether_they_are_sampled_together_or_one_by_one(tokenizer):
    together, again, unsteady = (rollouts_of(engine, tokenizer) for engine in (Batches, HuggingFaceGeneration, Unsteady))
    for other in (again, unsteady):
        assert torch.equal(other["input_ids"], together["input_ids"])
        assert torch.equal(other["token_mask"], together["token_mask"])
        # Rows that are decoded together differ in the last bits.
        torch.testing.assert_close(other["generation_logprobs"], together["generation_logprobs"], rtol=0, atol=1e-4)


def test_turns_that_are_sampled_with_filters_have_the_log_probabilities_of_the_policy(tokenizer):
    filters = {"top_p": 0.9, "top_k": 6, "min_p": 0.02}
    policy = HuggingFacePolicy(str(MODEL), generation={"backend": "hf", **filters}, max_total_sequence_length=64)
    for engine in (HuggingFaceGeneration, Batches):
        batch = rollouts_of(engine, tokenizer, **filters)
        trained, sampled = batch["token_mask"] > 0, batch["generation_logprobs"]
        # Float32 on both sides, in another order.
        torch.testing.assert_close(policy.get_logprobs(batch)["logprobs"][trained], sampled[trained], rtol=0, atol=1e-5)
        del batch[SETS]
        assert float((policy.get_logprobs(batch)["logprobs"] - sampled)[trained].abs().mean()) > 0.01
    policy.shutdown()
