"""The rows of one generation call, created from prompts and grouped by prompt, and what is kept of conversations.

A `SessionCache` keeps keys and values between the turns of a conversation, so that a turn computes only its new tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Final

import torch

from rl_backends_hf.sampling.kv_cache import SlotCache
from rl_backends_hf.sampling.token_choice import LIKELY_TOKENS, SamplingParameters
from rl_core.data.generation_io import Completion, Prompt, SampledRow
from rl_core.data.tokenizer import decode
from rl_core.errors import RLCoreError


@dataclass(kw_only=True, eq=False)
class Row(SampledRow):
    """One unfinished completion.

    Attributes:
        greedy: whether it takes the most likely token at each position.
        parameters: the distribution of its tokens.
        likely: the most likely tokens at each position, if it asks for them.
        scanner: searches for stop strings; None if there are none.
        session: conversation that it continues, whose keys and values are kept.
        streams: whether it is returned while it is sampled.
        streamed: number of its tokens that were returned.
        versions: of the weights that drew each token.
        error: why it cannot be completed.
    """

    greedy: bool = False
    parameters: SamplingParameters = field(default_factory=SamplingParameters)
    likely: list[list[tuple[int, float]]] = field(default_factory=list)
    scanner: StopStringScanner | None = None
    session: str | None = None
    streams: bool = False
    streamed: int = 0
    versions: list[int] = field(default_factory=list)
    error: RLCoreError | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and completion so far."""
        return len(self.prompt.tokens) + len(self.tokens)

    @property
    def longest(self) -> int:
        """Maximum number of tokens of prompt and completion."""
        return len(self.prompt.tokens) + self.prompt.limit

    @property
    def num_likely(self) -> int:
        """Number of most likely tokens that it asks for at each position."""
        return int(self.prompt.sampling.get(LIKELY_TOKENS, 0))

    @property
    def has_ended(self) -> bool:
        """Whether a stop or the limit has ended it."""
        return self.stopped or len(self.tokens) >= self.prompt.limit

    def append(self, token: int, logprob: float, *, version: int, end_ids: frozenset[int]) -> bool:
        """Append a token that weights of `version` drew; returns whether the row ends with it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        # The scanner must read every token, including end tokens.
        is_stopped = self.scanner is not None and self.scanner.push(token)
        self.stopped = is_stopped or token in end_ids
        return self.has_ended

    def so_far(self) -> Completion:
        """The row with its tokens so far, at least one."""
        completion = self.completion(weight_version=self.versions[0])
        return replace(completion, token_versions=self.versions, top_logprobs=self.likely if self.num_likely else None)


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """Rows with the same tokens, which share a prefill."""

    prompt: list[int]
    rows: list[Row]

    def without(self, gone: Collection[int]) -> PromptGroup:
        """The group without the rows with these `id`s."""
        return PromptGroup(prompt=self.prompt, rows=[row for row in self.rows if id(row) not in gone])


def to_rows(prompts: Sequence[Prompt], tokenizer: Any, *, greedy: bool, parameters: SamplingParameters) -> list[Row]:
    """Rows without sampled tokens yet; `tokenizer` is required if a prompt has stop strings.

    Raises:
        DataError: a row's own sampling parameters are invalid.
    """
    return [
        Row(
            prompt=prompt,
            greedy=greedy,
            parameters=parameters.with_own(prompt.sampling) if prompt.sampling else parameters,
            scanner=StopStringScanner(tokenizer, prompt.stop_strings, prompt.tokens) if prompt.stop_strings else None,
        )
        for prompt in prompts
    ]


def group_by_prompt(rows: Iterable[Row]) -> list[PromptGroup]:
    """Groups of rows with the same tokens, prompt and completion; longest first."""
    groups: dict[tuple[int, ...], PromptGroup] = {}
    for row in rows:
        tokens = row.sequence
        groups.setdefault(tuple(tokens), PromptGroup(prompt=tokens, rows=[])).rows.append(row)
    return sorted(groups.values(), key=lambda group: len(group.prompt), reverse=True)


_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS: Final = 6
"""Number of preceding tokens decoded with the unread ones, so that spaces and partial characters are decoded correctly."""
_WINDOW_TOKENS: Final = 24
"""Number of tokens after which the decoded window is shortened."""
_MAX_CHARACTER_BYTES: Final = 4
"""Maximum number of bytes, and thus of tokens, of a UTF-8 character."""


class StopStringScanner:
    """Detects when a stop string has appeared in a row's completion, reading each token once.

    Text is decoded with special tokens, so a special token's text can be a stop string. Strings are found across token
    boundaries; the prompt's text does not count.

    Args:
        tokenizer: a Transformers tokenizer.
        strings: the stop strings.
        prompt: the prompt's tokens.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._overlap = max(len(string) for string in self._strings) - 1
        self._tail = ""
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        self._read_chars = len(decode(self._tokenizer, self._window))
        self._unread = 0

    def push(self, token: int) -> bool:
        """Read one more token; returns whether a stop string is complete."""
        self._window.append(token)
        self._unread += 1
        text = decode(self._tokenizer, self._window)
        fresh = text[self._read_chars :]
        whole = fresh.rstrip(_REPLACEMENT) if self._unread < _MAX_CHARACTER_BYTES else fresh
        searched = self._tail + whole
        if any(string in searched for string in self._strings):
            return True
        if len(whole) == len(fresh):
            self._advance(searched, len(text))
        return False

    def _advance(self, text: str, read_chars: int) -> None:
        """Mark the decoded text as searched; keep the end that may start a stop string."""
        self._tail = text[-self._overlap :] if self._overlap else ""
        self._read_chars, self._unread = read_chars, 0
        if len(self._window) > _WINDOW_TOKENS:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._read_chars = len(decode(self._tokenizer, self._window))


