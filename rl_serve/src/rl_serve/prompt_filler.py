"""Fills a prompt config with the question of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.errors import DataError
from rl_serve.errors import ApiError
from rl_train.prompts.templates import PromptTemplate, load_prompt

_QUESTION = ("question", "problem")
"""Names of the question; each stands in for the other."""


class PromptFiller:
    """Makes messages of records, and fills the first user message of a conversation.

    Args:
        template: the prompt config; without one, a question is the user message as it is.
    """

    def __init__(self, template: PromptTemplate | None) -> None:
        self._template = template

    @classmethod
    def load(cls, prompt_config: str | None, examples_type: str | None) -> PromptFiller:
        """Load a prompt config by name or path; None for no prompt config.

        Raises:
            DataError: there is no such prompt config, or it is invalid.
        """
        return cls(None if prompt_config is None else load_prompt(prompt_config, examples_type))

    @property
    def is_used(self) -> bool:
        """Whether there is a prompt config."""
        return self._template is not None

    @property
    def needs(self) -> list[str]:
        """The fields that the prompt config needs."""
        return [] if self._template is None else sorted(self._template.needs)

    def example(self) -> list[dict[str, Any]]:
        """The messages of a record that has the name of each field as its value."""
        return self.record({name: f"{{{name}}}" for name in self.needs or ["question"]})

    def record(self, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The messages of a record.

        Raises:
            ApiError: a field that the prompt config needs is missing or is not text.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        question = next((given[name] for name in _QUESTION if name in given), None)
        if question is not None:
            given = {**dict.fromkeys(_QUESTION, question), **given}
        if self._template is None:
            if not isinstance(question, str):
                raise ApiError(400, "`question` is required.", param="question")
            return [{"role": "user", "content": question}]
        missing = sorted(self._template.needs - given.keys())
        if missing:
            raise ApiError(
                400,
                f"The prompt config {self._template.source} needs {', '.join(missing)}, but the request has "
                f"{', '.join(sorted(fields)) or 'no fields'}.",
                param=missing[0],
            )
        for name in sorted(self._template.needs):
            if not isinstance(given[name], str | int | float):
                raise ApiError(400, f"`{name}` must be a string or a number, because it fills the prompt config.", param=name)
        return self._filled(given)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The conversation with its first user message filled into the prompt config.

        Later messages stay as they are, so a conversation that grows keeps its beginning. The system message of the prompt
        config is used if the conversation has none.

        Raises:
            ApiError: there is no user message, or the prompt config needs several fields.
        """
        log = [dict(message) for message in messages]
        if self._template is None:
            return log
        first = next((number for number, message in enumerate(log) if message["role"] == "user"), None)
        if first is None:
            raise ApiError(400, "messages has no user message, which the prompt config needs.", param="messages")
        needed = sorted(self._template.needs - set(_QUESTION))
        if len(self._template.needs) > 1 and needed:
            raise ApiError(
                400,
                f"The prompt config {self._template.source} needs {', '.join(needed)}: send these fields to /generate.",
                param="messages",
            )
        text = log[first]["content"]
        *system, user = self._filled({**dict.fromkeys((*_QUESTION, *needed), text)})
        log[first] = {**log[first], "content": user["content"]}
        has_own = any(message["role"] in ("system", "developer") for message in log)
        return log if has_own else [*system, *log]

    def _filled(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        assert self._template is not None
        try:
            return [dict(message) for message in self._template.fill(record, input_key="question")]
        except DataError as error:
            raise ApiError(400, f"The prompt cannot be filled: {error}.") from error
