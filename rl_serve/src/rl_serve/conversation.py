"""A conversation with a local model, outside of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from rl_core.errors import DataError
from rl_serve.chat_format import ChatFormat
from rl_serve.deltas import RowDeltas
from rl_serve.engine import EngineThread
from rl_serve.errors import ApiError
from rl_serve.prompt_filler import PromptFiller
from rl_serve.requests import SamplingParameters
from rl_serve.responses import ChoiceFormat
from rl_serve.sampling import Limits, ParameterNames, SamplingPlan, plan_sampling
from rl_serve.served_model import ServedModel


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
        self._chat = ChatFormat(model.tokenizer)
        self._filler = filler or PromptFiller(None)
        self.cut_at: int | None = None
        self._system, self._temperature, self._max_tokens = system, temperature, max_tokens
        self._messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        """Remove all messages except the system message."""
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
        messages = [*self._messages, {"role": "user", "content": text}]
        plan = plan_sampling(
            self._model,
            Limits(),
            [self._chat.prompt(self._filler.conversation(messages))],
            SamplingParameters(temperature=self._temperature),
            max_tokens=self._max_tokens,
            names=ParameterNames(max_tokens="--max-tokens"),
        )
        try:
            answer = asyncio.run(self._sample(plan, on_text))
        except DataError as error:
            raise ApiError(400, str(error)) from error
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    async def _sample(self, plan: SamplingPlan, on_text: Callable[[str], None] | None) -> str:
        deltas = RowDeltas(self._model.tokenizer)
        choices = ChoiceFormat(tokenizer=self._model.tokenizer, plan=plan)
        rows = self._engine.sample(plan.rows, greedy=plan.greedy, stream=on_text is not None)
        async with aclosing(rows):
            async for _, row in rows:
                deltas.new_tokens(row)
                if row.is_finished:
                    self.cut_at = len(row.token_ids) if row.truncated else None
                text = choices.text(0, row) if row.is_finished else deltas.stable_text(row.token_ids)
                new = deltas.new_text(text, is_finished=row.is_finished)
                if on_text is not None and new:
                    on_text(new)
        return deltas.sent
