"""Control tokens: contents of messages never become control tokens, and one rule says which of them sampled text shows.

Only what the chat template writes does. A rendered conversation does not show which `<|im_end|>` the template wrote. If
contents have the text of a control token, the conversation is therefore rendered with placeholders for it. A copy of the
tokenizer has other names for its control tokens, and the template's are replaced by these names. Everything else, including
white space around them, is encoded as always.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from rl_core.data.hub import published_file
from rl_core.data.tokenizer import decode, encode

_NONCE = secrets.token_hex(6)
"""Part of all placeholders and new names, so that no content can have them."""


def guarded(tokenizer: Any, *contents: Any) -> Any:
    """The tokenizer, or its copy for which control tokens in the contents are text.

    With the copy, texts have other names for control tokens: those that it renders, encodes and decodes, and in its attributes.

    Args:
        tokenizer: A Transformers tokenizer, or an `AdaptedTokenizer`. Others without a `tokenizer.json` have no such copy: they
            are returned themselves.
        *contents: Messages, tools or texts.
    """
    if not control_texts(tokenizer, *contents) or not keeps_text(tokenizer):
        return tokenizer
    return _guarded_copy(tokenizer, str(tokenizer.chat_template))


def control_texts(tokenizer: Any, *contents: Any) -> list[str]:
    """The control tokens whose text the contents have."""
    texts = [*_texts(contents)]
    return [name for name in _names(tokenizer) if any(name in text for text in texts)]


def keeps_text(tokenizer: Any) -> bool:
    """Whether texts of control tokens stay text: the config does not parse them, and the tokenizer can have a copy."""
    parses = vars(tokenizer).get("parse_control_tokens", False)
    return not parses and _guarded_copy(tokenizer, str(tokenizer.chat_template)) is not None


def _names(tokenizer: Any) -> list[str]:
    """The control tokens that text may spell; a single character or white space is text in any case."""
    return [name for name in (*control_tokens(tokenizer), *_media_tokens(tokenizer)) if len(name.strip()) > 1]


def written_names(tokenizer: Any) -> Callable[[str], str]:
    """Turns text with the names of control tokens into text with the names that this tokenizer, which may be guarded, has."""
    names: Callable[[str], str] = vars(tokenizer).get("written_names", str)
    return names


@lru_cache(maxsize=16)
def media_ids(model: str) -> Mapping[str, int]:
    """The tokens that stand for images, video or sound, by their keys in the config of a model; empty for a model of text."""
    file = published_file(model, "config.json") if model else None
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError):
        return {}
    return {key: token for key, token in config.items() if _MEDIA_KEY.fullmatch(key) and isinstance(token, int)}


_MEDIA_KEY = re.compile("(image|video|audio|vision|boi|eoi|boa|eoa).*_token_(id|index)")


@lru_cache(maxsize=16)
def _media_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Names of tokens with which a processor marks images, unless they are `control_tokens`."""
    if not hasattr(tokenizer, "get_added_vocab"):
        return ()
    ids = set(media_ids(_model_of(tokenizer)).values()) - set(control_tokens(tokenizer).values())
    return tuple(name for name, token in tokenizer.get_added_vocab().items() if token in ids)


def _model_of(tokenizer: Any) -> str:
    """The name of the model, with its revision."""
    reader = vars(tokenizer).get("image_reader")
    return str(vars(tokenizer).get("published", [tokenizer.name_or_path])[0] if reader is None else reader.model)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from (*_texts(key), *_texts(inner))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _replaced(value: Any, replace: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, Mapping):
        return {_replaced(key, replace): _replaced(inner, replace) for key, inner in value.items()}
    return [_replaced(inner, replace) for inner in value] if isinstance(value, list | tuple) else value


