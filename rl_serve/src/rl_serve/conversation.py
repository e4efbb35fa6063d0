"""Conversations outside of HTTP, and the prompt configs that fill messages there and in the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from rl_core.errors import DataError
from rl_serve.chat_format import ChatFormat
from rl_serve.choices import RowDeltas
from rl_serve.engine import EngineThread
from rl_serve.errors import ApiError
from rl_serve.requests import SamplingParameters
from rl_serve.sampling import Limits, ParameterNames, SamplingPlan, plan_sampling
from rl_serve.served_model import ServedModel
from rl_serve.text import completion_text
from rl_train.data.image_sources import ImageSource, texts_of
from rl_train.prompts.templates import PromptTemplate, load_prompt


class Conversation:
    """Messages so far, and how to sample the next.

    Args:
        model: the model.
        engine: its engine.
        system: the system message, if any.
        temperature: 0 for greedy decoding; None for the engine's.
        max_tokens: maximum number of tokens of an answer; None for the engine's.
        filler: fills the first user message into a prompt config, if it has one.

    Attributes:
        cut_at: number of tokens at which a limit cut the last answer; None if it is complete.
    """

    def __init__(
        self,
        model: ServedModel,
        engine: EngineThread,
        *,
        system: str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        filler: PromptFiller | None = None,
    ) -> None:
        self._model, self._engine = model, engine
        self._chat = ChatFormat(model.tokenizer, max_images=model.max_images)
        self._filler = filler or PromptFiller(None)
        self.cut_at: int | None = None
        self._system, self._temperature, self._max_tokens = system, temperature, max_tokens
        self._messages: list[dict[str, Any]] = []
        self._attached: list[dict[str, Any]] = []
        self.reset()

    def attach(self, path: str) -> None:
        """Show a picture with the next message.

        Raises:
            ApiError: the file is not a picture that the model can read.
        """
        part = {"type": "image", "image": ImageSource(path)}
        self._chat.with_references([{"role": "user", "content": [part]}])
        self._attached.append(part)

    def reset(self) -> None:
        """Remove all messages except the system message."""
        self._attached = []
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def answer(self, text: str, *, on_text: Callable[[str], None] | None = None) -> str:
        """The model's answer to a message; the conversation keeps both.

        Args:
            text: the message.
            on_text: called with each new part of the answer; an engine that streams no tokens has one part.

        Raises:
            ApiError: the conversation cannot be rendered or is too long, or the engine sampled the answer again after a part of
                it was passed to `on_text`; the message is not kept.
            WorkerError: the engine failed.
        """
        content = [*self._attached, {"type": "text", "text": text}] if self._attached else text
        messages = [*self._messages, {"role": "user", "content": content}]
        prompt, images = self._chat.prompt(*self._chat.with_references(self._filler.conversation(messages)))
        plan = plan_sampling(
            self._model,
            Limits(),
            [prompt],
            SamplingParameters(temperature=self._temperature),
            max_tokens=self._max_tokens,
            names=ParameterNames(max_tokens="--max-tokens"),
            images=images,
        )
        try:
            answer = asyncio.run(self._sample(plan, on_text))
        except DataError as error:
            raise ApiError(400, str(error)) from error
        self._messages, self._attached = [*messages, {"role": "assistant", "content": answer}], []
        return answer

    async def _sample(self, plan: SamplingPlan, on_text: Callable[[str], None] | None) -> str:
        tokenizer = self._model.tokenizer
        deltas = RowDeltas(tokenizer)
        rows = self._engine.sample(plan.rows, greedy=plan.greedy, stream=on_text is not None)
        async with aclosing(rows):
            async for _, row in rows:
                deltas.new_tokens(row)
                if row.is_finished:
                    self.cut_at = len(row.token_ids) if row.truncated else None
                text = completion_text(tokenizer, row.token_ids, ()) if row.is_finished else deltas.stable_text(row.token_ids)
                new = deltas.new_text(text, is_finished=row.is_finished)
                if on_text is not None and new:
                    on_text(new)
        return deltas.sent


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

        Later messages stay as they are, so a conversation that grows keeps its beginning. Images of the message are in front of
        its text, as in training. The system message of the prompt config is used if the conversation has none.

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
        text, content = "".join(texts_of(log[first])), log[first]["content"]
        *system, user = self._filled({**dict.fromkeys((*_QUESTION, *needed), text)})
        images = [part for part in content if part["type"] != "text"] if isinstance(content, list) else []
        filled = [*images, {"type": "text", "text": user["content"]}] if images else user["content"]
        log[first] = {**log[first], "content": filled}
        has_own = any(message["role"] in ("system", "developer") for message in log)
        return log if has_own else [*system, *log]

    def _filled(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        assert self._template is not None
        try:
            return [dict(message) for message in self._template.fill(record, input_key="question")]
        except DataError as error:
            raise ApiError(400, f"The prompt cannot be filled: {error}.") from error
