"""Rollouts turn by turn: tokens stay as sampled, rows keep their order, environments see only their own tasks."""

from dataclasses import replace

import pytest
import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError, RLCoreError
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_train.data.processors import prompt_datum
from rl_train.rewards.environment import FunctionEnvironment, named_functions
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.records import environment_metrics, expected_answer, rollout_records, summarize
from rl_train.rollouts.schedule import staleness, staleness_metrics
from rl_train.rollouts.source import start_rollouts
from rl_train.rollouts.trajectory import SampleStream, to_batch


def prompts(tokenizer, *rows):
    return [
        {
            "message_log": [
                {"role": "user", "content": text, "token_ids": torch.tensor(tokenizer(f"<u>{text}\n<a>")["input_ids"])}
            ],
            "extra_env_info": info,
            "task_name": task,
            "idx": number,
            "loss_multiplier": 1.0,
        }
        for number, (text, task, info) in enumerate(rows)
    ]


def collector(engine, environments, tokenizer, *, turns=4, longest=200):
    return Collector(
        generation=engine,
        environments=environments,
        tokenizer=tokenizer,
        seed=7,
        max_turns={"judge": 1, "count": turns},
        max_total_length=longest,
    )


def finished(script_text):
    return lambda text: (script_text + "[EOS]", False)


def test_several_environments_share_a_batch_and_rows_keep_their_order(tokenizer, engine_for, environments):
    rows = start_rollouts(
        prompts(
            tokenizer, ("q0", "judge", {"expected": "yes"}), ("q1", "count", {"turns": 2}), ("q2", "judge", {"expected": "no"})
        ),
        2,
    )
    collector(engine_for(finished("yes")), environments, tokenizer).collect(rows, stream=SampleStream.TRAINING)
    assert [row.reward for row in rows] == [1.25, 1.25, 2.0, 2.0, 0.25, 0.25]
    assert [row.turns for row in rows] == [1, 1, 2, 2, 1, 1]
    assert [row.group_id for row in rows] == [0, 0, 1, 1, 2, 2]
    assert summarize(rows)["reward/right"] == pytest.approx(2 / 6)
    assert environment_metrics(rows, environments)["rollout/accuracy"] == 0.5


def test_the_training_sequence_of_several_turns_is_the_template_applied_to_the_conversation(
    tokenizer, engine_for, environments
):
    [row] = start_rollouts(prompts(tokenizer, ("q", "count", {"turns": 3})), 1)
    engine = engine_for(finished("ok"))
    collector(engine, environments, tokenizer).collect([row], stream=SampleStream.TRAINING)
    said = [
        {**message, "role": "user" if message["role"] == "environment" else message["role"]} for message in row.conversation()
    ]
    whole = tokenizer.apply_chat_template(said, tokenize=False).removesuffix("\n")
    assert tokenizer.decode(row.token_ids()) == whole
    assert [len(call["texts"]) for call in engine.asked] == [1, 1, 1]
    assert engine.asked[1]["texts"][0] == whole[: len(engine.asked[1]["texts"][0])]


def test_an_answer_without_eos_is_closed_before_the_next_turn(tokenizer, engine_for, environments):
    [row] = start_rollouts(prompts(tokenizer, ("q", "count", {"turns": 2})), 1)
    collector(engine_for(lambda text: ("ok!", False)), environments, tokenizer).collect([row], stream=SampleStream.TRAINING)
    assert "ok![EOS]\n<u>go 1\n<a>ok!" in tokenizer.decode(row.token_ids())


def test_only_sampled_tokens_are_trained_and_carry_their_log_probabilities(tokenizer, engine_for, environments):
    rows = start_rollouts(prompts(tokenizer, ("question", "judge", {"expected": "a"}), ("q", "count", {"turns": 2})), 1)
    collector(engine_for(finished("ab")), environments, tokenizer).collect(rows, stream=SampleStream.TRAINING)
    batch = to_batch(rows)
    for i, row in enumerate(rows):
        at = 0
        for message in row.message_log:
            n = len(message["token_ids"])
            sampled = message["role"] == "assistant"
            assert batch["token_mask"][i, at : at + n].tolist() == [float(sampled)] * n
            expected = [-float(at + k) for k in range(n)] if sampled else [0.0] * n
            assert batch["generation_logprobs"][i, at : at + n].tolist() == expected
            at += n
        assert at == batch["input_lengths"][i]
        assert batch["token_mask"][i, at:].sum() == 0
    assert batch["weight_version"].tolist() == [3, 3]
    versions = torch.where(batch["token_mask"] > 0, 3, -1)
    for i, length in enumerate(batch["input_lengths"]):
        assert torch.equal(batch["token_versions"][i, :length], versions[i, :length])


