"""Checks that a chat template renders the tokens that a run assumes.

Sampled tokens are never tokenized again. So the tokens of each turn must be those of the whole rendered conversation, the
generation prompt must only append text, and the template must end each answer with a token at which the engine stops. Only the
tokenizer is needed, no model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from rl_core.data.tokenizer import encode
from rl_core.errors import DataError
from rl_train.data.messages import get_first_index_that_differs, get_formatted_message_log
from rl_train.data.special_tokens import in_parts, needs_parts
from rl_train.diagnostics.diagnosis import Diagnosis, DiagnosisStatus

Message = dict[str, str]

RENDERS = "chat_template_renders"
HEADER = "generation_prompt_is_prefix"
JOINS = "turns_join"
ENDS = "end_of_turn_stops"
_ANSWER = "42"
"""Short, and only of digits, which every tokenizer can encode."""


def check_chat_template(
    tokenizer: Any, question: Sequence[Message], *, stop_ids: Collection[int], stop_strings: Sequence[str] = ()
) -> list[Diagnosis]:
    """Run all checks of a chat template; if it does not render, only the first.

    Args:
        tokenizer: the policy's.
        question: messages with role and content, the last one from the user.
        stop_ids: tokens that end a completion.
        stop_strings: strings that end a completion.
    """
    if not tokenizer.chat_template:
        without = "the tokenizer has no chat template: contents are concatenated, and the end-of-sequence token ends an answer"
        return [Diagnosis(name=RENDERS, status=DiagnosisStatus.OK, found=without)]
    rendered = check_renders(tokenizer, question)
    if rendered.status is DiagnosisStatus.FAILED:
        return [rendered]
    return [
        rendered,
        check_generation_prompt(tokenizer, question),
        check_turns_join(tokenizer, question),
        check_end_of_turn(tokenizer, question, stop_ids=stop_ids, stop_strings=stop_strings),
    ]


def check_renders(tokenizer: Any, question: Sequence[Message]) -> Diagnosis:
    """Check that conversations of one and two turns render, and that the text contains the content of every message."""
    failed = partial(
        Diagnosis,
        name=RENDERS,
        status=DiagnosisStatus.FAILED,
        why="Every prompt is rendered with the template, so the model never sees content that the template drops.",
        remedy="Set another template (policy.tokenizer.chat_template), or change the messages to roles that this one supports.",
    )
    for messages, header in ((question, True), (_answered(question), False), (_second_turn(question), True)):
        roles = [message["role"] for message in messages]
        try:
            text = _render(tokenizer, messages, header=header)
        except _TemplateFailed as error:
            return failed(found=f"the template cannot render messages with the roles {roles}: {error}")
        if lost := [message["role"] for message in messages if message["content"].strip() not in text]:
            return failed(found=f"for messages with the roles {roles}, the rendered text lacks the content of: {lost}")
    found = f"conversations of one and two turns are rendered with the content of all {len(_second_turn(question))} messages"
    return Diagnosis(name=RENDERS, status=DiagnosisStatus.OK, found=found)


def check_generation_prompt(tokenizer: Any, question: Sequence[Message]) -> Diagnosis:
    """Check that the rendered conversation with the answer begins with the generation prompt, as text and as tokens.

    A header that also opens the answer (`<think>`) is only a warning: rollouts are correct, but conversations in training data
    lack that text.
    """
    bare, prompt = _render(tokenizer, question, header=False), _render(tokenizer, question, header=True)
    whole = _render(tokenizer, _answered(question), header=False)
    details = {"header": prompt[len(bare) :] if prompt.startswith(bare) else None}
    shared = get_first_index_that_differs(prompt, whole)
    status = DiagnosisStatus.FAILED
    why = "The model would sample after one prefix, but be trained, or continue in a second turn, after another."
    remedy = "Use a template that writes the same header before an assistant message as for add_generation_prompt."
    if not prompt.startswith(bare):
        found = _difference("add_generation_prompt changes the text before the header", bare, prompt)
    elif shared < len(prompt) and shared >= len(bare) and prompt[shared:].strip():
        found = f"the header ends with {prompt[shared:]!r}, which the rendered answer does not begin with"
        status = DiagnosisStatus.WARNING
        why = "Rollouts are correct, but supervised training trains such an answer after a header without that text."
        remedy = "Train answers with reasoning, or set policy.tokenizer.chat_template_kwargs if the template has a switch."
    elif shared < len(prompt):
        found = _difference("the conversation with the answer does not begin with the prompt", prompt, whole)
    elif encode(whole, tokenizer)[: len(encode(prompt, tokenizer))] != encode(prompt, tokenizer):
        found = "the conversation with the answer begins with the text of the prompt, but with other tokens"
    else:
        found = f"the header {details['header']!r} is appended to the prompt, which stays unchanged"
        status = DiagnosisStatus.OK
    return Diagnosis(name=HEADER, status=status, found=found, why=why, remedy=remedy, details=details)


def check_turns_join(tokenizer: Any, question: Sequence[Message]) -> Diagnosis:
    """Check that prompt and answer, tokenized separately, have the tokens of the whole text, over one and two turns."""
    differs = partial(
        Diagnosis,
        name=JOINS,
        why="The tokens of a sampled answer are appended to those of the prompt. If the whole text is tokenized "
        "differently, supervised training and the next turn show the model tokens that it did not sample.",
    )
    together = encode(_render(tokenizer, _answered(question), header=False), tokenizer)
    try:
        joined = _tokens(tokenizer, _answered(question), header=False)
        second = _tokens(tokenizer, _second_turn(question), header=True)
    except DataError as error:
        return differs(
            status=DiagnosisStatus.WARNING,
            found=str(error),
            remedy="Rollouts of one turn are not affected; for supervised training and several turns, use another template.",
        )
    if joined != together:
        index = get_first_index_that_differs(joined, together)
        return differs(
            status=DiagnosisStatus.FAILED,
            found=f"tokenized by turns, token {index} is {_text(tokenizer, joined, index)}, but in the whole text it is "
            f"{_text(tokenizer, together, index)}",
            remedy="Use a template with a header that ends with a special token or a line break, across which no tokens are "
            "merged.",
        )
    if second[: len(together)] != together:
        index = get_first_index_that_differs(together, second)
        return differs(
            status=DiagnosisStatus.WARNING,
            found=f"the tokens of one turn agree, but a second turn changes the first answer: token {index} was "
            f"{_text(tokenizer, together, index)} and becomes {_text(tokenizer, second, index)}",
            remedy="Rollouts of one turn are not affected; for several turns, use another template.",
        )
    found = (
        f"the {len(together)} tokens of one turn are the same tokenized by turns and as a whole, and a second turn keeps them"
    )
    return Diagnosis(name=JOINS, status=DiagnosisStatus.OK, found=found)


def check_end_of_turn(
    tokenizer: Any, question: Sequence[Message], *, stop_ids: Collection[int], stop_strings: Sequence[str] = ()
) -> Diagnosis:
    """Check that the text after an answer contains a token or a string that ends a completion."""
    closing = _render(tokenizer, _answered(question), header=False).rpartition(_ANSWER)[2]
    tokens = encode(closing, tokenizer)
    details = {"closing": closing, "closing_ids": tokens, "stop_ids": sorted(stop_ids), "stop_strings": list(stop_strings)}
    result = partial(Diagnosis, name=ENDS, details=details)
    ending = next((token for token in tokens if token in stop_ids), None)
    stopped_by = next((string for string in stop_strings if string in closing), None)
    if ending is not None or stopped_by is not None:
        what = (
            f"token {ending} ({tokenizer.convert_ids_to_tokens(ending)!r})"
            if ending is not None
            else f"the stop string {stopped_by!r}"
        )
        found = f"the template ends a turn with {closing!r}, and {what} ends a completion"
        return result(status=DiagnosisStatus.OK, found=found)
    if not closing.strip():
        return result(
            status=DiagnosisStatus.WARNING,
            found=f"the template ends a turn with {closing!r}, which cannot end a completion",
            why="Supervised training on such conversations does not teach the model to end its answers.",
            remedy="Use a template that ends assistant messages with the end-of-sequence token.",
        )
    stops = ", ".join(f"{token} {tokenizer.convert_ids_to_tokens(token)!r}" for token in sorted(stop_ids)) or "none"
    return result(
        status=DiagnosisStatus.FAILED,
        found=f"the template ends a turn with {closing!r} (token {tokens[0]}), without a stop token (these are: {stops})",
        why="A model trained with this template ends its turn this way. An engine that does not stop there samples up to its "
        "limit.",
        remedy=f"Set policy.generation.stop_token_ids: [{tokens[0]}], or add it to eos_token_id in generation_config.json.",
    )


class _TemplateFailed(Exception):
    """The template raised; the text is its message."""


def _render(tokenizer: Any, messages: Sequence[Message], *, header: bool) -> str:
    from jinja2.exceptions import TemplateError

    given = in_parts(messages) if needs_parts(tokenizer, str(tokenizer.chat_template)) else list(messages)
    try:
        text: str = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=header)
    except (TemplateError, TypeError) as error:  # Jinja does not catch exceptions of the template's expressions
        raise _TemplateFailed(str(error)) from error
    return text


def _answered(question: Sequence[Message]) -> list[Message]:
    return [*question, {"role": "assistant", "content": _ANSWER}]


def _second_turn(question: Sequence[Message]) -> list[Message]:
    return [*_answered(question), {"role": "user", "content": question[-1]["content"]}]


def _tokens(tokenizer: Any, messages: Sequence[Message], *, header: bool) -> list[int]:
    log = get_formatted_message_log(messages, tokenizer, add_generation_prompt=header)
    return [token for message in log for token in message["token_ids"].tolist()]


def _text(tokenizer: Any, tokens: Sequence[int], index: int) -> str:
    return f"{tokens[index]} {tokenizer.convert_ids_to_tokens(tokens[index])!r}" if index < len(tokens) else "the end"


def _difference(what: str, shorter: str, longer: str) -> str:
    index = get_first_index_that_differs(shorter, longer)
    return f"{what}: from character {index}, {shorter[index : index + 40]!r} became {longer[index : index + 40]!r}"
