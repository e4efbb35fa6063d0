"""Tools in chat completions, with the official client."""

import json

import openai
import pytest

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Looks up the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
QUESTION = [{"role": "user", "content": "Weather?"}]


def call_then_answer(prompt):
    """Calls the tool, and answers once there is a result."""
    return "It is sunny." if "<|im_start|>tool" in prompt else f"Let me look.{CALL}{CALL}"


@pytest.fixture
def official(serve_scripted):
    def connect(answer):
        http, generation = serve_scripted(answer)
        return openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0), generation

    return connect


def test_tools_are_shown_to_the_model_and_its_calls_are_parsed(official):
    client, generation = official(call_then_answer)
    choice = client.chat.completions.create(model="scripted", messages=QUESTION, tools=[WEATHER]).choices[0]
    assert json.dumps(WEATHER) in generation.prompts[0].replace("\\u00f6", "ö")
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    found = [(call.type, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert found == [("function", "get_weather", {"city": "Köln"})] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_the_message_with_calls_and_the_results_are_accepted_back(official):
    client, generation = official(call_then_answer)
    message = client.chat.completions.create(model="scripted", messages=QUESTION, tools=[WEATHER]).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    history = [*QUESTION, message.model_dump(), *results]
    choice = client.chat.completions.create(model="scripted", messages=history, tools=[WEATHER]).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "It is sunny.", None)
    assert generation.prompts[1].count('{"name": "get_weather", "arguments": {"city": "Köln"}}') == 2
    assert generation.prompts[1].count("<|im_start|>tool\nsunny<|im_end|>") == 2


@pytest.mark.parametrize("arguments", ["", None, "{}"])
def test_a_call_in_the_history_may_have_empty_arguments(official, arguments):
    client, generation = official(call_then_answer)
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    now = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    history = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "noon"}]
    assert client.chat.completions.create(model="scripted", messages=history, tools=[now]).choices[0].finish_reason == "stop"
    assert '{"name": "now", "arguments": {}}' in generation.prompts[0]


def test_a_stream_has_the_calls_with_their_numbers(official):
    client, _ = official(call_then_answer)
    stream = client.chat.completions.create(model="scripted", messages=QUESTION, tools=[WEATHER], stream=True)
    choices = [choice for chunk in stream for choice in chunk.choices]
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert [(call.index, call.function.name) for call in calls] == [(0, "get_weather"), (1, "get_weather")]
    assert "".join(choice.delta.content or "" for choice in choices) == "Let me look."
    assert choices[-1].finish_reason == "tool_calls"


def test_with_tool_choice_none_the_model_is_not_shown_the_tools(official):
    client, generation = official(lambda prompt: CALL)
    choice = client.chat.completions.create(model="scripted", messages=QUESTION, tools=[WEATHER], tool_choice="none").choices[0]
    assert "get_weather" not in generation.prompts[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", CALL)


@pytest.mark.parametrize(("text", "limit"), [('<tool_call>\n{"name": "get_weather", \n</tool_call>', None), (CALL, 40)])
def test_a_call_that_cannot_be_read_or_was_cut_off_is_text(official, text, limit):
    client, _ = official(lambda prompt: text)
    choice = client.chat.completions.create(
        model="scripted", messages=QUESTION, tools=[WEATHER], max_completion_tokens=limit
    ).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content == text[:limit]
    assert choice.finish_reason == ("length" if limit else "stop")