class Tools(EnvironmentInterface):
    """Answers the first turn with two tool results and records what it reads."""

    def step(self, message_log_batch, metadata):
        self.read = message_log_batch
        n = len(metadata)
        results = [{"role": "tool", "content": f"r{i}", "tool_call_id": f"c{i}", "name": "f"} for i in range(2)]
        ends = torch.tensor([float(any(m["role"] == "tool" for m in log)) for log in message_log_batch])
        return EnvironmentReturn([results] * n, metadata, [None] * n, torch.zeros(n), ends)


def test_an_observation_of_several_messages_is_read_by_model_and_environment_and_repeats_the_rows_tools(tokenizer, engine_for):
    shows = (
        "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ c['function'] | tojson }}{% endfor %}"
        "{% if m['role'] != 'assistant' %}{% for t in tools or [] %}|{{ t['function']['name'] }}{% endfor %}{% endif %}"
    )
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m['content'] }}", shows)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    offered, without = prompts(tokenizer, ("q", "judge", {}), ("p", "judge", {}))
    rows = start_rollouts([{**offered, "tools": tools}, without], 1)
    environment = Tools()
    one = collector(engine_for(finished("ok")), {"judge": environment}, tokenizer)
    replace(one, max_turns={"judge": 2}).collect(rows, stream=SampleStream.TRAINING)
    assert [tokenizer.decode(row.token_ids()).split("<a>", 1)[1] for row in rows] == [
        "ok[EOS]\n<t>r0|f\n<t>r1|f\n<a>ok[EOS]",
        "ok[EOS]\n<t>r0\n<t>r1\n<a>ok[EOS]",
    ]
    assert environment.read[0][2:4] == [
        {"role": "tool", "content": f"r{i}", "tool_call_id": f"c{i}", "name": "f"} for i in range(2)
    ]
    assert to_batch(rows)["token_mask"].sum() == 2 * 2 * len("ok") + 2 * 2
    assert rollout_records(rows)[0]["messages"] == rows[0].conversation()


def test_each_turn_keeps_the_version_of_its_weights_and_the_row_has_the_oldest(tokenizer, engine_for, environments):
    [row] = start_rollouts(prompts(tokenizer, ("q", "count", {"turns": 3})), 1)
    engine = engine_for(finished("ok"))

    def newer(text):
        engine.version += 1
        return "ok[EOS]", False

    engine.script = newer
    collector(engine, environments, tokenizer).collect([row], stream=SampleStream.TRAINING)
    batch = to_batch([row])
    assert batch["weight_version"].tolist() == [4]
    assert batch["token_versions"][batch["token_mask"] > 0].unique_consecutive().tolist() == [4, 5, 6]
    assert staleness(batch, 6).tolist() == [2]
    [record] = rollout_records([row])
    assert record["turn_versions"] == [4, 5, 6]
    assert record["turn_rewards"] == [{"reward": 1.0}] * 3


def test_staleness_counts_only_tokens_that_are_trained():
    batch = BatchedDataDict(
        {
            "token_versions": torch.tensor([[-1, 2, 5], [-1, 3, -1], [-1, 0, 0]]),
            "token_mask": torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 1.0, 1.0]]),
            "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
        }
    )
    assert staleness(batch, 6).tolist() == [1, 3]
    assert staleness_metrics(batch, 6) == {"staleness/mean": 2.0, "staleness/max": 3.0}
    assert staleness_metrics(batch.select_indices([2]), 6) == {}


def test_a_rollout_without_room_for_the_next_turn_ends_as_truncated(tokenizer, engine_for, environments):
    [row] = start_rollouts(prompts(tokenizer, ("q", "count", {"turns": 3})), 1)
    collector(engine_for(finished("ok")), environments, tokenizer, longest=15).collect([row], stream=SampleStream.TRAINING)
    assert row.truncated
    assert row.turns == 1
    assert row.message_log[-1]["role"] == "assistant"


