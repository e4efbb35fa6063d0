"""Rows that an engine is completing: how each is sampled, its tokens so far, and whether it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from rl_backends_base.token_choice import LIKELY_TOKENS, STOP_TOKENS, SamplingParameters
from rl_core.data.generation_io import PROMPT_LOGPROBS, SETS, Completion, SampledRow, SampledSets, joined_sets
from rl_core.data.tokenizer import decode
from rl_core.errors import RLCoreError


@dataclass(kw_only=True, eq=False)
class Row(SampledRow):
    """One unfinished completion.

    Attributes:
        greedy: whether it takes the most likely token at each position.
        parameters: the distribution of its tokens.
        likely: the most likely tokens at each position, if it asks for them.
        sets: words of the set that each token was drawn from, if it asks for them.
        prompt_scores: `prompt_logprobs` of `GenerationOutputSpec`, once they are computed, if it asks for them.
        scanner: searches for stop strings; None if there are none.
        session: conversation that it continues, whose keys and values are kept.
        streams: whether it is returned while it is sampled.
        streamed: number of its tokens that were returned.
        versions: of the weights that drew each token.
        state: whatever the engine keeps of the row while it is in flight; None before its prefill.
        error: why it cannot be completed.
    """

    greedy: bool = False
    parameters: SamplingParameters = field(default_factory=SamplingParameters)
    likely: list[list[tuple[int, float]]] = field(default_factory=list)
    sets: list[torch.Tensor] = field(default_factory=list)
    prompt_scores: list[list[tuple[int, float]]] | None = None
    scanner: StopStringScanner | None = None
    session: str | None = None
    streams: bool = False
    streamed: int = 0
    versions: list[int] = field(default_factory=list)
    state: Any = None
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
        return int(self.prompt.sampling.get(LIKELY_TOKENS) or 0)

    @property
    def wants_sets(self) -> bool:
        """Whether it asks for the sets that its tokens are drawn from."""
        return bool(self.prompt.sampling.get(SETS))

    @property
    def num_prompt_likely(self) -> int | None:
        """Number of most likely tokens that it asks for at each token of its prompt; None unless it asks for their scores."""
        value = self.prompt.sampling.get(PROMPT_LOGPROBS)
        return None if value is None else int(value)

    @property
    def lacks_prompt_scores(self) -> bool:
        """Whether it asks for the log-probabilities of its prompt, and they are not computed yet."""
        return self.num_prompt_likely is not None and self.prompt_scores is None

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
        self.stopped = is_stopped or token in end_ids or token in (self.prompt.sampling.get(STOP_TOKENS) or ())
        return self.has_ended

    def so_far(self) -> Completion:
        """The row with its tokens so far, at least one."""
        completion = self.completion(weight_version=self.versions[0])
        likely = self.likely if self.num_likely else None
        return replace(
            completion,
            token_versions=self.versions,
            top_logprobs=likely,
            sampled_sets=self._sampled_sets(),
            prompt_logprobs=self.prompt_scores,
        )

    def _sampled_sets(self) -> SampledSets | None:
        if not self.wants_sets:
            return None
        counts = torch.tensor([len(words) for words in self.sets], dtype=torch.int32)
        return joined_sets([len(self.prompt.tokens), SampledSets(counts=counts, words=torch.cat(self.sets))])


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
