"""Whether a chat template gives the tokens that a run assumes: turns that join, a header that only adds, an end that stops.

Knows a tokenizer's face, no model. What is sampled is never tokenised again, so a turn's tokens have to be those that the
template makes of its text; and a model can only end its turn by a token that the engine takes for an end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rl_core.errors import DataError
from rl_train.data.messages import get_first_index_that_differs, get_formatted_message_log
from rl_train.diagnostics.diagnosis import Diagnosis, DiagnosisStatus

Message = dict[str, str]

RENDERS = "chat_template_renders"
HEADER = "generation_prompt_is_prefix"
JOINS = "turns_join"
ENDS = "end_of_turn_stops"
_ANSWER = "42"
"""Short, and of characters that even a tokenizer of digits has."""


def check_chat_template(
    tokenizer: Any, question: Sequence[Message], *, stop_ids: Collection[int], stop_strings: Sequence[str] = ()
) -> list[Diagnosis]:
    """Every diagnosis of the template; the first alone where it does not render.

    Args:
        tokenizer: the policy's.
        question: messages of role and content, the last of them the user's.
        stop_ids: tokens that end a completion.
        stop_strings: strings that do.
    """
    if not tokenizer.chat_template:
        found = (
            "the tokenizer has no chat template: messages are joined as they are, and the end-of-sequence token ends an answer"
        )
        return [Diagnosis(name=RENDERS, status=DiagnosisStatus.OK, found=found)]
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
    """Render the question, the question with an answer, and a second turn; all that was said has to be in the text."""
    why = "Every prompt goes through the template: without it there is no run, and what it drops the model never sees."
    remedy = "Give another template (policy.tokenizer.chat_template), or write the conversation as this one wants it."
    for messages, header in ((question, True), (_answered(question), False), (_second_turn(question), True)):
        roles = [message["role"] for message in messages]
        try:
            text = _render(tokenizer, messages, header=header)
        except _TemplateFailed as error:
            found = f"the template cannot render messages of the roles {roles}: {error}"
            return Diagnosis(name=RENDERS, status=DiagnosisStatus.FAILED, found=found, why=why, remedy=remedy)
        lost = [message["role"] for message in messages if message["content"].strip() not in text]
        if lost:
            found = f"of the roles {roles}, the rendered text lacks what these say: {lost}"
            return Diagnosis(name=RENDERS, status=DiagnosisStatus.FAILED, found=found, why=why, remedy=remedy)
    found = f"conversations of one turn and of two are rendered, with all of their {len(_second_turn(question))} messages"
    return Diagnosis(name=RENDERS, status=DiagnosisStatus.OK, found=found)


def check_generation_prompt(tokenizer: Any, question: Sequence[Message]) -> Diagnosis:
    """The prompt with the header of the assistant's turn has to be how the answered conversation begins, as text and tokens.

    A header that opens the answer as well (`<think>`) is a warning: what is sampled is right, and a conversation lacks it.
    """
    bare, prompt = _render(tokenizer, question, header=False), _render(tokenizer, question, header=True)
    whole = _render(tokenizer, _answered(question), header=False)
    details = {"header": prompt[len(bare) :] if prompt.startswith(bare) else None}
    shared = get_first_index_that_differs(prompt, whole)
    problem, status = None, DiagnosisStatus.FAILED
    if not prompt.startswith(bare):
        problem = _difference("with the header, the text before it changes", bare, prompt)
    elif shared < len(prompt) and shared >= len(bare) and prompt[shared:].strip():
        problem = f"the header opens the answer with {prompt[shared:]!r}, which the answered conversation does not begin with"
        status = DiagnosisStatus.WARNING
    elif shared < len(prompt):
        problem = _difference("the answered conversation does not begin with the prompt", prompt, whole)
    elif _encode(tokenizer, whole)[: len(_encode(tokenizer, prompt))] != _encode(tokenizer, prompt):
        problem = "the answered conversation begins with the prompt as text, and with other tokens"
    if problem is None:
        found = f"the header {details['header']!r} adds to the prompt and changes nothing in it"
        return Diagnosis(name=HEADER, status=DiagnosisStatus.OK, found=found, details=details)
    if status is DiagnosisStatus.WARNING:
        why = "Rollouts are right. Supervised training trains such an answer after a header without that text."
        remedy = "Train answers with reasoning, or set policy.tokenizer.chat_template_kwargs if the template has a switch."
    else:
        why = "The model would sample after one beginning and be trained, or asked in a second turn, after another."
        remedy = "Use a template that puts the same header before an assistant's message as it does for add_generation_prompt."
    return Diagnosis(name=HEADER, status=status, found=problem, why=why, remedy=remedy, details=details)


def check_turns_join(tokenizer: Any, question: Sequence[Message]) -> Diagnosis:
    """Compare the tokens of prompt and answer, joined, with those of the whole text, over one turn and over two."""
    why = (
        "A sampled answer is kept as its tokens and joined to the prompt's. Where the whole text has other tokens, supervised "
        "training and the next turn show the model something else than it has sampled."
    )
    together = _encode(tokenizer, _render(tokenizer, _answered(question), header=False))
    try:
        joined = _tokens(tokenizer, _answered(question), header=False)
        second = _tokens(tokenizer, _second_turn(question), header=True)
    except DataError as error:
        remedy = "Rollouts of one turn are not affected; for supervised training and several turns, use another template."
        return Diagnosis(name=JOINS, status=DiagnosisStatus.WARNING, found=str(error), why=why, remedy=remedy)
    if joined != together:
        place = get_first_index_that_differs(joined, together)
        found = (
            f"joined by turns, token {place} is {_text(tokenizer, joined, place)}, and in the whole text it is "
            f"{_text(tokenizer, together, place)}"
        )
        remedy = "Use a template whose header ends with a special token or a line break, across which nothing is merged."
        return Diagnosis(name=JOINS, status=DiagnosisStatus.FAILED, found=found, why=why, remedy=remedy)
    if second[: len(together)] != together:
        place = get_first_index_that_differs(together, second)
        found = (
            f"one turn joins; a second turn rewrites the first answer: token {place} was "
            f"{_text(tokenizer, together, place)} and is {_text(tokenizer, second, place)}"
        )
        remedy = "Rollouts of one turn are not affected; for several turns, use another template."
        return Diagnosis(name=JOINS, status=DiagnosisStatus.WARNING, found=found, why=why, remedy=remedy)
    found = (
        f"{len(together)} tokens of one turn are the same as a whole and joined, and a second turn leaves the first as it was"
    )
    return Diagnosis(name=JOINS, status=DiagnosisStatus.OK, found=found)


def check_end_of_turn(
    tokenizer: Any, question: Sequence[Message], *, stop_ids: Collection[int], stop_strings: Sequence[str] = ()
) -> Diagnosis:
    """What the template puts after an answer has to begin with, or hold, something that ends a completion."""
    closing = _closing(_render(tokenizer, _answered(question), header=False))
    tokens = _encode(tokenizer, closing)
    details = {"closing": closing, "closing_ids": tokens, "stop_ids": sorted(stop_ids), "stop_strings": list(stop_strings)}
    why = "A model that was taught this template ends its turn so; an engine that does not stop there samples on to its limit."
    ending = next((token for token in tokens if token in stop_ids), None)
    stopped_by = next((string for string in stop_strings if string in closing), None)
    if ending is not None or stopped_by is not None:
        what = f"token {ending} ({_name(tokenizer, ending)!r})" if ending is not None else f"the stop string {stopped_by!r}"
        found = f"the template closes a turn with {closing!r}, and {what} ends a completion"
        return Diagnosis(name=ENDS, status=DiagnosisStatus.OK, found=found, details=details)
    if not closing.strip():
        return Diagnosis(
            name=ENDS,
            status=DiagnosisStatus.WARNING,
            found=f"the template puts nothing after an answer that could end it ({closing!r})",
            why="Supervised training on such conversations does not teach where an answer ends.",
            remedy="Use a template that closes an assistant's message with the end-of-sequence token.",
            details=details,
        )
    stops = ", ".join(f"{token} {_name(tokenizer, token)!r}" for token in sorted(stop_ids)) or "there are none"
    return Diagnosis(
        name=ENDS,
        status=DiagnosisStatus.FAILED,
        found=f"the template closes a turn with {closing!r} (token {tokens[0]}), and no stop token is in it ({stops})",
        why=why,
        remedy=f"Set policy.generation.stop_token_ids: [{tokens[0]}], or add it to eos_token_id in generation_config.json.",
        details=details,
    )


class _TemplateFailed(Exception):
    """The template raised; what it said."""


def _render(tokenizer: Any, messages: Sequence[Message], *, header: bool) -> str:
    from jinja2.exceptions import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=header)
    except (TemplateError, TypeError) as error:  # Jinja passes on what an expression of the template raises
        raise _TemplateFailed(str(error)) from error
    return text


def _answered(question: Sequence[Message]) -> list[Message]:
    return [*question, {"role": "assistant", "content": _ANSWER}]


def _second_turn(question: Sequence[Message]) -> list[Message]:
    return [*_answered(question), {"role": "user", "content": question[-1]["content"]}]


def _closing(whole: str) -> str:
    return whole[whole.rindex(_ANSWER) + len(_ANSWER) :]


def _tokens(tokenizer: Any, messages: Sequence[Message], *, header: bool) -> list[int]:
    log = get_formatted_message_log(messages, tokenizer, add_generation_prompt=header)
    return [token for message in log for token in message["token_ids"].tolist()]


def _encode(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def _name(tokenizer: Any, token: int) -> str:
    name: str = tokenizer.convert_ids_to_tokens(token)
    return name


def _text(tokenizer: Any, tokens: Sequence[int], place: int) -> str:
    return f"{tokens[place]} {_name(tokenizer, tokens[place])!r}" if place < len(tokens) else "the end"


def _difference(what: str, shorter: str, longer: str) -> str:
    place = get_first_index_that_differs(shorter, longer)
    return f"{what}, from character {place} on: {shorter[place : place + 40]!r} became {longer[place : place + 40]!r}"
