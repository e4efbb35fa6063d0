"""Parsers of tool calls: what each format reads, what is an error for the model, and which parser fits a tokenizer."""

import json

import pytest

from rl_core.errors import ConfigError
from rl_train.tools.parsers import PARSERS, SampledMessage, choose_parser, parse_message

ADD = {"name": "add", "arguments": {"a": 1, "b": "x"}}
NONE = {"name": "now", "arguments": {}}


def parsed(name, text):
    found = PARSERS[name]().parse(SampledMessage(text=text))
    return found.content, [call["function"] if "error" not in call else call["error"] for call in found.calls]


READ = {
    "hermes": [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>', "", [ADD]),
        ('I add.\n<tool_call>{"name":"add","arguments":{"a":1,"b":"x"}}</tool_call>', "I add.", [ADD]),
        ('<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<tool_call>{"name": "now"}</tool_call>', "", [NONE, NONE]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}"}', "", [ADD]),
        (
            "<think>not <tool_call>{}</tool_call></think>The answer",
            "<think>not <tool_call>{}</tool_call></think>The answer",
            [],
        ),
        ("<think>I could <tool_call>", "<think>I could <tool_call>", []),
        ("4", "4", []),
    ],
    "llama3": [
        ('{"name": "add", "parameters": {"a": 1, "b": "x"}}', "", [ADD]),
        ('<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1, "b": "x"}}', "", [ADD]),
        ('{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', "", [NONE, NONE]),
        ('{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}', "", [ADD]),
        ('{"answer": 4}', '{"answer": 4}', []),
        ("The name is {x}", "The name is {x}", []),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "x"}}, {"name": "now"}]', "", [ADD, NONE]),
        ('Well.[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}[TOOL_CALLS]now[ARGS]{}', "Well.", [ADD, NONE]),
        ('[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1, "b": "x"}', "", [ADD]),
        ("4", "4", []),
    ],
}


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"), [(name, *case) for name, cases in READ.items() for case in cases]
)
def test_a_parser_separates_calls_from_text(name, text, content, calls):
    assert parsed(name, text) == (content, calls)