def test_a_truncated_answer_is_scored_and_ends_the_rollout(tokenizer, engine_for, environments):
    [row] = start_rollouts(prompts(tokenizer, ("q", "count", {"turns": 3})), 1)
    collector(engine_for(lambda text: ("ok", True)), environments, tokenizer).collect([row], stream=SampleStream.TRAINING)
    assert (row.turns, row.reward, row.truncated) == (1, 1.0, True)


def test_the_environments_stop_strings_reach_the_next_turn(tokenizer, engine_for, environments):
    engine = engine_for(finished("x"))
    [row] = start_rollouts(prompts(tokenizer, ("q", "count", {"turns": 2})), 1)
    collector(engine, environments, tokenizer).collect([row], stream=SampleStream.TRAINING)
    assert [call["stop_strings"] for call in engine.asked] == [[None], [["!"]]]


def test_a_task_without_an_environment_is_refused_before_anything_is_sampled(tokenizer, engine_for, environments):
    engine = engine_for(finished("x"))
    rows = start_rollouts(prompts(tokenizer, ("q", "chess", {})), 1)
    with pytest.raises(ConfigError, match=r"\['chess'\].*\['count', 'judge'\]"):
        collector(engine, environments, tokenizer).collect(rows, stream=SampleStream.TRAINING)
    assert engine.asked == []


def test_without_environments_a_rollout_is_one_answer_without_reward(tokenizer, engine_for):
    engine = engine_for(finished("x"))
    rows = start_rollouts(prompts(tokenizer, ("q", "chess", {}), ("r", "count", {"turns": 2})), 2)
    collector(engine, {}, tokenizer).collect(rows, stream=SampleStream.TRAINING)
    assert [(row.turns, row.done, row.answer, row.reward_parts) for row in rows] == [(1, True, None, {})] * 4
    assert len(engine.asked) == 1
    metrics = summarize(rows)
    assert metrics["rollout/rows"] == 4
    assert not [name for name in metrics if name.startswith("reward/")]
    assert environment_metrics(rows, {}) == {}
    assert to_batch(rows)["token_mask"].sum() == sum(row.num_sampled_tokens() for row in rows)


def test_a_reward_that_is_not_a_number_stops_the_run_and_names_the_task(tokenizer, engine_for, environments):
    class Broken(type(environments["judge"])):
        def step(self, logs, metadata):
            return EnvironmentReturn(*super().step(logs, metadata))._replace(rewards=torch.tensor([float("nan")]))

    rows = start_rollouts(prompts(tokenizer, ("q", "judge", {"expected": "a"})), 1)
    with pytest.raises(RLCoreError, match="'judge' returned the reward nan for row 0"):
        collector(engine_for(finished("x")), {"judge": Broken()}, tokenizer).collect(rows, stream=SampleStream.TRAINING)


def test_records_of_rollouts_hold_what_a_log_needs(tokenizer, engine_for, environments):
    rows = start_rollouts(prompts(tokenizer, ("q", "judge", {"expected": "a"})), 2)
    collector(engine_for(finished("a")), environments, tokenizer).collect(rows, stream=SampleStream.TRAINING)
    [record, _] = rollout_records(rows, torch.tensor([0.5, -0.5]))
    assert record["prompt"] == "q"
    assert record["completion"] == "a"
    assert record["advantage"] == 0.5
    assert record["reward_parts"] == {"right": 1.0, "bonus": 0.25}
    assert len(record["tokens"]) == len(record["logprobs"]) == 2
    assert record["weight_version"] == 3
    assert record["expected_answer"] is None


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"expected_answer": "1/2", "ground_truth": "3"}, "1/2"),
        ({"ground_truth": 3}, 3),
        ({"expected_answer": None, "ground_truth": "3"}, "3"),
        ({"expected_answer": ["a", "b"]}, "['a', 'b']"),
        ({"solution": "3"}, None),
        ({"expected_answer": "4\ud83d"}, "4\\ud83d"),
        (None, None),
    ],
)
def test_records_of_rollouts_hold_the_expected_answer(metadata, expected):
    assert expected_answer(metadata) == expected


