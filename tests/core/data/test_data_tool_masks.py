"""Loss masks across tool turns, compared with hand-written segments for each tool format of chat templates.

As in the tests of the other masks, the reference is a few lines of Python per style that say which characters a model would
sample; masks are 0 or 1 and token ids integers, so that the comparison is exact.
"""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from template_styles import CHATML, Segments, Style, expected, tokenizer_of

from rl_core.errors import DataError
from rl_train.data.messages import get_formatted_message_log
from rl_train.data.processors import conversation_datum, preference_datum, prompt_datum

NAMES = ("weather", "clock")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Knows the {name}.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in NAMES
]


def as_json(value, **options) -> str:
    """JSON as written by the `tojson` filter of templates."""
    return json.dumps(value, ensure_ascii=False, **options)


def calls_of(message: dict) -> list[dict]:
    return [call["function"] for call in message.get("tool_calls", ())]


def hermes(log: list[dict], tools: list[dict]) -> Segments:
    """Tools in the system message, calls as JSON between tags, consecutive results in one user turn."""
    segments: Segments = []
    if tools:
        system = log[0]["content"] if log[0]["role"] == "system" else "You call functions."
        offered = "".join("\n" + as_json(tool) for tool in tools)
        segments.append((f"<|im_start|>system\n{system}\n<tools>{offered}\n</tools><|im_end|>\n", False))
    for number, message in enumerate(log):
        role = message["role"]
        if role == "system" and tools:
            continue
        if role == "tool":
            opens = log[number - 1]["role"] != "tool"
            closes = number + 1 == len(log) or log[number + 1]["role"] != "tool"
            text = f"\n<tool_response>\n{message['content']}\n</tool_response>"
            segments.append((("<|im_start|>user" if opens else "") + text + ("<|im_end|>\n" if closes else ""), False))
            continue
        parts = [message["content"]] if message["content"] else []
        parts += [
            f"<tool_call>\n{as_json({'name': c['name'], 'arguments': c['arguments']})}\n</tool_call>" for c in calls_of(message)
        ]
        segments.append((f"<|im_start|>{role}\n", False))
        segments += [("\n".join(parts) + "<|im_end|>", role == "assistant"), ("\n", False)]
    return segments


HERMES = (
    "{% if tools %}{% set first = messages[0]['content'] if messages[0]['role'] == 'system' else 'You call functions.' %}"
    "{{ '<|im_start|>system\n' + first + '\n<tools>' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{{ '\n</tools><|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'system' and tools %}{% elif m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] %}{{ m['content'] }}{% endif %}"
    "{% for call in m['tool_calls'] or [] %}{% if m['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def llama(log: list[dict], tools: list[dict]) -> Segments:
    """One call per message, results as JSON in an `ipython` turn, tools in the first user turn."""
    segments: Segments = [("<|begin_of_text|>", False)]
    shown = not tools
    for message in log:
        role, text = message["role"], message["content"].strip()
        if role == "user" and not shown:
            text = "Answer with a call.\n" + "".join(as_json(tool, indent=4) + "\n" for tool in tools) + text
            shown = True
        if role == "tool":
            role, text = "ipython", as_json(message["content"])
        for call in calls_of(message):
            text = as_json({"name": call["name"], "parameters": call["arguments"]})
        segments += [
            (f"<|start_header_id|>{role}<|end_header_id|>\n\n", False),
            (f"{text}<|eot_id|>", role == "assistant"),
        ]
    return segments


LLAMA = (
    "{{ '<|begin_of_text|>' }}{% set shown = namespace(done=not tools) %}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m['content'] | tojson + '<|eot_id|>' }}"
    "{% elif 'tool_calls' in m %}"
    "{% if m['tool_calls'] | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set call = m['tool_calls'][0]['function'] %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n{\"name\": \"' + call['name'] + '\", \"parameters\": ' }}"
    "{{ call['arguments'] | tojson }}{{ '}<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{% if m['role'] == 'user' and not shown.done %}{% set shown.done = true %}{{ 'Answer with a call.\n' }}"
    "{% for tool in tools %}{{ tool | tojson(indent=4) + '\n' }}{% endfor %}{% endif %}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def joined(log: list[dict], tools: list[dict]) -> Segments:
    """Arguments as text inside the turn; a message has calls exactly if its content is None."""
    segments: Segments = [("<s>" + "".join(f"[TOOL]{tool['function']['name']}[/TOOL]" for tool in tools), False)]
    for message in log:
        if message["role"] == "tool":
            segments.append((f"[RESULT]{message['content']}[/RESULT]", False))
        elif message["role"] == "assistant":
            calls = "".join(f"[CALL]{call['name']}\n{as_json(call['arguments'])}[/CALL]" for call in calls_of(message))
            segments += [("[SAYS]", False), ((calls or message["content"]) + "</s>", True)]
        else:
            segments.append((f"[ASKS]{message['content']}", False))
    return segments


JOINED = (
    "{{ '<s>' }}{% for tool in tools or [] %}{{ '[TOOL]' + tool['function']['name'] + '[/TOOL]' }}{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ '[RESULT]' + m['content'] + '[/RESULT]' }}"
    "{% elif m['role'] == 'assistant' %}{{ '[SAYS]' }}{% if m['content'] is none %}{% for call in m['tool_calls'] %}"
    "{{ '[CALL]' + call['function']['name'] + '\n' + call['function']['arguments'] + '[/CALL]' }}{% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '</s>' }}{% else %}{{ '[ASKS]' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[SAYS]' }}{% endif %}"
)

IM, HEADERS = ("<|im_start|>", "<|im_end|>"), ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MARKS = ("<s>", "</s>", "[TOOL]", "[/TOOL]", "[CALL]", "[/CALL]", "[RESULT]", "[/RESULT]", "[SAYS]", "[ASKS]")
STYLES = {
    "hermes": (Style(HERMES, IM, hermes), 2),
    "llama": (Style(LLAMA, HEADERS, llama), 1),
    "joined": (Style(JOINED, MARKS, joined), 2),
}
"""Each with the most calls that a message may have."""


@pytest.fixture(scope="module")
def tokenizers():
    return {name: tokenizer_of(style) for name, (style, _) in STYLES.items()}


WORDS = st.text("abc def?\n\"'{é", max_size=12).map(str.strip).filter(bool)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "hour"]), st.one_of(WORDS, st.integers(0, 9), st.lists(WORDS, max_size=1)))


