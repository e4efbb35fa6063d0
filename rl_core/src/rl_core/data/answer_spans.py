"""Finds the characters of a rendered conversation that a model would have sampled; knows no tokens.

A conversation is rendered once, as a whole. Most templates only append, so that an answer lies between the prompt that asks
for it and the next message. Others rewrite an answer once messages follow it (they drop its reasoning or replace its end
token), or open the answer in the prompt and not in the conversation (`<think>`). There the answer is found by rendering the
conversation again with a known word in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_core.errors import DataError

Message = Mapping[str, Any]
Span = tuple[int, int]

_WORD = "rlcoreanswer"
_ANCHOR = 40
"""Characters of what precedes a header by which the header is recognized."""
_REASONING = ("reasoning_content", "reasoning", "thinking")


class Render(Protocol):
    """Renders messages as text, with the header of an assistant's turn after them if `header` is set."""

    def __call__(self, messages: Sequence[Message], /, *, header: bool) -> str: ...


@dataclass(frozen=True)
class LocatedText:
    """A rendered conversation and where its trained messages are.

    Attributes:
        text: The whole conversation.
        spans: For each trained message, the first character that is trained and the one after the last.
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
    """The whole text, and the characters of each trained message.

    For an assistant's message these are the characters that a model samples after the prompt up to it: not the header, even
    one that only the conversation has, and not an end token that the template replaces once messages follow. For a message of
    another role, they are all that it adds to the text.

    Args:
        messages: The conversation.
        trained: Numbers of the messages that are trained.
        render: Applies the chat template.
        header: Whether the header of an assistant's turn follows the conversation.
        special_tokens: Gives the texts of the tokens that may close a turn; called only if they matter.
        end_token: The tokenizer's end-of-sequence token.

    Raises:
        DataError: The template cannot render the conversation, or leaves out what is trained or what it answers.
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

    def other(self, number: int) -> Span:
        """The span of a message that is not an answer: all that it adds, with the header of an answer that follows it."""
        before = next((text for end in range(number, 0, -1) if (text := self._try(self.messages[:end])) is not None), "")
        is_last = number + 1 == len(self.messages)
        header = self.header if is_last else self.messages[number + 1]["role"] == "assistant"
        through = self.text if is_last else self._try(self.messages[: number + 1], header=header)
        if through is None or not (self.text.startswith(through) and through.startswith(before)):
            raise _rewritten(number)
        return len(before), len(through)

    def answer(self, number: int) -> Span:
        """The span of an assistant's message.

        The text is replaced if the template leaves out part of the last answer, as some do with all reasoning: the answer is
        then put after its prompt as the data has it.
        """
        is_last = number + 1 == len(self.messages)
        prompt = self._try(self.messages[:number], header=True)
        own = self.text if is_last and not self.header else self.render(self.messages[: number + 1], header=False)
        problem: DataError | None = None
        if prompt is not None and own.startswith(prompt) and self.text.startswith(own):
            span = self._after_header(number, own, prompt), len(own)
        else:
            span = self._by_word(number, own, prompt)
            problem = self._without_context(number, span[0])
        if self._left_out("content", number, span, prompt):
            problem = _drops(number, "its content")
        if problem is not None:
            if not is_last or self.header or prompt is None:
                raise problem
            return self._as_written(number, prompt)
        self._check_reasoning(number, own, span, prompt)
        return span[0], self._end_of_sampling(number, span, prompt)

    def _end_of_sampling(self, number: int, span: Span, prompt: str | None) -> int:
        """Where a model stops: at the token that ends its turn, even if the template puts more after it."""
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
            # Without `add_generation_prompt`, a template may put the header of the next answer after every message.
            special = self._special().search(self.text, closing, end)
            ended = special.end() if special else -1
        return ended if ended >= 0 and self.text[ended:end].strip() else end

    def _special(self) -> re.Pattern[str]:
        tokens = sorted(self.special_tokens(), key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, tokens)) + ")" if tokens else "((?!))")

    def _after_header(self, number: int, own: str, prompt: str) -> int:
        """Where the answer starts in `own`, which begins with the prompt: after a header that the prompt lacks."""
        if prompt != self._try(self.messages[:number]):
            return len(prompt)  # what the template puts between a header and the content (empty reasoning) is sampled
        around = self._around({"role": self.messages[number]["role"], "content": _WORD}, self.messages[:number], ())
        gap = around[0][len(prompt) :] if around and around[0].startswith(prompt) and own.startswith(around[0]) else ""
        return len(prompt) + (len(gap) if gap.strip() else 0)

    def _by_word(self, number: int, own: str, prompt: str | None) -> Span:
        """The span of an answer that the whole text has in another form than the template gives it as the last message."""
        before, after = self.messages[:number], self.messages[number + 1 :]
        # Where the answer starts in the whole text and in its own, and what closes it there.
        starts: list[tuple[int, int, str]] = []
        for stand_in in self._stand_ins(number):
            inside, alone = self._around(stand_in, before, after), self._around(stand_in, before, ())
            if inside and alone and self.text.startswith(inside[0]) and own.startswith(alone[0]):
                put = self._put_between(number, prompt, inside[0], alone[0])
                starts.append((len(inside[0]) - put, len(alone[0]) - put, alone[1]))
        is_begun = prompt is not None and own.startswith(prompt) and self.text.startswith(prompt)
        if prompt is not None and is_begun:
            start = self._after_header(number, own, prompt)
            starts.insert(0, (start, start, starts[0][2] if starts else ""))
        elif prompt is not None:
            special = self._special()
            starts.append((_shared(prompt, self.text, special), _shared(prompt, own, special), ""))
        for start, own_start, closing in starts:
            end = self._end(start, own[own_start:], "" if self.messages[number].get("tool_calls") else closing)
            if end is not None:
                # What the template puts between the header of the prompt and the content is sampled.
                is_sampled = prompt is not None and self.text.startswith(prompt) and prompt != self._try(before)
                return (min(start, len(prompt)) if prompt is not None and is_sampled else start), end
        if _squeezed(self.messages[number]["content"] or "") not in _squeezed(self.text):
            raise _drops(number, "its content")
        raise _rewritten(number)

    def _put_between(self, number: int, prompt: str | None, inside: str, alone: str) -> int:
        """How many characters the template puts between the header of a prompt and the content, which are sampled."""
        bare = self._try(self.messages[:number])
        if prompt is None or not bare or prompt == bare or not prompt.startswith(bare):
            return 0
        header = bare[-_ANCHOR:] + prompt[len(bare) :]
        found = inside.rfind(header)
        put = len(inside) - found - len(header)
        return put if found >= 0 and alone.endswith(inside[found:]) else 0

    def _end(self, start: int, answer: str, closing: str) -> int | None:
        """Where an answer ends that starts there; before its closing text, as far as the template has replaced that."""
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
        """Put the last answer after its prompt as the data has it, and return its span in the new text."""
        around = self._around(self._stand_ins(number)[0], self.messages[:number], ())
        if around is None or self.messages[number].get("tool_calls"):
            raise _drops(number, "its content")
        written, opened = self.messages[number]["content"], prompt[len(around[0]) :] if prompt.startswith(around[0]) else ""
        if opened.strip() and written.lstrip().startswith(opened.strip()):
            # What the prompt opens is not sampled again.
            written = written.lstrip()[len(opened.strip()) :]
            written = written.removeprefix(opened[len(opened.rstrip()) :])
        self.text = prompt + written + around[1]
        return len(prompt), len(self.text)

    def _left_out(self, name: str, number: int, span: Span, prompt: str | None) -> bool:
        """Whether a field of a message is not in its text, white space aside."""
        wanted = _squeezed(self.messages[number].get(name) or "")
        start, end = span
        if wanted in _squeezed(self.text[start:end]):
            return False
        # The prompt may have the beginning of it, such as the tag that opens its reasoning.
        bare = self._try(self.messages[:number])
        is_opened = bare is not None and prompt is not None and prompt.startswith(bare) and self.text.startswith(prompt)
        return not is_opened or wanted not in _squeezed(self.text[len(bare or "") : end])

    def _check_reasoning(self, number: int, own: str, span: Span, prompt: str | None) -> None:
        """Refuse to train an answer without the reasoning that the template writes only into the last answer."""
        if self.text.startswith(own):
            return
        for name in (each for each in _REASONING if isinstance(self.messages[number].get(each), str)):
            if _squeezed(self.messages[number][name]) in _squeezed(own) and self._left_out(name, number, span, prompt):
                raise _drops(number, f"`{name}`")

    def _without_context(self, number: int, start: int) -> DataError | None:
        """The error that the text before an answer lacks what it answers, or None."""
        before = _squeezed(self.text[:start])
        for other, message in enumerate(self.messages[:number]):
            if message["role"] in ("system", "developer", "user") and _squeezed(message["content"] or "") not in before:
                return DataError(
                    f"the chat template leaves out message {other} (from 0) of the role {message['role']!r} once message "
                    f"{number} follows: the answer would be trained without what it answers. Use another template "
                    "(policy.tokenizer.chat_template)"
                )
        return None

    def _stand_ins(self, number: int) -> list[dict[str, Any]]:
        """The message with a known word as its content, and the word alone in its role; without its calls first."""
        message = self.messages[number]
        found = [{**message, "content": _WORD}, {"role": message["role"], "content": _WORD}]
        return found[::-1] if message.get("tool_calls") else found

    def _around(self, stand_in: Message, before: Sequence[Message], after: Sequence[Message]) -> tuple[str, str] | None:
        """The text before and after the content of a message; None if the template does not write it exactly once."""
        text = self._try([*before, stand_in, *after], header=self.header and bool(after))
        if text is None or text.count(_WORD) != 1:
            return None
        left, _, right = text.partition(_WORD)
        return left, right

    def _try(self, messages: Sequence[Message], *, header: bool = False) -> str | None:
        """The text of messages; None if the template does not render them, as some do not a system message alone."""
        if not messages:
            return "" if not header else None
        try:
            return self.render(messages, header=header)
        except DataError:
            return None


def _shared(prompt: str, text: str, special: re.Pattern[str]) -> int:
    """How many characters both begin with, without part of a special token in which they differ."""
    length = next((n for n, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), min(len(prompt), len(text)))
    inside = next((found for found in special.finditer(text) if found.start() < length < found.end()), None)
    return inside.start() if inside else length


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _drops(number: int, what: str) -> DataError:
    return DataError(
        f"the chat template leaves out {what} of message {number} (from 0), or part of it, in the whole conversation (many "
        "drop the reasoning of earlier answers): a model would be trained on another answer than the data holds. Train the "
        'last answer alone (`sft.only_unmask_final: true`, or `"weight": 0` on the earlier messages), give one conversation '
        "per answer, or use a template that keeps earlier answers as they are (policy.tokenizer.chat_template)"
    )


def _rewritten(number: int) -> DataError:
    return DataError(
        f"the chat template rewrites message {number} (from 0) once later messages follow, so that its tokens cannot be found "
        'in the whole conversation. Do not train it (`sft.only_unmask_final: true`, or `"weight": 0` on the message), give '
        "one conversation per answer, or use a template that keeps earlier messages as they are "
        "(policy.tokenizer.chat_template)"
    )