@dataclass(frozen=True, kw_only=True)
class CachedPrefix:
    """Keys and values of the first tokens of a row.

    Attributes:
        tokens: the tokens.
        layers: keys and values of each layer, [heads, len(tokens), head_dim].
    """

    tokens: list[int]
    layers: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors."""
        return sum(tensor.nbytes for pair in self.layers for tensor in pair)

    def of(self, tokens: Sequence[int]) -> CachedPrefix:
        """The longest common prefix with `tokens`, shorter than `tokens` so that at least one token is left to compute."""
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, tokens[:-1], strict=False))
        length = sum(1 for _ in equal)
        return CachedPrefix(
            tokens=self.tokens[:length], layers=[(keys[:, :length], values[:, :length]) for keys, values in self.layers]
        )


class SessionCache:
    """The latest turn of each session; the least recently used ones are discarded if memory is short.

    Args:
        max_bytes: memory limit of all sessions.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._prefixes: dict[str, CachedPrefix] = {}

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def num_bytes(self) -> int:
        """Memory of all sessions."""
        return self._bytes

    def put(self, session: str, tokens: list[int], cache: SlotCache, slot: int) -> None:
        """Copy keys and values of a slot that holds `tokens`; a row larger than the limit is not kept."""
        self.take(session)
        if not tokens or self._max_bytes == 0:
            return
        prefix = CachedPrefix(tokens=tokens, layers=cache.copy_of(slot, len(tokens)))
        if prefix.num_bytes > self._max_bytes:
            return
        self._prefixes[session] = prefix
        self._bytes += prefix.num_bytes
        while self._bytes > self._max_bytes:
            self.take(next(iter(self._prefixes)))

    def take(self, session: str) -> CachedPrefix | None:
        """Remove and return what is kept of a session."""
        prefix = self._prefixes.pop(session, None)
        if prefix is not None:
            self._bytes -= prefix.num_bytes
        return prefix

    def close(self, sessions: Iterable[str]) -> None:
        """Discard sessions; unknown names are ignored."""
        for session in sessions:
            self.take(session)

    def clear(self) -> None:
        """Discard all sessions, as their keys and values belong to older weights."""
        self._prefixes.clear()
        self._bytes = 0
