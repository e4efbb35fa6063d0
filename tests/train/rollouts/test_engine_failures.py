"""Rows that the engine could not sample: only they fail, with the engine's reason."""

import pytest
import torch

from rl_core.errors import ConfigError
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.trajectory import SampleStream, Trajectory, to_batch

REASON = "POST http://host/v1/completions failed: status 503"


class Scores(EnvironmentInterface):
    def step(self, message_log_batch, metadata):
        rows = len(metadata)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "go"}] * rows,
            metadata=metadata,
            next_stop_strings=[None] * rows,
            rewards=torch.ones(rows),
            terminateds=torch.ones(rows),
        )


def unreliable(engine, *, streams, reads_messages=False):
    """The engine, but rows whose prompt has a `?` are not sampled."""
    base = type(engine)

    class Unreliable(base):
        seen = ()

        def generate(self, data, greedy=False):
            self.seen += tuple(data.get("messages", ()))
            output = base.generate(self, data, greedy)
            failures = [REASON if "?" in text else None for text in self.asked[-1]["texts"]]
            return output if failures == [None] * len(failures) else type(output)({**output, "failures": failures})

    async def generate_async(self, data, greedy=False):
        yield 0, self.generate(data, greedy)

    if streams:
        Unreliable.generate_async = generate_async
    Unreliable.reads_messages = reads_messages
    engine.__class__ = Unreliable
    return engine


def rows_of(tokenizer, *texts):
    rows = []
    for number, text in enumerate(texts):
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        message = {"role": "user", "content": text, "token_ids": ids}
        rows.append(
            Trajectory(
                message_log=[message], metadata={}, task_name="t", group_id=number, index=number, ordinal=number, sample=0
            )
        )
    return rows


@pytest.mark.parametrize("turns", [1, 2], ids=["batches", "rows"])
@pytest.mark.parametrize("environments", [{"t": Scores()}, {}], ids=["environment", "none"])
def test_a_row_that_the_engine_could_not_sample_is_not_scored_and_the_others_are(tokenizer, engine_for, turns, environments):
    engine = unreliable(engine_for(lambda _: ("ok[EOS]", False)), streams=turns > 1)
    rows = rows_of(tokenizer, "a", "b?", "c")
    collector = Collector(
        generation=engine, environments=environments, tokenizer=tokenizer, seed=1, max_turns={"t": turns}, max_total_length=50
    )
    collector.collect(rows, stream=SampleStream.TRAINING)
    assert [row.failure for row in rows] == [None, f"RowNotSampledError: {REASON}", None]
    assert to_batch(rows)["sample_mask"].tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("turns", [1, 2], ids=["batches", "rows"])
def test_an_engine_that_reads_messages_gets_the_conversation(tokenizer, engine_for, turns):
    engine = unreliable(engine_for(lambda _: ("ok[EOS]", False)), streams=turns > 1, reads_messages=True)
    collector = Collector(
        generation=engine,
        environments={"t": Scores()},
        tokenizer=tokenizer,
        seed=1,
        max_turns={"t": turns},
        max_total_length=50,
    )
    collector.collect(rows_of(tokenizer, "a", "b"), stream=SampleStream.TRAINING)
    assert list(engine.seen) == [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]


def test_an_engine_that_reads_messages_is_refused_if_the_environment_has_tools(tokenizer, engine_for):
    engine = unreliable(engine_for(lambda _: ("ok[EOS]", False)), streams=False, reads_messages=True)
    collector = Collector(
        generation=engine, environments={"t": Scores()}, tokenizer=tokenizer, seed=1, max_turns={"t": 1}, max_total_length=50
    )
    rows = rows_of(tokenizer, "a")
    rows[0].tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(ConfigError, match="would not know them"):
        collector.collect(rows, stream=SampleStream.TRAINING)
