"""Finds the characters of a rendered conversation that a model would have sampled.

A conversation is rendered once, as a whole. Most templates only append, so an answer is the text between its prompt and the
next message. Others rewrite an answer once messages follow it (they drop its reasoning or replace its end token), or open the
answer in the prompt and not in the conversation (`<think>`). In these cases the answer is found by rendering the conversation
again with a known word as its content. The text is then encoded with token boundaries at the ends of the answers, as when a
model starts or stops sampling there (`encode_pieces`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, Protocol

from rl_core.data.tokenizer import decode, encode
from rl_core.errors import DataError
from rl_train.data.image_sources import texts_of

Message = Mapping[str, Any]
Span = tuple[int, int]

_WORD = "rlcoreanswer"
_ANCHOR = 40
"""Number of characters before a header that identify it."""
_REASONING = ("reasoning_content", "reasoning", "thinking")


class Render(Protocol):
    """Renders messages as text, followed by the header of an assistant turn if `header` is set."""

    def __call__(self, messages: Sequence[Message], /, *, header: bool) -> str: ...


@dataclass(frozen=True)
class LocatedText:
    """A rendered conversation and the spans of its trained messages.

    Attributes:
        text: The whole conversation.
        spans: For each trained message, the index of its first trained character and the one after the last.
    """

    text: str
    spans: dict[int, Span]


def locate_trained(
    messages: Sequence[Message],
    trained: Collection[int],
    render: Render,
    *,
    header: bool,
    special_tokens: Callable[[], Iterable[str]],
    end_token: str | None,
) -> LocatedText:
    """The whole text, and the span of each trained message.

    For an assistant message, the span has the characters that a model samples after its prompt. It excludes the header, even
    one that only the conversation has, and an end token that the template replaces once messages follow. For a message of
    another role, it is everything that the message adds to the text.

    Args:
        messages: The conversation.
        trained: Indices of the trained messages.
        render: Applies the chat template.
        header: Whether the header of an assistant turn follows the conversation.
        special_tokens: Returns the texts of the tokens that may close a turn; called only if needed.
        end_token: The tokenizer's end-of-sequence token.

    Raises:
        DataError: The template cannot render the conversation, or omits trained text or its context.
    """
    located = _Locator(messages, render, render(messages, header=header), header, special_tokens, end_token)
    spans: dict[int, Span] = {}
    last = 0
    for number in sorted(trained):
        is_answer = messages[number]["role"] == "assistant"
        start, end = spans[number] = located.answer(number) if is_answer else located.other(number)
        if start < last:
            raise _rewritten(number)
        last = end
    return LocatedText(located.text, spans)


@dataclass
class _Locator:
    messages: Sequence[Message]
    render: Render
    text: str
    header: bool
    special_tokens: Callable[[], Iterable[str]]
    end_token: str | None

    @cached_property
    def _word(self) -> str:
        """A word that no message has."""
        texts = str([*self.messages])
        return next(word for number in count() if (word := _WORD + number * "x") not in texts)

    def other(self, number: int) -> Span:
        """The span of a message that is not an answer: all that it adds, including a following assistant header."""
        before = next((text for end in range(number, 0, -1) if (text := self._try(self.messages[:end])) is not None), "")
        is_last = number + 1 == len(self.messages)
        header = self.header if is_last else self.messages[number + 1]["role"] == "assistant"
        through = self.text if is_last else self._try(self.messages[: number + 1], header=header)
        if through is None or not (self.text.startswith(through) and through.startswith(before)):
            raise _rewritten(number)
        return len(before), len(through)

    def answer(self, number: int) -> Span:
        """The span of an assistant message.

        If the template omits part of the last answer, as some do with all reasoning, the text after its prompt is replaced
        by the answer from the data.
        """
        is_last = number + 1 == len(self.messages)
        prompt = self._try(self.messages[:number], header=True)
        own_text = self.text if is_last and not self.header else self.render(self.messages[: number + 1], header=False)
        problem: DataError | None = None
        if prompt is not None and own_text.startswith(prompt) and self.text.startswith(own_text):
            span = self._after_header(number, own_text, prompt), len(own_text)
        else:
            span = self._by_word(number, own_text, prompt)
            problem = self._without_context(number, span[0])
        if self._left_out("content", number, span, prompt):
            problem = _drops(number, "its content")
        if problem is not None:
            if not is_last or self.header or prompt is None:
                raise problem
            return self._as_written(number, prompt)
        self._check_reasoning(number, own_text, span, prompt)
        return span[0], self._end_of_sampling(number, span, prompt)

    def _end_of_sampling(self, number: int, span: Span, prompt: str | None) -> int:
        """Where a model stops: at the token that ends its turn, even if the template writes more text after it."""
        start, end = span
        message, mark = self.messages[number], self.end_token
        first = self.text.find(mark, start, end) if mark else -1
        if mark and first >= 0 and not self.text[first + len(mark) : end].strip():
            return end
        closing = start
        if not message.get("tool_calls"):
            around = self._around(self._stand_ins(number)[0], self.messages[:number], ())
            if around is None or not self.text.endswith(around[1], start, end):
                return end
            closing = end - len(around[1])
        ended = self.text.find(mark, closing, end) if mark else -1
        if mark and ended >= 0:
            ended += len(mark)
        elif closing > start and self.text[closing:end].strip() and prompt == self._try(self.messages[:number]):
            # Without `add_generation_prompt`, a template may append the header of the next answer to every message.
            special = self._special().search(self.text, closing, end)
            ended = special.end() if special else -1
        return ended if ended >= 0 and self.text[ended:end].strip() else end

    def _special(self) -> re.Pattern[str]:
        tokens = sorted(self.special_tokens(), key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, tokens)) + ")" if tokens else "((?!))")

    def _after_header(self, number: int, own_text: str, prompt: str) -> int:
        """Where the answer starts in `own_text`, which begins with the prompt: after any header that the prompt lacks."""
        if prompt != self._try(self.messages[:number]):
            return len(prompt)  # text that the template writes between header and content (empty reasoning) is sampled
        around = self._around({"role": self.messages[number]["role"], "content": self._word}, self.messages[:number], ())
        gap = around[0][len(prompt) :] if around and around[0].startswith(prompt) and own_text.startswith(around[0]) else ""
        return len(prompt) + (len(gap) if gap.strip() else 0)

    def _by_word(self, number: int, own_text: str, prompt: str | None) -> Span:
        """The span of an answer that the template renders differently in the whole text than as the last message."""
        before, after = self.messages[:number], self.messages[number + 1 :]
        # Where the answer starts in the whole text and in its own rendering, and the text that closes it in each.
        starts: list[tuple[int, int, str]] = []
        for stand_in in self._stand_ins(number):
            inside, alone = self._around(stand_in, before, after), self._around(stand_in, before, ())
            if inside and alone and self.text.startswith(inside[0]) and own_text.startswith(alone[0]):
                put = self._put_between(number, prompt, inside[0], alone[0])
                starts.append((len(inside[0]) - put, len(alone[0]) - put, alone[1]))
        is_begun = prompt is not None and own_text.startswith(prompt) and self.text.startswith(prompt)
        if prompt is not None and is_begun:
            start = self._after_header(number, own_text, prompt)
            starts.insert(0, (start, start, starts[0][2] if starts else ""))
        elif prompt is not None:
            special = self._special()
            starts.append((_shared(prompt, self.text, special), _shared(prompt, own_text, special), ""))
        for start, own_start, closing in starts:
            end = self._end(start, own_text[own_start:], "" if self.messages[number].get("tool_calls") else closing)
            if end is not None:
                # Text that the template writes between the header of the prompt and the content is sampled.
                is_sampled = prompt is not None and self.text.startswith(prompt) and prompt != self._try(before)
                return (min(start, len(prompt)) if prompt is not None and is_sampled else start), end
        if _squeezed(self.messages[number]["content"] or "") not in _squeezed(self.text):
            raise _drops(number, "its content")
        raise _rewritten(number)

    def _put_between(self, number: int, prompt: str | None, inside: str, alone: str) -> int:
        """Number of sampled characters that the template writes between the header of a prompt and the content."""
        bare = self._try(self.messages[:number])
        if prompt is None or not bare or prompt == bare or not prompt.startswith(bare):
            return 0
        header = bare[-_ANCHOR:] + prompt[len(bare) :]
        found = inside.rfind(header)
        put = len(inside) - found - len(header)
        return put if found >= 0 and alone.endswith(inside[found:]) else 0

    def _end(self, start: int, answer: str, closing: str) -> int | None:
        """Where an answer with this start ends; before its closing text, unless the template has replaced that."""
        if self.text.startswith(answer, start):
            return start + len(answer)
        through, found, _ = answer.partition(self.end_token or answer)
        if found and self.text.startswith(through + found, start):
            return start + len(through + found)
        body = answer.removesuffix(closing)
        if not closing or not answer.endswith(closing) or not self.text.startswith(body, start):
            return None
        end = start + len(body)
        # A model stops at the first special token, if the template has not replaced it.
        special = self._special().search(closing)
        kept = closing[: special.end()] if special else ""
        return end + len(kept) if self.text.startswith(kept, end) else end

    def _as_written(self, number: int, prompt: str) -> Span:
        """Append the last answer from the data to its prompt, and return its span in the new text."""
        around = self._around(self._stand_ins(number)[0], self.messages[:number], ())
        if around is None or self.messages[number].get("tool_calls"):
            raise _drops(number, "its content")
        written, opened = self.messages[number]["content"], prompt[len(around[0]) :] if prompt.startswith(around[0]) else ""
        if opened.strip() and written.lstrip().startswith(opened.strip()):
            # Tags opened by the prompt are not sampled again.
            written = written.lstrip()[len(opened.strip()) :]
            written = written.removeprefix(opened[len(opened.rstrip()) :])
        self.text = prompt + written + around[1]
        return len(prompt), len(self.text)

    def _left_out(self, name: str, number: int, span: Span, prompt: str | None) -> bool:
        """Whether a field of a message is missing from its text, ignoring white space."""
        wanted = _squeezed(self.messages[number].get(name) or "")
        start, end = span
        if wanted in _squeezed(self.text[start:end]):
            return False
        # The prompt may contain its beginning, such as the tag that opens its reasoning.
        bare = self._try(self.messages[:number])
        is_opened = bare is not None and prompt is not None and prompt.startswith(bare) and self.text.startswith(prompt)
        return not is_opened or wanted not in _squeezed(self.text[len(bare or "") : end])

    def _check_reasoning(self, number: int, own_text: str, span: Span, prompt: str | None) -> None:
        """Reject training an answer without the reasoning that the template writes only into the last answer."""
        if self.text.startswith(own_text):
            return
        for name in (each for each in _REASONING if isinstance(self.messages[number].get(each), str)):
            if _squeezed(self.messages[number][name]) in _squeezed(own_text) and self._left_out(name, number, span, prompt):
                raise _drops(number, f"`{name}`")

    def _without_context(self, number: int, start: int) -> DataError | None:
        """The error that the context of an answer is missing from the text before it, or None."""
        before = _squeezed(self.text[:start])
        for other, message in enumerate(self.messages[:number]):
            is_context = message["role"] in ("system", "developer", "user")
            if is_context and any(_squeezed(text) not in before for text in texts_of(message)):
                return DataError(
                    f"the chat template leaves out message {other} (from 0) of the role {message['role']!r} once message "
                    f"{number} follows, so the answer would be trained without its context. Use another template "
                    "(policy.tokenizer.chat_template)"
                )
        return None

    def _stand_ins(self, number: int) -> list[dict[str, Any]]:
        """The message with a known word as its content, and the word alone in its role; without tool calls first."""
        message = self.messages[number]
        found = [{**message, "content": self._word}, {"role": message["role"], "content": self._word}]
        return found[::-1] if message.get("tool_calls") else found

    def _around(self, stand_in: Message, before: Sequence[Message], after: Sequence[Message]) -> tuple[str, str] | None:
        """The text before and after the content of a message; None if the template does not write it exactly once."""
        text = self._try([*before, stand_in, *after], header=self.header and bool(after))
        if text is None or text.count(self._word) != 1:
            return None
        left, _, right = text.partition(self._word)
        return left, right

    def _try(self, messages: Sequence[Message], *, header: bool = False) -> str | None:
        """The rendered messages; None if the template cannot render them, such as a system message alone."""
        if not messages:
            return "" if not header else None
        try:
            return self.render(messages, header=header)
        except DataError:
            return None


def _shared(prompt: str, text: str, special: re.Pattern[str]) -> int:
    """Length of the common prefix, excluding part of a special token in which they differ."""
    length = next((n for n, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), min(len(prompt), len(text)))
    inside = next((found for found in special.finditer(text) if found.start() < length < found.end()), None)
    return inside.start() if inside else length


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _drops(number: int, what: str) -> DataError:
    return DataError(
        f"the chat template leaves out {what} of message {number} (from 0), or part of it, in the whole conversation "
        "(many drop the reasoning of earlier answers), so the model would be trained on a different answer than the data has. "
        'Train only the last answer (`sft.only_unmask_final: true`, or `"weight": 0` on the earlier messages), split the '
        "conversation into one per answer, or use a template that keeps earlier answers (policy.tokenizer.chat_template)"
    )


def _rewritten(number: int) -> DataError:
    return DataError(
        f"the chat template rewrites message {number} (from 0) once later messages follow, so its tokens cannot be found in "
        'the whole conversation. Exclude it from training (`sft.only_unmask_final: true`, or `"weight": 0` on the message), '
        "split the conversation into one per answer, or use a template that keeps earlier messages "
        "(policy.tokenizer.chat_template)"
    )


def encode_pieces(text: str, borders: Sequence[int], tokenizer: Any) -> list[list[int]]:
    """The token ids of the pieces between the boundaries; concatenated, they are the whole text.

    If the tokenizer keeps a boundary, the pieces are those of the text encoded as a whole. If it merges the characters around a
    boundary into one token (for example, white space at the beginning of an answer), the two sides are encoded separately, as
    when a model continues a prompt.

    Args:
        text: The text.
        borders: Positions in the text, in characters, ascending.
        tokenizer: A Transformers tokenizer.

    Raises:
        DataError: The tokenizer cannot encode the text after a boundary separately without changing it.
    """
    whole = encode(text, tokenizer)
    counts: list[int] = []
    for number, border in enumerate(borders):
        before = encode(text[:border], tokenizer)
        if whole[: len(before)] != before:
            left, right = text[:border], text[border:]
            pieces = encode_pieces(left, borders[:number], tokenizer)
            pieces += encode_pieces(right, [later - border for later in borders[number + 1 :]], tokenizer)
            _check_joined(pieces, whole, left, right, tokenizer)
            return pieces
        counts.append(len(before))
    return [whole[start:end] for start, end in zip([0, *counts], [*counts, len(whole)], strict=True)]


def _check_joined(pieces: list[list[int]], whole: list[int], left: str, right: str, tokenizer: Any) -> None:
    joined = [token for piece in pieces for token in piece]
    if decode(tokenizer, whole) == left + right:
        is_changed = decode(tokenizer, joined) != left + right
    else:
        # A decoder that does not restore the whole text proves nothing; a word prefix in the middle of a text is a change.
        first = tokenizer.convert_ids_to_tokens(encode(right, tokenizer)[:1])
        is_changed = bool(first) and first[0].startswith("\u2581") and not right[:1].isspace()
    if is_changed:
        raise DataError(
            f"the texts {left[-20:]!r} and {right[:20]!r} have different tokens together and separately, and this tokenizer "
            "adds characters to the second one if it is encoded separately, so the boundary between prompt and answer "
            "cannot be kept. Strip the white space around it, or use a template whose header this tokenizer does not merge"
        )
