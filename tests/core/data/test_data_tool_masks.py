"""Loss masks across tool turns, compared with hand-written segments for each tool format of chat templates.

As in the tests of the other masks, the reference is a few lines of Python per style that say which characters a model would
sample; masks are 0 or 1 and token ids integers, so that the comparison is exact.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from template_styles import CHATML, Style, expected, tokenizer_of
from tool_styles import HERMES, IM, LLAMA, NAMES, STYLES, TOOLS, hermes

from rl_core.errors import DataError
from rl_train.data.messages import get_formatted_message_log
from rl_train.data.processors import conversation_datum, preference_datum, prompt_datum


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
@settings(max_examples=40)
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