def template_text(tokenizer: Any, messages: Any, *, tools: Any = None, **options: Any) -> str:
    """What a tokenizer's chat template writes.

    Since Transformers 5.23, `apply_chat_template` removes keys whose value is None, so a template that asks whether the content
    of a message `is none`, as DeepSeek's do, leaves out its tool calls; the function that it calls for the rest does not.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    if getattr(tokenizer.apply_chat_template, "__func__", None) is not PreTrainedTokenizerBase.apply_chat_template:
        text: str = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        return text
    template = tokenizer.get_chat_template(tools=tools)
    texts, _ = render_jinja_template([messages], tools=tools, chat_template=template, **options, **tokenizer.special_tokens_map)
    return str(texts[0])


@lru_cache(maxsize=16)
def _guarded_copy(tokenizer: Any, _: str) -> Any:
    """The template is an argument because a tokenizer's may be replaced."""
    names, added = _names(tokenizer), {name: name for name in tokenizer.get_added_vocab()}
    new = {name: f"{name[0]}\ue000{_NONCE}\ue000{name[1:]}" for name in names}
    marks = {name: f"rlcore{_NONCE}x{number}x" for number, name in enumerate(names)}
    try:
        made = _renamed_copy(tokenizer, new)
    except Exception:  # it has none, or parts in Python; the library has no class for its errors
        return None
    hide = _substitution(added | marks)
    show = _substitution(added | new | {mark: name for name, mark in marks.items()})

    def render(messages: Any, tools: Any = None, *, tokenize: bool, **options: Any) -> str:
        assert not tokenize
        return show(template_text(tokenizer, _replaced(messages, hide), tools=_replaced(tools, hide), **options))

    made.apply_chat_template, made.written_names = render, _substitution(added | new)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in names}
    # A vocabulary that does not cover a name has unknown tokens for it.
    is_text = all(token not in encode(name, made) or token == tokenizer.unk_token_id for name, token in ids.items())
    return made if is_text and all(encode(new[name], made) == encode(name, tokenizer) for name in names) else None


def _substitution(table: Mapping[str, str]) -> Callable[[str], str]:
    """Replaces the keys of a table in a text, the longest first."""
    pattern = re.compile("|".join(map(re.escape, sorted(table, key=len, reverse=True))))
    return lambda text: pattern.sub(lambda found: table[found.group()], text)


def _renamed_copy(tokenizer: Any, new: Mapping[str, str]) -> Any:
    """A copy of a tokenizer with other names for some tokens, which have the same ids."""
    from rl_core.data.adapted_tokenizer import AdaptedTokenizer, Tokenizer  # imports Transformers

    made = copy.copy(tokenizer)
    if isinstance(tokenizer, AdaptedTokenizer):
        own = {name: getattr(tokenizer.tokenizer, name) for name in (*Tokenizer.__annotations__, "encode", "decode", "save")}
        own["special_tokens"] = {new.get(name, name): token for name, token in own["special_tokens"].items()}
        own |= {"pad_token_id": tokenizer.pad_token_id, "chat_template": tokenizer.chat_template}
        vars(made).update(vars(AdaptedTokenizer(SimpleNamespace(**own), tokenizer.name_or_path)))
    else:
        made._tokenizer = _renamed(tokenizer.backend_tokenizer, new)
        made._special_tokens_map = {key: new.get(str(name), name) for key, name in tokenizer._special_tokens_map.items()}
    return made


def _renamed(backend: Any, new: Mapping[str, str]) -> Any:
    """A copy of a `tokenizers.Tokenizer` with other names for some tokens, which have the same ids."""
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token["content"] = new.get(token["content"], token["content"])
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {new.get(name, name): token for name, token in model["vocab"].items()}
    else:
        model["vocab"] = [[new.get(name, name), score] for name, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if "".join(pair).replace(" ", "") not in new]
    if model.get("unk_token") in new:
        model["unk_token"] = new[model["unk_token"]]
    return type(backend).from_str(json.dumps(state))


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
    own = vars(tokenizer)
    models = {own.get("model_name", ""), own.get("published", [tokenizer.name_or_path])[0]}  # with their revisions
    end_ids = {tokenizer.eos_token_id, *(token for model in models for token in _end_ids(str(model)))}
    ends = {name for name, token in added.items() if token in end_ids}
    roles = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    names = ends.union(str(name) for name in roles if name)
    if template != "None":
        pattern = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
        names |= _turn_tokens(tokenizer, ends, re.compile(pattern or "(?!)"))
    return {name: tokenizer.convert_tokens_to_ids(name) for name in sorted(names)}


def _end_ids(model: str) -> list[int]:
    """The end tokens of a model's generation config: a model may have others than its tokenizer."""
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


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str | None:
    if needs_parts(tokenizer, _settings(tokenizer)[1]):
        messages = in_parts(messages)
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # whatever an expression of the template raises, such as for a system message
        return None
    return text


def in_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each text as a list with one part, which some templates of models with images need."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]


@lru_cache(maxsize=16)
def needs_parts(tokenizer: Any, template: str) -> bool:
    """Whether a template omits contents that are texts. It is an argument because that of a tokenizer may be replaced."""
    messages = [{"role": "user", "content": _USER}]
    try:
        return _USER not in template_text(tokenizer, messages) and _USER in template_text(tokenizer, in_parts(messages))
    except Exception:  # a template that cannot render this is reported when it renders a row
        return False
