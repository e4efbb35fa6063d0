"""A rollout whose history is rewritten has several segments: each is a row, and only sampled tokens are trained."""

import copy
import itertools

import pytest
import torch

from rl_core.data.schema import SCHEMA
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.records import rollout_records, summarize
from rl_train.rollouts.source import start_rollouts
from rl_train.rollouts.trajectory import (
    SampleStream,
    join_segments,
    optimizer_batches,
    split_segments,
    to_batch,
)

REWRITING = (
    "{% for m in messages %}<{{ m['role'][0] }}>"
    "{% if m['role'] == 'assistant' %}{{ m['content'].split('|')[-1] }}{{ eos_token }}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
"""Drops what an earlier answer has before its last `|`, as templates drop reasoning."""


class Talk(EnvironmentInterface):
    """Each `x` of an answer is a point; ends after metadata["turns"] turns."""

    def step(self, message_log_batch, metadata):
        left = [state["turns"] - 1 for state in metadata]
        n = len(left)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"go {x}"} for x in left],
            metadata=[{"turns": x} for x in left],
            next_stop_strings=[None] * n,
            rewards=torch.tensor([float(log[-1]["content"].count("x")) for log in message_log_batch]),
            terminateds=torch.tensor([float(x == 0) for x in left]),
        )


@pytest.fixture
def rewriting(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = REWRITING
    return tokenizer


@pytest.fixture
def played(engine_for):
    def play(tokenizer, answers, turns=(3,), group=1, *, history="template", longest=200):
        prompts = [
            {
                "message_log": [
                    {"role": "user", "content": f"q{n}", "token_ids": torch.tensor(tokenizer(f"<u>q{n}\n<a>")["input_ids"])}
                ],
                "extra_env_info": {"turns": each},
                "task_name": "talk",
                "idx": n,
                "loss_multiplier": 1.0,
            }
            for n, each in enumerate(turns)
        ]
        texts = itertools.cycle(answers)
        engine = engine_for(lambda _: (next(texts), False))
        rows = start_rollouts(prompts, group)
        Collector(
            generation=engine,
            environments={"talk": Talk()},
            tokenizer=tokenizer,
            seed=7,
            max_turns={"talk": 9},
            max_total_length=longest,
            history=history,
        ).collect(rows, stream=SampleStream.TRAINING)
        return rows, [text for call in engine.asked for text in call["texts"]]

    return play


def test_a_template_that_rewrites_earlier_turns_starts_segments_whose_masks_are_exact(rewriting, played):
    [row], read = played(rewriting, ["rx|a[EOS]", "b[EOS]", "sx|c[EOS]"])
    # Turn 2 reads turn 1 without "rx|", so it starts a segment. Turn 3 reads turn 2 as it was sampled.
    first, second = "<u>q0\n<a>rx|a[EOS]", "<u>q0\n<a>a[EOS]\n<u>go 2\n<a>b[EOS]\n<u>go 1\n<a>sx|c[EOS]"
    assert read == ["<u>q0\n<a>", "<u>q0\n<a>a[EOS]\n<u>go 2\n<a>", second.removesuffix("sx|c[EOS]")]
    batch = to_batch([row])
    for key in ("input_ids", "token_mask", "token_turns", "token_versions", "generation_logprobs"):
        assert str(batch[key].dtype) == f"torch.{SCHEMA[key].dtype}"
        assert batch[key].shape == batch["input_ids"].shape
    assert [rewriting.decode(ids[:n]) for ids, n in zip(batch["input_ids"], batch["input_lengths"], strict=True)] == [
        first,
        second,
    ]
    sampled = [[("rx|a[EOS]", 1)], [("b[EOS]", 2), ("sx|c[EOS]", 3)]]
    for number, parts in enumerate(sampled):
        text = (first, second)[number]
        expected = [0] * len(rewriting(text)["input_ids"])
        for part, turn in parts:
            start = len(rewriting(text[: text.rindex(part)])["input_ids"])
            ids = rewriting(part)["input_ids"]
            expected[start : start + len(ids)] = [turn] * len(ids)
            logprobs = batch["generation_logprobs"][number, start : start + len(ids)]
            assert logprobs.tolist() == [-float(start + i) for i in range(len(ids))]
        length = int(batch["input_lengths"][number])
        assert batch["token_turns"][number, :length].tolist() == expected
        assert batch["token_mask"][number].bool().tolist() == [turn > 0 for turn in expected] + [False] * (
            batch["input_ids"].shape[1] - length
        )
        assert batch["token_versions"][number, :length].tolist() == [3 if turn else -1 for turn in expected]
    assert batch["rollout_ids"].tolist() == [0, 0]
    assert batch["turn_rewards"] == [[1.0, 0.0, 1.0]] * 2
    assert batch["rewards"].tolist() == [2.0, 2.0]
    assert [message["content"] for message in row.conversation()] == ["q0", "rx|a", "go 2", "b", "go 1", "sx|c"]


def test_a_template_that_keeps_earlier_turns_gives_the_rows_of_sampled_history(tokenizer, played):
    answers = ["a[EOS]", "bx", "c[EOS]", "x"]
    [rendered], [sampled] = (played(tokenizer, answers, (4,), history=history)[0] for history in ("template", "as_sampled"))
    one, other = to_batch([rendered]), to_batch([sampled])
    assert one["input_ids"].shape[0] == 1
    for key, values in other.items():
        if isinstance(values, torch.Tensor):
            assert torch.equal(one[key], values), key


def test_sampled_history_names_the_setting_that_supports_templates_which_rewrite(tokenizer, played):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = REWRITING.replace("{{ eos_token }}", "{% if not loop.last %}!{% endif %}{{ eos_token }}")
    with pytest.raises(DataError, match=r"Set rollout\.history to `template`"):
        played(tokenizer, ["abcdef[EOS]"], history="as_sampled")


def test_a_tokenizer_without_a_template_cannot_render_the_history(tokenizer, played):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"rollout\.history is `template`, but the tokenizer has no chat template"):
        played(tokenizer, ["a"])


