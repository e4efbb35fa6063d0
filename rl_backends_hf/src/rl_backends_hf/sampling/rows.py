"""Rows grouped by prompt, and what is kept of conversations.

A `SessionCache` keeps keys and values between the turns of a conversation, so that a turn computes only its new tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from rl_backends_base.rows import Row
from rl_backends_hf.pictures import Pictures, with_features
from rl_backends_hf.sampling.kv_cache import SlotCache
from rl_core.data.images import RowImage


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """Rows with the same tokens and images, which share a prefill; `prompt` is that of `identity`."""

    prompt: list[int]
    rows: list[Row]

    @property
    def images(self) -> Sequence[RowImage]:
        """The images of each row."""
        return self.rows[0].prompt.images

    def tokens(self, pictures: Pictures | None) -> list[int]:
        """The tokens of each row, as `Pictures.mark` returns them; images that are not among `pictures` remain tokens."""
        shown = [image for image in self.images if pictures is not None and image.digest in pictures.first]
        return with_features(self.rows[0].sequence, shown, {} if pictures is None else pictures.first)


def identity(row: Row) -> list[int]:
    """The tokens of a row, prompt and completion, with negative numbers for features, which only equal pictures share."""
    if not (images := row.prompt.images):
        return row.sequence
    return with_features(row.sequence, images, {image.digest: int(image.digest, 16) << 32 for image in images})


def group_by_prompt(rows: Iterable[Row]) -> list[PromptGroup]:
    """Groups of rows with the same tokens and images, prompt and completion, in the order of their first rows."""
    groups: dict[tuple[int, ...], PromptGroup] = {}
    for row in rows:
        tokens = identity(row)
        groups.setdefault(tuple(tokens), PromptGroup(prompt=tokens, rows=[])).rows.append(row)
    return list(groups.values())


@dataclass(frozen=True, kw_only=True)
class CachedPrefix:
    """Keys and values of the first tokens of a row.

    Attributes:
        tokens: the tokens, as in `identity`.
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