@pytest.mark.parametrize(("name", "text", "content"), [(name, *case[:2]) for name, cases in READ.items() for case in cases])
def test_text_before_calls_only_grows_and_begins_the_content(name, text, content):
    parser, longest = PARSERS[name](), ""
    for length in range(len(text) + 1):
        before = parser.text_before_calls(text[:length])
        assert before.startswith(longest)
        assert content.startswith(before)
        longest = before
    assert longest == ("" if name == "llama3" and text.startswith("{") else content.rstrip())


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {</tool_call>', "not valid JSON"),
        ("hermes", "<tool_call></tool_call>", "not valid JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "has no name"),
        ("hermes", '<tool_call>["add"]</tool_call>', "has no name"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "the arguments are [1]: expected a JSON object"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not a JSON number"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deeply"),
        ("llama3", '{"name": "add", "parameters": {', "not valid JSON"),
        ("llama3", "<|python_tag|>print(1)", "not valid JSON"),
        ("mistral", '[TOOL_CALLS] [{"name": "add"', "not valid JSON"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{", "not valid JSON"),
        ("mistral", "[TOOL_CALLS]", "not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_an_error_for_the_model(name, text, says):
    [error] = parsed(name, text)[1]
    assert isinstance(error, str)
    assert says in error


def test_calls_have_ids_that_are_unique_in_their_conversation_and_that_every_template_accepts():
    text = '[TOOL_CALLS] [{"name": "now", "id": "abcdefghi"}, {"name": "now", "id": "abcdefghi"}, {"name": "now", "id": "a b"}]'
    earlier = [{"role": "assistant", "content": "", "tool_calls": [{"id": "call00000"}]}]
    calls = parse_message(PARSERS["mistral"](), SampledMessage(text=text), earlier).calls
    assert [call["id"] for call in calls] == ["abcdefghi", "call00002", "call00003"]


def test_a_call_with_an_unpaired_surrogate_is_invalid_because_no_tokenizer_encodes_it():
    say = '{"name": "say", "arguments": {"text": "%s"}}'
    text = "[TOOL_CALLS] [" + say % "\\ud800" + ", " + say % "\\ud83d\\ude00" + "]"
    broken, fine = parse_message(PARSERS["mistral"](), SampledMessage(text=text), []).calls
    assert "unpaired surrogate" in broken["error"]
    assert fine["function"]["arguments"] == {"text": "\N{GRINNING FACE}"}
    json.dumps(broken, ensure_ascii=False).encode()


@pytest.mark.parametrize("form", PARSERS)
def test_the_parser_that_reads_what_the_chat_template_writes_is_chosen(form, tokenizer_with):
    assert choose_parser(tokenizer_with(form)).name == form


def test_a_tokenizer_whose_template_no_parser_fits_is_refused_unless_a_parser_is_set(tokenizer_with):
    tokenizer = tokenizer_with("own")
    with pytest.raises(
        ConfigError, match=r"No parser of tool calls fits the chat template, which writes a call as .*rlcoreprobe!"
    ):
        choose_parser(tokenizer)
    assert choose_parser(tokenizer, "hermes").name == "hermes"
    with pytest.raises(ConfigError, match="expected response_template, hermes, mistral, llama3, or the dotted path"):
        choose_parser(tokenizer, "herms")
    with pytest.raises(ConfigError, match="is not a subclass of"):
        choose_parser(tokenizer, "collections.OrderedDict")
    with pytest.raises(ConfigError, match="the tokenizer has no response_template"):
        choose_parser(tokenizer, "response_template")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="leaves out tool calls"):
        choose_parser(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="the tokenizer has none"):
        choose_parser(tokenizer)


def test_a_tokenizer_that_describes_its_responses_parses_them_itself(tokenizer_with):
    tokenizer = tokenizer_with("own")
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {"close": ["<|im_end|>", "<call>"]},
            "tool_calls": {
                "open": "<call>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
    parser = choose_parser(tokenizer)
    assert parser.name == "response_template"

    def parse(text):
        ids = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in (text, "<|im_start|>assistant\n")]
        return parser.parse(SampledMessage(text=text.removesuffix("<|im_end|>"), token_ids=ids[0], prompt_ids=ids[1]))

    called = parse('<call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</call><|im_end|>')
    assert [call["function"] for call in called.calls] == [ADD]
    assert (parse("four<|im_end|>").calls, parse("four<|im_end|>").content) == ([], "four")
    [broken] = parse('<call>{"name": </call><|im_end|>').calls
    assert "error" in broken


def _own(tokenizer_with, defaults):
    """A tokenizer that describes its responses, with calls in JSON, and a function that parses the calls of a text."""
    tokenizer = tokenizer_with("own")
    call = {"type": "function", "function": "{content}"}
    fields = {"open": "<call>", "close": "</call>", "repeats": True, "content": "json", "transform": call}
    tokenizer.response_template = {
        "defaults": defaults,
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"content": {"close": ["<|im_end|>", "<call>"]}, "tool_calls": fields},
    }
    prompt = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]

    def calls(text, tools=()):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        message = SampledMessage(text=text, token_ids=ids, prompt_ids=prompt, tools=tools)
        return [call["function"] for call in choose_parser(tokenizer).parse(message).calls]

    return tokenizer, calls


def test_a_message_has_only_its_own_calls_if_the_default_of_calls_is_a_list(tokenizer_with):
    tokenizer, calls = _own(tokenizer_with, {"role": "assistant", "tool_calls": []})
    for _ in range(2):
        assert calls('<call>{"name": "add", "arguments": {"a": 1}}</call>') == [{"name": "add", "arguments": {"a": 1}}]
    assert calls("four<|im_end|>") == []
    assert tokenizer.response_template["defaults"]["tool_calls"] == []


def test_texts_of_json_arguments_stay_texts_whatever_else_their_schema_allows(tokenizer_with):
    _, calls = _own(tokenizer_with, {})
    parameters = {"type": "object", "properties": {"key": {"type": ["string", "integer"]}}}
    tool = {"type": "function", "function": {"name": "find", "description": "", "parameters": parameters}}
    [found] = calls('<call>{"name": "find", "arguments": {"key": "007"}}</call>', [tool])
    assert found["arguments"] == {"key": "007"}
