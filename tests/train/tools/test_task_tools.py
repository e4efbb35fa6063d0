"""The tools of a run: those of the environments, restricted by the rows' own, with a parser for every task that needs one."""

from dataclasses import replace

import pytest
import torch

from rl_core.config.schema import EnvironmentConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn, GenerationInterface
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_core.tools import Tool, ToolEnvironment
from rl_envs.tools.environment import ToolsEnvironment
from rl_train.config.schema import RunConfig
from rl_train.data.processors import prompt_datum
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.records import rollout_records
from rl_train.rollouts.source import start_rollouts
from rl_train.rollouts.trajectory import SampleStream, to_batch
from rl_train.tools.task_tools import TaskTools, tools_of_instances, tools_of_run


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def double(x: int) -> int:
    """Doubles."""
    return 2 * x


class Sums(ToolEnvironment):
    functions = (add, double)

    def finish(self, message_log_batch, metadata):
        right = [float(log[-1]["content"] == "5") for log in message_log_batch]
        n = len(right)
        return EnvironmentReturn([None] * n, metadata, [None] * n, torch.tensor(right), torch.ones(n))


class Reads(Sums):
    """Offers nothing, but reads calls of the row's own tools."""

    functions = ()


class Deaf(EnvironmentInterface):
    def step(self, message_log_batch, metadata):
        raise NotImplementedError


def names(tools):
    return [tool["function"]["name"] for tool in tools]


def test_rows_are_shown_their_own_tools_or_those_of_their_environment(tokenizer_with):
    tools = tools_of_instances({"sums": Sums(), "deaf": Deaf()}, tokenizer_with("hermes"))
    assert list(tools.parsers) == ["sums"]
    assert names(tools.of_record({"task_name": "sums"})) == ["add", "double"]
    assert names(tools.of_record({"task_name": "sums", "tools": [Tool.of(double).spec]})) == ["double"]
    assert tools.of_record({"task_name": "deaf"}) is None
    other = {"type": "function", "function": {"name": "search"}}
    assert tools.of_record({"task_name": "deaf", "tools": [other]}) == [other]
    with pytest.raises(DataError, match="offers the function 'search', but the environment of task 'sums' has add, double"):
        tools.of_record({"task_name": "sums", "tools": [other]})


def test_an_environment_that_reads_calls_gets_a_parser_even_if_it_offers_no_tools(tokenizer_with):
    tools = tools_of_instances({"reads": Reads()}, tokenizer_with("mistral"))
    assert (tools.offered, tools.parsers["reads"].name) == ({}, "mistral")


def test_an_environment_with_tools_is_refused_if_no_parser_fits_the_chat_template(tokenizer_with):
    with pytest.raises(ConfigError, match="No parser of tool calls fits") as error:
        tools_of_instances({"sums": Sums()}, tokenizer_with("own"))
    assert error.value.key == "env.sums.tool_parser"
    assert tools_of_instances({"sums": Sums({"tool_parser": "hermes"})}, tokenizer_with("own")).parsers["sums"].name == "hermes"
    assert tools_of_instances({"deaf": Deaf()}, tokenizer_with("own")) == TaskTools()


def test_a_class_that_is_not_an_environment_is_refused_before_the_run(tokenizer_with):
    run = RunConfig.model_construct(env={"odd": EnvironmentConfig(env_cls="collections.OrderedDict")})
    with pytest.raises(
        ConfigError, match=r"OrderedDict.* is not a subclass of rl_core\.interfaces\.EnvironmentInterface"
    ) as error:
        tools_of_run(run, Registry(discover()), tokenizer_with("hermes"))
    assert error.value.key == "env.odd"


class Scripted(GenerationInterface):
    """Answers turn by turn with given texts; each sampled token has the log-probability -1."""

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts, self.prompts = tokenizer, list(texts), []

    def generate(self, data, greedy=False):
        [prompt], [length] = data["input_ids"], data["input_lengths"].tolist()
        self.prompts.append(self.tokenizer.decode(prompt[:length]))
        new = self.tokenizer(self.texts.pop(0) + "<|im_end|>", add_special_tokens=False)["input_ids"]
        return BatchedDataDict(
            {
                "output_ids": torch.tensor([[*prompt[:length].tolist(), *new]]),
                "logprobs": torch.tensor([[0.0] * length + [-1.0] * len(new)]),
                "generation_lengths": torch.tensor([len(new)]),
                "unpadded_sequence_lengths": torch.tensor([length + len(new)]),
                "truncated": torch.tensor([False]),
                "weight_version": torch.tensor([0]),
            }
        )

    def prepare_for_generation(self, *args, **kwargs):
        return True

    def finish_generation(self, *args, **kwargs):
        return True

    def shutdown(self):
        return True


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TWICE = CALL + '\n<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>'