@st.composite
def turns(draw, most_calls: int) -> list[dict]:
    """A question, rounds of calls with results, and usually an answer."""
    log = [{"role": "user", "content": draw(WORDS)}]
    for _ in range(draw(st.integers(0, 2))):
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=most_calls))
        calls = [{"type": "function", "function": {"name": name, "arguments": draw(ARGUMENTS)}} for name in names]
        log.append({"role": "assistant", "content": "", "tool_calls": calls})
        log += [{"role": "tool", "name": name, "content": draw(WORDS)} for name in names]
    return [*log, {"role": "assistant", "content": draw(WORDS)}]


@pytest.mark.parametrize("name", STYLES)
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_tool_calls_are_trained_and_tool_results_are_not_with_any_template(tokenizers, name, data):
    tokenizer, (style, most_calls) = tokenizers[name], STYLES[name]
    log = [{"role": "system", "content": data.draw(WORDS)}] if data.draw(st.booleans()) and name != "joined" else []
    log += [message for _ in range(data.draw(st.integers(1, 2))) for message in data.draw(turns(most_calls))]
    tools = TOOLS if data.draw(st.booleans()) else []
    record = {"messages": log, "tools": tools}
    datum = conversation_datum(record, idx=0, tokenizer=tokenizer)
    ids = torch.cat([message["token_ids"] for message in datum["message_log"]]).tolist()
    mask = torch.cat([message["token_loss_mask"] for message in datum["message_log"]]).tolist()
    assert (ids, mask) == expected(style.by_hand(log, tools), tokenizer)
    assert sum(mask) > 0


