"""The text of sampled tokens: one rule for the special tokens that rewards, tools, logs and clients see."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rl_core.data.conversation_tokens import decode
from rl_core.data.hub import published_file

_USER, _ANSWER, _NEXT = "rlcoreuser", "rlcoreanswer", "rlcorenext"
_SYSTEM = {"role": "system", "content": "rlcoresystem"}
_TURNS = [{"role": role, "content": word} for role, word in (("user", _USER), ("assistant", _ANSWER), ("user", _NEXT))]


def decode_answers(tokenizer: Any, answers: Sequence[Any]) -> list[str]:
    """The texts of sampled answers ([T] token ids, tensors or lists) without their `hidden_tokens`."""
    hidden, shown = _special_tokens(tokenizer, *_settings(tokenizer))
    rows = [answer.tolist() if hasattr(answer, "tolist") else list(answer) for answer in answers]
    # For rows without visible special tokens, skipping all of them gives the same text and is faster than filtering.
    return [
        decode(tokenizer, row, skip_special_tokens=True)
        if shown.isdisjoint(row)
        else decode(tokenizer, [token for token in row if token not in hidden])
        for row in rows
    ]


def hidden_tokens(tokenizer: Any) -> frozenset[int]:
    """The ids of special tokens that sampled text does not show, see `PolicyTokenizerConfig.visible_special_tokens`."""
    return _special_tokens(tokenizer, *_settings(tokenizer))[0]


def control_tokens(tokenizer: Any) -> Mapping[str, int]:
    """Text and id of the tokens that mark beginning, end, padding, unknown text and the turns of the chat template.

    A turn's tokens are those that the template writes around messages of the system, user and assistant. An answer may follow
    one token that is not around other messages, if no text precedes it; further ones belong to the answer (`<think>`).
    """
    return _control_tokens(tokenizer, _settings(tokenizer)[1])


def _settings(tokenizer: Any) -> tuple[str, str]:
    """`visible_special_tokens`, and the template, which may be replaced: keys of the caches below."""
    return vars(tokenizer).get("visible_special_tokens", "content"), str(getattr(tokenizer, "chat_template", None))


@lru_cache(maxsize=16)
def _special_tokens(tokenizer: Any, visible: str, template: str) -> tuple[frozenset[int], frozenset[int]]:
    """The ids of hidden and of visible special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token for token, text in added.items() if text.special} | {*tokenizer.all_special_ids}
    hidden = {"all": set(), "none": special}.get(visible, special & {*_control_tokens(tokenizer, template).values()})
    return frozenset(hidden), frozenset(special - hidden)


@lru_cache(maxsize=16)
def _control_tokens(tokenizer: Any, template: str) -> Mapping[str, int]:
    if not hasattr(tokenizer, "get_added_vocab"):  # not one of Transformers: all tokens are text
        return {}
    added: dict[str, int] = {name: token for name, token in tokenizer.get_added_vocab().items() if name.strip()}
    model = str(vars(tokenizer).get("published", [tokenizer.name_or_path])[0])  # with its revision
    end_ids = {tokenizer.eos_token_id, *_end_ids(model)}
    ends = {name for name, token in added.items() if token in end_ids}
    own = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    names = ends.union(str(name) for name in own if name)
    if template != "None":
        pattern = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
        names |= _turn_tokens(tokenizer, ends, re.compile(pattern or "(?!)"))
    return {name: tokenizer.convert_tokens_to_ids(name) for name in sorted(names)}


def _end_ids(model: str) -> list[int]:
    """The end tokens of the generation config next to the tokenizer: a model may have others than its tokenizer."""
    file = published_file(model, "generation_config.json") if model else None
    try:
        ids = json.loads(file.read_text(encoding="utf-8"))["eos_token_id"] if file else []
    except (OSError, ValueError, LookupError, TypeError):  # it has no end tokens
        return []
    return ids if isinstance(ids, list) else [ids]


def _turn_tokens(tokenizer: Any, ends: set[str], added: re.Pattern[str]) -> set[str]:
    """The tokens that the template writes around messages; `ends` are those that end an answer in any case."""
    texts = [text for turns in (_TURNS, [_SYSTEM, *_TURNS]) if (text := _rendered(tokenizer, turns)) is not None]
    found = re.fullmatch(f"(.*){_USER}(.*){_ANSWER}(.*){_NEXT}(.*)", "".join(texts[:1]), re.DOTALL)
    if found is None:
        return set()
    opening, header, after, last = found.groups()
    closing = {*added.findall(last)} & {*added.findall(header)} | ends
    turns = closing.union(*(added.findall(text.partition(_USER)[0]) for text in texts))
    first = next((name for name in added.findall(header) if name not in turns), "")
    if first and not added.sub("", header.partition(first)[0]).strip():
        turns.add(first)
    closed, opened = added.findall(after), added.findall(opening)
    while closed and opened and closed[-1] == opened[-1]:
        closed, opened = closed[:-1], opened[:-1]
    return turns if closing.intersection(closed) else turns.union(closed)


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str | None:
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # whatever an expression of the template raises, such as for a system message
        return None
    return text