def play(tokenizer_with, *texts, environment=None, info=None, longest=10_000):
    tokenizer = tokenizer_with("hermes")
    environment = environment or Sums({"invalid_call_penalty": 0.5})
    tools = tools_of_instances({"sums": environment}, tokenizer)
    record = {"messages": [{"role": "user", "content": "2+3?"}], "task_name": "sums", "extra_env_info": info}
    datum = prompt_datum({**record, "tools": tools.of_record(record)}, idx=0, tokenizer=tokenizer)
    rows = start_rollouts([datum], 1)
    collector = Collector(
        generation=Scripted(tokenizer, *texts), environments={"sums": environment}, tokenizer=tokenizer, seed=0,
        max_turns={"sums": 5}, max_total_length=longest, tool_parsers=tools.parsers,
    )  # fmt: skip
    collector.collect(rows, stream=SampleStream.TRAINING)
    return rows[0], tokenizer, collector


def test_a_rollout_calls_tools_reads_the_results_and_is_rewarded_for_the_answer(tokenizer_with):
    row, _, _ = play(tokenizer_with, "I add.\n" + TWICE, "5")
    assert [(message["role"], message["content"]) for message in row.conversation()] == [
        ("user", "2+3?"),
        ("assistant", "I add."),
        ("tool", "5"),
        ("tool", row.message_log[3]["content"]),
        ("assistant", "5"),
    ]
    calls = row.conversation()[1]["tool_calls"]
    assert [call["id"] for call in calls] == [message["tool_call_id"] for message in row.conversation()[2:4]]
    assert calls[0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert row.message_log[3]["content"].startswith("Error: the tool call is not valid JSON")
    assert row.reward_parts == {"invalid_calls": -0.5, "reward": 1.0}
    assert row.metadata["tool_use"] == {"turns": 1, "calls": 2, "problems": {"malformed": 1}}
    [record] = rollout_records([row])
    assert record["completion"] == "I add.\n" + TWICE + "5"
    assert record["messages"][1]["tool_calls"] == calls


def test_the_trained_tokens_of_a_rollout_with_tools_are_exactly_the_sampled_ones(tokenizer_with):
    row, tokenizer, collector = play(tokenizer_with, TWICE, CALL, "5")
    batch = to_batch([row])
    ids, mask = batch["input_ids"][0].tolist(), batch["token_mask"][0].tolist()
    text = tokenizer.decode(ids)
    assert text == collector.generation.prompts[-1] + "5<|im_end|>"
    spans, start = [], 0
    for sampled in (TWICE, CALL, "5"):
        start = text.index("<|im_start|>assistant\n", start) + len("<|im_start|>assistant\n")
        assert text[start:].startswith(sampled + "<|im_end|>")
        spans.append((len(tokenizer(text[:start])["input_ids"]), len(tokenizer(sampled + "<|im_end|>")["input_ids"])))
    expected = [0.0] * len(ids)
    for first, length in spans:
        expected[first : first + length] = [1.0] * length
    assert mask == expected
    assert batch["generation_logprobs"][0].tolist() == [-value for value in mask]


def test_messages_of_tasks_without_a_parser_are_not_parsed(tokenizer_with):
    row, _, collector = play(tokenizer_with, CALL, "5")
    plain = replace(collector, tool_parsers={}, generation=Scripted(collector.tokenizer, CALL))
    again = replace(row, message_log=row.message_log[:1], metadata=None, turns=0, done=False, reward_parts={})
    plain.collect([again], stream=SampleStream.TRAINING)
    assert again.conversation()[1] == {"role": "assistant", "content": CALL}


def python(code):
    return f'<tool_call>\n{{"name": "python", "arguments": {{"code": "{code}"}}}}\n</tool_call>'


def test_python_keeps_variables_during_a_rollout_and_its_session_ends_with_it_also_if_it_is_truncated(tokenizer_with):
    limits = {"require": "rlimits", "timeout_s": 20.0, "memory_mb": 256}
    environment = ToolsEnvironment({"tools": ["python"], "call_timeout_s": 120.0, "sandbox": limits})
    answers = {"environment": environment, "info": {"expected_answer": "42"}}
    try:
        row, _, _ = play(tokenizer_with, python("x = 6 * 7"), python("x"), r"\boxed{42}", **answers)
        assert [message["content"] for message in row.conversation() if message["role"] == "tool"] == ["(no output)", "42"]
        assert (row.reward, row.truncated) == (1.0, False)
        first_turn = sum(len(message["token_ids"]) for message in row.message_log[:2])
        cut, _, _ = play(tokenizer_with, python("x = 6 * 7"), python("x"), longest=first_turn + 1, **answers)
        assert (cut.turns, cut.truncated) == (1, True)
        [tool] = environment._sandboxes
        assert tool._interpreters == {}
        assert not tool._sandbox._sessions
    finally:
        environment.shutdown()