@pytest.mark.parametrize("name", STYLES)
def test_a_prompt_with_tools_is_what_the_trained_conversation_begins_with(tokenizers, name):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    log = [
        {"role": "user", "content": "wet?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "yes"},
    ]
    record = {"messages": log, "tools": TOOLS}
    trained = conversation_datum(record, idx=0, tokenizer=tokenizers[name])
    for end in (1, 3):
        prompt = prompt_datum({**record, "messages": log[:end]}, idx=0, tokenizer=tokenizers[name])
        ids, whole = (
            torch.cat([m["token_ids"] for m in part]).tolist() for part in (prompt["message_log"], trained["message_log"])
        )
        assert whole[: len(ids)] == ids
        assert ids == torch.cat([m["token_ids"] for m in trained["message_log"][:end]]).tolist()


@pytest.mark.parametrize("name", STYLES)
def test_tool_calls_in_answers_of_a_pair_are_trained_and_those_in_the_prompt_are_not(tokenizers, name):
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {}}}],
    }
    result = {"role": "tool", "content": "three"}
    prompt = [{"role": "user", "content": "late?"}, call, result]
    chosen, rejected = [call, result, {"role": "assistant", "content": "no"}], [{"role": "assistant", "content": "yes"}]
    record = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "tools": TOOLS}
    datum = preference_datum(record, idx=0, tokenizer=tokenizers[name])
    segments = STYLES[name][0].by_hand([*prompt, *chosen], TOOLS)
    sampled = [number for number, (_, is_sampled) in enumerate(segments) if is_sampled]
    wanted = expected([(text, number in sampled[1:]) for number, (text, _) in enumerate(segments)], tokenizers[name])[1]
    assert torch.cat([m["token_loss_mask"] for m in datum["message_log_chosen"]]).tolist() == wanted
    assert sum(float(m["token_loss_mask"].sum()) for m in datum["message_log_rejected"]) > 0


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {"a": 1}}}],
}
BOTH = {**CALL, "tool_calls": CALL["tool_calls"] * 2}
ASKED, RESULT = {"role": "user", "content": "late?"}, {"role": "tool", "content": "three"}
PRINTS = CHATML.replace("message['content']", "message['content'] or message['tool_calls']")
FIRST = HERMES.replace("in m['tool_calls'] or []", "in (m['tool_calls'] or [])[:1]")
DEAF = HERMES.replace("m['content'] + '\n</tool_response>'", "'\n</tool_response>'")
BESIDE_SYSTEM = HERMES.replace("{% if tools %}", "{% if tools and messages[0]['role'] != 'system' %}")


@pytest.mark.parametrize(
    ("template", "log", "tools", "says"),
    [
        (CHATML, [ASKED], TOOLS, "leaves out the functions that a row offers"),
        (CHATML, [ASKED, CALL], None, "leaves out tool calls"),
        (PRINTS, [ASKED, CALL], None, "writes arguments in Python syntax instead of JSON"),
        (FIRST, [ASKED, BOTH], None, "leaves out all calls of a message but the first"),
        (DEAF, [ASKED, CALL, RESULT], None, "leaves out tool results"),
        (
            BESIDE_SYSTEM,
            [{"role": "system", "content": "be kind"}, ASKED],
            TOOLS,
            "leaves out the function 'weather', which the",
        ),
        (LLAMA, [ASKED, BOTH], None, "cannot render messages of the roles ['user', 'assistant']: one call at a time"),
        (None, [ASKED], TOOLS, "which require a chat template"),
    ],
    ids=["offers", "calls", "Python", "one call", "results", "offers beside a system message", "refuses", "none"],
)
def test_a_template_that_omits_tool_data_is_an_error(template, log, tools, says):
    tokenizer = tokenizer_of(Style(CHATML, IM, hermes))
    tokenizer.chat_template = template
    with pytest.raises(DataError) as caught:
        get_formatted_message_log(log, tokenizer, tools=tools)
    assert says in str(caught.value)


def test_tool_calls_in_openai_format_are_rendered_like_parsed_ones(tokenizers):
    raw = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "clock", "arguments": '{"a":1}'}}]}
    for tokenizer in tokenizers.values():
        one, other = (get_formatted_message_log([ASKED, message], tokenizer) for message in (raw, CALL))
        assert [message["token_ids"].tolist() for message in one] == [message["token_ids"].tolist() for message in other]
    with pytest.raises(DataError, match=r"`arguments` of call 0 of message 1 is the text '\{': invalid JSON"):
        get_formatted_message_log([ASKED, {**raw, "tool_calls": [{"name": "clock", "arguments": "{"}]}], tokenizer)


def test_a_replaced_chat_template_is_inspected_again():
    tokenizer = tokenizer_of(Style(CHATML, IM, hermes))
    with pytest.raises(DataError, match="leaves out"):
        get_formatted_message_log([ASKED], tokenizer, tools=TOOLS)
    tokenizer.chat_template = HERMES
    assert "Knows the clock" in tokenizer.decode(get_formatted_message_log([ASKED], tokenizer, tools=TOOLS)[0]["token_ids"])


def test_the_tool_template_is_used_if_a_tokenizer_has_several():
    tokenizer = tokenizer_of(Style(CHATML, IM, hermes))
    tokenizer.chat_template = {"default": CHATML, "tool_use": HERMES}
    assert "Knows the clock" in tokenizer.decode(get_formatted_message_log([ASKED], tokenizer, tools=TOOLS)[0]["token_ids"])
    assert get_formatted_message_log([ASKED], tokenizer)[0]["token_ids"].numel() > 0