def test_reward_functions_see_special_tokens_of_answers_and_token_ids(tokenizer, engine_for, own_messages):
    tokenizer.add_special_tokens({"extra_special_tokens": ["<answer>", "</answer>"]})
    seen = []

    def score(completions, completion_ids):
        seen.extend(zip(completions, completion_ids, strict=True))
        return [0.0] * len(completions)

    environment = FunctionEnvironment(functions=named_functions(score))
    for visible, text in (("content", "<answer>5</answer>"), ("none", "5")):
        tokenizer.visible_special_tokens = visible
        rows = start_rollouts(prompts(tokenizer, ("q", "judge", {})), 1)
        made = collector(engine_for(finished("<answer>5</answer>")), {"judge": environment}, tokenizer)
        made.collect(rows, stream=SampleStream.TRAINING)
        ids = tokenizer("<answer>5</answer>[EOS]", add_special_tokens=False)["input_ids"]
        assert seen.pop() == (text, ids)
        assert rollout_records(rows)[0]["messages"][-1] == {"role": "assistant", "content": text}
        expected = "see <answer>, </answer> (policy.tokenizer.visible_special_tokens: none)"
        assert [expected in message for message in own_messages()] == [True] * (visible == "none")


def test_a_rollout_continues_the_beginning_of_its_answer_and_rewards_see_the_whole(tokenizer, engine_for, environments):
    messages = [{"role": "user", "content": "q"}]
    prompt = prompt_datum({"messages": messages, "prefill": "the ans", "task_name": "judge"}, idx=0, tokenizer=tokenizer)
    engine = engine_for(finished("wer"))
    [row] = start_rollouts([{**prompt, "extra_env_info": {"expected": "the answer"}}], 1)
    collector(engine, environments, tokenizer).collect([row], stream=SampleStream.TRAINING)
    rendered = tokenizer.apply_chat_template(
        [*messages, {"role": "assistant", "content": "the ans"}], tokenize=False, continue_final_message=True
    )
    assert engine.asked[0]["texts"] == [rendered] == ["<u>q\n<a>the ans"]
    assert row.conversation() == [*messages, {"role": "assistant", "content": "the answer"}]
    assert row.reward_parts["right"] == 1.0
    batch = to_batch([row])
    trained = batch["input_ids"][0][batch["token_mask"][0].bool()]
    assert tokenizer.decode(trained) == "wer[EOS]", "the given beginning is not trained"


def test_the_beginning_of_an_answer_stays_behind_the_messages_of_reset_and_before_the_next_turn(tokenizer, engine_for):
    class Greets(Tools):
        def reset(self, metadata):
            return {"role": "user", "content": "hi"}

    prompt = prompt_datum(
        {"messages": [{"role": "user", "content": "q"}], "prefill": "ab", "task_name": "count"}, idx=0, tokenizer=tokenizer
    )
    engine = engine_for(finished("c"))
    [row] = start_rollouts([{**prompt, "extra_env_info": {}}], 1)
    collector(engine, {"count": Greets()}, tokenizer, turns=2).collect([row], stream=SampleStream.TRAINING)
    assert engine.asked[0]["texts"][0].endswith("<u>hi\n<a>ab")
    answers = [message["content"] for message in row.conversation() if message["role"] == "assistant"]
    assert answers == ["abc", "c"]


@pytest.mark.parametrize("by", ["engine", "agent"])
def test_the_beginning_of_an_answer_needs_an_engine_that_takes_tokens(tokenizer, engine_for, environments, by):
    prompt = prompt_datum({"messages": [{"role": "user", "content": "q"}], "prefill": "a"}, idx=0, tokenizer=tokenizer)

    class Server(type(engine_for(None))):
        reads_messages = by == "engine"

    engine = Server(tokenizer, finished("c"))
    player = replace(collector(engine, environments, tokenizer), drivers={"judge": object()} if by == "agent" else {})
    rows = start_rollouts([{**prompt, "extra_env_info": {}, "task_name": "judge"}], 1)
    with pytest.raises(ConfigError, match="ends with the beginning of the answer"):
        player.collect(rows, stream=SampleStream.TRAINING)
