"""Tokenizers that Transformers cannot load: their protocol, and an adapter with the interface of Transformers' tokenizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol

from transformers import AddedToken, PreTrainedTokenizer

from rl_core.errors import DataError
from rl_core.plugins.component import describe

_PROBE: Final = "What is 1 + 1?"
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_UNNAMED: Final = "token "


class Tokenizer(Protocol):
    """A tokenizer that Transformers cannot load, named by the import path of its class or a function (`tokenizer.name`)."""

    vocab_size: int
    """Number of token ids, including those of control tokens; `decode` accepts all others, because a model may sample them."""
    special_tokens: Mapping[str, int]
    """Text and id of the control tokens, such as `{"<end>": 256}`: the ones below, and others that the chat template writes."""
    bos_token_id: int | None
    """Start of a text; None if there is no such token."""
    eos_token_id: int
    """End of a completion."""
    pad_token_id: int | None
    """Padding; None to pad with `eos_token_id`."""
    chat_template: str | None
    """Jinja text that renders a conversation; None to join contents, with `eos_token_id` after each answer."""

    def encode(self, text: str) -> Sequence[int]:
        """The token ids of any text without control tokens; an unknown token for what the vocabulary does not have."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids without control tokens; U+FFFD for those that are only a part of a character."""

    def save(self, folder: Path) -> None:
        """Write its files, if it has any, next to the weights of a checkpoint."""


class AdaptedTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """Encodes and decodes with another tokenizer.

    A token is named by its text, or `token N` if it has none or that of another. Control tokens are found in texts by their
    names, as those of a tokenizer without `tokenizer.json`.

    Args:
        tokenizer: the other tokenizer.
        name: its import path, for errors.

    Attributes:
        unnamed: tokens whose name is their number, because their text is a part of a character or that of another token.

    Raises:
        DataError: the tokenizer lacks a member, or its ids are outside its vocabulary.
    """

    vocab_files_names: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        if (problem := _problem(tokenizer)) is not None:
            raise DataError(f"the tokenizer {name} cannot be used: {problem}. See docs/config.md")
        self.tokenizer, self._control = tokenizer, {token: text for text, token in tokenizer.special_tokens.items()}
        self._names = list(_names(tokenizer, self._control))
        self._ids = {text: token for token, text in enumerate(self._names)}
        self.unnamed = frozenset(token for token, text in enumerate(self._names) if text.startswith(_UNNAMED))
        roles = {role: getattr(tokenizer, f"{role}_id") for role in ("bos_token", "eos_token", "pad_token")}
        super().__init__(
            added_tokens_decoder={
                token: AddedToken(text, special=True, normalized=False) for token, text in sorted(self._control.items())
            },
            extra_special_tokens=[text for token, text in self._control.items() if token not in roles.values()],
            special_tokens_pattern="none" if tokenizer.bos_token_id is None else "bos",
            clean_up_tokenization_spaces=False,
            name_or_path=name,
            **{role: None if token is None else self._names[token] for role, token in roles.items()},
        )
        self.chat_template = tokenizer.chat_template

    @property
    def vocab_size(self) -> int:
        return len(self._names)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        runs = groupby((self._ids[token] for token in tokens if token in self._ids), key=self._control.get)
        return "".join(name * len([*run]) if name else self.tokenizer.decode([*run]) for name, run in runs)

    def save_pretrained(self, folder: Any, **_: Any) -> tuple[str, ...]:
        self.tokenizer.save(Path(folder))
        return ()

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [self._names[token] for token in self.tokenizer.encode(text)]

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _convert_id_to_token(self, index: int) -> str:  # a model may have more rows than the tokenizer has tokens
        return self._names[index] if index < len(self._names) else f"{_UNNAMED}{index}"


def _names(tokenizer: Tokenizer, control: dict[int, str]) -> Iterator[str]:
    seen = {*control.values()}
    for token in range(tokenizer.vocab_size):
        text = control.get(token) or tokenizer.decode([token])
        if token not in control and (not text or _REPLACEMENT in text or text in seen or text.startswith(_UNNAMED)):
            text = f"{_UNNAMED}{token}"
        seen.add(text)
        yield text


def _problem(tokenizer: Any) -> str | None:
    """What a tokenizer lacks, as a clause; None if it can be used."""
    members = sorted({*Tokenizer.__annotations__, "encode", "decode", "save"})
    if missing := [member for member in members if not hasattr(tokenizer, member)]:
        return f"it has no {', '.join(f'`{member}`' for member in missing)}"
    size, control = tokenizer.vocab_size, tokenizer.special_tokens
    if tokenizer.eos_token_id is None:
        return "`eos_token_id` is None, so no completion would end"
    for role in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if (token := getattr(tokenizer, role)) is not None and token not in control.values():
            return f"`{role}` is {token}, which is not in `special_tokens`: {dict(control)}"
    if outside := {text: token for text, token in control.items() if not 0 <= token < size}:
        return f"`special_tokens` has {outside}, but `vocab_size` is {size}"
    try:
        ids = [*tokenizer.encode(_PROBE)]
        valid = bool(ids) and all(isinstance(token, int) and 0 <= token < size for token in ids)
        text = tokenizer.decode(ids) if valid else ""
    except Exception as error:
        return f"`encode` must accept every text: encoding {_PROBE!r} and decoding it raised {describe(error)}"
    if not valid:
        return f"`encode` returned {ids!r} for {_PROBE!r}, not token ids from 0 to {size - 1}"
    return None if isinstance(text, str) else f"`decode` returned {text!r} for {ids}, not a text"