def test_the_length_limit_applies_to_each_segment(rewriting, played):
    long = "rrrrrrrrrrrr|a[EOS]"
    [row], _ = played(rewriting, [long], (3,), longest=45)
    assert (row.turns, row.truncated, len(row.segments)) == (3, False, 3)
    [row], _ = played(rewriting, [long], (3,), longest=30)
    # The rendered prompt of turn 3 has 30 tokens.
    assert (row.turns, row.truncated, len(row.segments)) == (2, True, 2)


def test_records_and_metrics_count_rollouts(rewriting, played):
    rows, _ = played(rewriting, ["rx|a[EOS]", "b[EOS]", "sx|c[EOS]", "d[EOS]"], (3, 1))
    batch = to_batch(rows)
    policy = torch.arange(batch["input_ids"].numel(), dtype=torch.float32).view(batch["input_ids"].shape)
    records = rollout_records(rows, torch.tensor([0.5, -0.5]), policy)
    assert [record["advantage"] for record in records] == [0.5, -0.5]
    for number, record in enumerate(records):
        mine = batch["rollout_ids"] == number
        mask = batch["token_mask"][mine] > 0
        assert record["tokens"] == batch["input_ids"][mine][mask].tolist()
        assert record["policy_logprobs"] == policy[mine][mask].tolist()
        assert record["turn_versions"] == [3] * record["turns"]
    one, other = records
    assert one["messages"] == rows[0].conversation()
    assert other["segments"] is None
    lengths = batch["input_lengths"][batch["rollout_ids"] == 0].tolist()
    assert [len(segment["tokens"]) for segment in one["segments"]] == lengths
    for segment, turns in zip(one["segments"], batch["token_turns"], strict=False):
        assert segment["turns"] == turns[: len(segment["turns"])].tolist()
    metrics = summarize(rows)
    assert (metrics["rollout/rows"], metrics["rollout/segments"]) == (2.0, len(batch["rollout_ids"]) / 2)
    assert metrics["reward/mean"] == 1.0


def test_a_rewritten_beginning_gets_a_separate_prompt_id(tokenizer, played):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ messages|length }}" + REWRITING
    rows, _ = played(tokenizer, ["r|a[EOS]"], (3, 1), 2)
    batch = to_batch(rows)
    first = batch["prompt_id"][:6].tolist()
    assert [first[0], first[3]] == [0, 0]
    own = {*first} - {0}
    assert len(own) == 4
    assert max(own) < -1
    assert batch["prompt_id"][6:].tolist() == [1, 1]


