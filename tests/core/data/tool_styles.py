"""Chat templates with tools in three formats, each with the same format written by hand."""

import json

from template_styles import Segments, Style

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
