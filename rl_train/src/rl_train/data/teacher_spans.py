"""Spans of an answer's text that end with a token of two tokenizers, so that a teacher with other tokens can score them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import Any

import torch

from rl_core.data.tokenizer import decode, encode
from rl_train.data.special_tokens import control_tokens, guarded

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_INCOMPLETE = "\ufffd"


def byte_ends(token_ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Number of bytes of the text up to the end of each token, also of tokens that end within a character.

    Such tokens are those of byte-level vocabularies, whose names have a letter for each byte, and `<0x00>` to `<0xFF>`; those
    of an `AdaptedTokenizer` count as one byte.
    """
    ends, first, complete, size, pending = list[int](), 0, 0, 0, 0
    for number, token in enumerate(token_ids, 1):
        # The text of a token depends on those before it: decoders drop the first space.
        before, now = decode(tokenizer, token_ids[first:complete]), decode(tokenizer, token_ids[first:number])
        if now.startswith(before) and not now.endswith(_INCOMPLETE):
            size, pending, first, complete = size + len(now[len(before) :].encode()), 0, complete, number
        else:
            name = str(tokenizer.convert_ids_to_tokens(token))
            is_byte = token in getattr(tokenizer, "unnamed", ()) or _BYTE.fullmatch(name)
            pending += 1 if is_byte else len(name)
        ends.append(size + pending)
    return ends


def answer_spans(token_ids: Sequence[int], student: Any, teacher: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens of an answer in a teacher's vocabulary, and the shortest spans of text that end with a token of both.

    The student's end-of-sequence token is read as the teacher's, and other control tokens as those of the same name. Invalid
    UTF-8, text and control tokens that the teacher's vocabulary does not have, and what follows them are in no span.

    Args:
        token_ids: n tokens that the student sampled.
        student: its tokenizer.
        teacher: the teacher's tokenizer.

    Returns:
        The teacher's tokens [m], the span of each of the student's [n], and of each of the teacher's [m], all int64: spans are
        numbered from 1, and 0 is none.
    """
    names = control_tokens(teacher)
    controls = {number: names.get(name) for name, number in control_tokens(student).items()}
    controls[student.eos_token_id] = teacher.eos_token_id
    read, own, others, size = list[int](), list[int](), list[int](), 0
    ends: tuple[Sequence[int], Sequence[int]]
    for is_control, group in groupby(token_ids, key=controls.__contains__):
        ids, base = [*group], size
        if is_control:
            tokens = [
                token for token in takewhile(lambda token: token is not None, map(controls.get, ids)) if token is not None
            ]
            size, is_whole = base + len(tokens), len(tokens) == len(ids)
            ends = (range(1, len(tokens) + 1),) * 2
        else:
            text, _, invalid = decode(student, ids).partition(_INCOMPLETE)
            tokens = encode(text, guarded(teacher, text))
            again = decode(teacher, tokens)
            same = next((at for at, (one, other) in enumerate(zip(text, again, strict=False)) if one != other), len(again))
            size, is_whole = base + len(text[:same].encode()), same == len(text) and not invalid
            ends = byte_ends(ids, student), byte_ends(tokens, teacher)
        own += [base + end for end in ends[0]]
        others += [base + end for end in ends[1]]
        read += tokens
        if not is_whole:
            break
    of_student, of_teacher = torch.zeros(len(token_ids), dtype=torch.int64), torch.zeros(len(read), dtype=torch.int64)
    sides = _numbered(own), _numbered(others)
    numbers = {end: number for number, end in enumerate(sorted(set(sides[0]) & set(sides[1])), 1) if end[0] <= size}
    for side, spans in zip(sides, (of_student, of_teacher), strict=True):
        number = 0
        for token in reversed(range(len(side))):
            number = numbers.get(side[token], number)
            spans[token] = number
    return torch.tensor(read, dtype=torch.int64), of_student, of_teacher


def _numbered(ends: Sequence[int]) -> list[tuple[int, int]]:
    """Each end with the number of tokens that have ended there: several do if some have no text."""
    seen = Counter[int]()
    return [(end, seen.update([end]) or seen[end]) for end in ends]


def over_spans(values: torch.Tensor, spans: torch.Tensor, *, at: torch.Tensor | None = None) -> torch.Tensor:
    """[B, T'] sum of `values` [B, T] over each span in `at`, by default `spans`; `spans` [B, T] and `at` are int64."""
    at = spans if at is None else at
    sums = values.new_zeros(len(spans), int(max(spans.max(), at.max())) + 1)
    return sums.scatter_add(1, spans, values).gather(1, at)