def test_joined_segments_have_the_tokens_of_a_rollout_in_one_row(rewriting, played):
    rows, _ = played(rewriting, ["rx|a[EOS]", "b[EOS]"], (3, 1, 2))
    batch = to_batch(rows)
    joined = join_segments(batch)
    assert joined.size == 3
    assert joined["rollout_ids"].tolist() == [0, 1, 2]
    for number in range(3):
        mine = batch["rollout_ids"] == number
        turns, mask = batch["token_turns"][mine], batch["token_mask"][mine] > 0
        assert joined["token_turns"][number][joined["token_mask"][number] > 0].tolist() == turns[mask].tolist()
        assert joined["input_lengths"][number] == batch["input_lengths"][mine].sum()
    single = batch.select_indices([2])
    assert join_segments(single) is single
    assert split_segments(single) is single


def equal(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_splitting_is_the_inverse_of_joining_also_of_some_rollouts(rewriting, played):
    rows, _ = played(rewriting, ["rx|a[EOS]", "b[EOS]"], (3, 1, 2))
    batch = to_batch(rows)
    split = split_segments(join_segments(batch))
    assert split.keys() == batch.keys()
    assert [key for key in batch if not equal(split[key], batch[key])] == []
    some = split_segments(join_segments(batch).select_indices([2, 0]))
    numbers = batch["rollout_ids"].tolist()
    chosen = batch.select_indices([row for rollout in (2, 0) for row, number in enumerate(numbers) if number == rollout])
    assert [
        key for key in ("rollout_ids", "prompt_id", "input_lengths", "message_log") if not equal(some[key], chosen[key])
    ] == []
    width = some["input_ids"].shape[1]
    assert torch.equal(some["input_ids"], chosen["input_ids"][:, :width])


def test_what_is_added_to_joined_rollouts_is_split(rewriting, played):
    rows, _ = played(rewriting, ["rx|a[EOS]", "b[EOS]"], (3, 1, 2))
    joined = join_segments(to_batch(rows))
    joined["advantages"] = joined["token_mask"] * torch.tensor([1.0, 2.0, 3.0]).unsqueeze(-1)
    joined["candidates"] = joined["input_ids"].unsqueeze(-1).repeat(1, 1, 4)
    joined["sample_mask"] = torch.tensor([1.0, 0.0, 1.0])
    split = split_segments(joined)
    number = split["rollout_ids"]
    assert torch.equal(split["advantages"], split["token_mask"] * (number + 1.0).unsqueeze(-1))
    assert torch.equal(split["candidates"][..., 3], split["input_ids"])
    assert torch.equal(split["sample_mask"], (number != 1).float())


@pytest.mark.parametrize(("per_update", "ranks"), [(None, 1), (2, 1), (2, 4), (1, 2), (64, 1)])
def test_an_optimizer_step_trains_on_whole_rollouts(rewriting, played, per_update, ranks):
    rows, _ = played(rewriting, ["rx|a[EOS]", "b[EOS]", "s|c[EOS]"], (3, 1, 2, 3, 1))
    batch = to_batch(rows)
    laid_out, gbs = optimizer_batches(batch, per_update, multiple_of=ranks)
    assert gbs % ranks == 0
    assert laid_out.size % gbs == 0
    assert laid_out.size // gbs == -(-5 // (per_update or 5))
    steps = [laid_out.slice(start, start + gbs).select_indices(range(gbs)) for start in range(0, laid_out.size, gbs)]
    found = [sorted(set(step["rollout_ids"][step["sample_mask"] > 0].tolist())) for step in steps]
    size = per_update or 5
    assert found == [list(range(5))[start : start + size] for start in range(0, 5, size)]
    trained = laid_out.select_indices(laid_out["sample_mask"].nonzero().flatten().tolist())
    for key in ("input_ids", "token_mask", "token_turns"):
        assert torch.equal(trained[key], batch[key])
    assert laid_out["token_mask"][laid_out["sample_mask"] == 0].sum() == 0


def test_rollouts_of_one_segment_are_passed_on_unchanged(tokenizer, played):
    rows, _ = played(tokenizer, ["a[EOS]"], (2, 1))
    batch = to_batch(rows)
    assert optimizer_batches(batch, 1, multiple_of=4) == (batch, None)
