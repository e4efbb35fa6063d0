"""The endpoints of a model that this server runs."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from rl_core.data.images import RowImage
from rl_core.data.tokenizer import decode, encode
from rl_core.errors import DataError, RLCoreError, WorkerDiedError
from rl_core.event_loop import in_thread
from rl_core.plugins.component import Capability
from rl_serve.chat_format import NO_TOOLS, ChatFormat, OfferedTools, read_messages, read_offered_tools, requires_calls
from rl_serve.chat_service import ChatService, CompleteChat, Completion, refuse_with_code
from rl_serve.choices import ChatChoices, Choices, CompletionChoices, usage
from rl_serve.engine import EngineThread, SampledRow, TokenizerThreads
from rl_serve.errors import ApiError
from rl_serve.pausing import SharedCheck, read_engine_state
from rl_serve.requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    GenerateTokensRequest,
    SamplingParameters,
    SamplingRequest,
    read_response_format,
    refuse_unsupported_fields,
)
from rl_serve.responses import EventStream, cancel_on_disconnect, errors_as_events
from rl_serve.sampling import (
    Limits,
    ParameterNames,
    SamplingPlan,
    new_seed,
    plan_sampling,
    refuse_long_text,
    refuse_many_rows,
    refuse_without,
)
from rl_serve.served_model import ServedModel
from rl_serve.text import completion_text
from rl_serve.token_images import read_token_images
from rl_serve.weights_api import WeightUpdates
from rl_train.data.image_sources import texts_of
from rl_train.rollouts.trajectory import sample_seed

_log = logging.getLogger(__name__)


class LocalRoutes:
    """The handlers; the arguments are those of `create_app`."""

    def __init__(
        self,
        model: ServedModel,
        engine: EngineThread,
        limits: Limits,
        service: ChatService,
        updates: WeightUpdates | None = None,
    ) -> None:
        self._model, self._engine, self._limits, self._service = model, engine, limits, service
        self._updates = updates
        self._chat = ChatFormat(model.tokenizer, max_images=model.max_images)
        self._threads = TokenizerThreads()
        # Not in the threads of asyncio, which may all wait for code in the sandbox.
        self._state = SharedCheck(
            lambda: in_thread(partial(read_engine_state, model.generation, engine.death), name="rl-serve-health")
        )

    async def close(self) -> None:
        """End the threads that tokenize and decode."""
        await self._threads.close()

    async def health(self) -> Response:
        """Whether the engine answers: 200, also if some replicas are dead; 503 if all are, or the server is paused."""
        state = await self._state.result()
        if state.is_serving and self._updates is not None:
            state = await self._updates.state() or state
        reason = {"reason": state.reason} if state.reason else {}
        status = 200 if state.is_serving else 503
        return JSONResponse({"status": state.status, "model": self._model.name, **reason}, status_code=status)

    async def models(self) -> dict[str, dict[str, Any]]:
        """The served model and its facts."""
        facts = {
            "max_model_len": self._model.max_model_len,
            "streams_tokens": self._engine.streams_tokens,
            "reads_token_images": self._model.reads_images,
        }
        return {self._model.name: facts}

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Complete texts or token ids."""
        prompts = await self._threads.run(self._prompts_of, body)
        only_echo = body.max_tokens == 0
        plan = self._plan(
            body,
            prompts,
            n=body.n,
            max_tokens=1 if only_echo else body.max_tokens,
            top_logprobs=body.logprobs or 0,
            prompt_logprobs=body.echo and body.logprobs is not None,
        )
        choices = CompletionChoices(
            tokenizer=self._model.tokenizer,
            plan=plan,
            logprobs=body.logprobs is not None,
            top_logprobs=bool(body.logprobs),
            token_ids=body.return_token_ids,
            echoed=await self._threads.run(self._texts_of, body, prompts) if body.echo else (),
            only_echo=only_echo,
        )
        return self._stream(body, choices) if body.stream else JSONResponse(await self._whole(choices, request))

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Complete a conversation, rendered by the model's chat template."""
        (most, limit_name), record = body.token_limit(), body.record()
        messages, images = await self._threads.run(self._messages_of, body)
        names = ParameterNames(prompt="messages", max_tokens=limit_name, top_logprobs="top_logprobs")
        if self._service.code is not None:
            refuse_with_code(body.model_dump())
            completer = self._completer(body, most, names, images)
            return await self._service.respond(messages, completer, body, request, model=self._model.name, limits=self._limits)
        choices = await self._chat_choices(body, messages, images, max_tokens=most, names=names)
        if body.stream:
            return self._stream(body, choices)
        found = await self._whole(choices, request)
        for choice in found["choices"]:
            choice |= await self._service.grade(messages, choice["message"]["content"] or "", record)
        return JSONResponse(found)

    async def generate(self, body: GenerateRequest, request: Request) -> Response:
        """Answer a record, whose fields fill the prompt config."""
        record = body.record()
        body.refuse_other_model(self._model.name)
        messages = self._service.prompts.record(record)
        most, limit_name = body.token_limit()
        complete = self._completer(body, most, ParameterNames(prompt="question", max_tokens=limit_name))
        return await self._service.respond_to_record(messages, complete, record, request)

    async def generate_tokens(self, body: GenerateTokensRequest, request: Request) -> Response:
        """Sample from token ids; returns token ids and log-probabilities, without text."""
        body.refuse_other_model(self._model.name)
        requested = body.sampling_params
        refuse_unsupported_fields(requested.model_extra or {}, where="sampling_params.")
        names = ParameterNames(prompt="token_ids", max_tokens="sampling_params.max_tokens")
        images = await self._threads.run(read_token_images, body.images, body.token_ids, self._model) if body.images else ()
        options: dict[str, Any] = {"n": requested.n, "max_tokens": requested.max_tokens, "names": names, "images": images}
        plan = self._plan(requested, [body.token_ids], **options)
        rows = await self._sample_all(plan, request)
        choices = [
            {
                "index": index,
                "token_ids": row.token_ids,
                "logprobs": {
                    "content": [
                        {"token_id": token, "logprob": logprob}
                        for token, logprob in zip(row.token_ids, row.logprobs, strict=True)
                    ]
                },
                "finish_reason": "length" if row.truncated else "stop",
                "weight_version": row.weight_version,
            }
            for index, row in sorted(rows.items())
        ]
        identity = {"request_id": body.request_id or uuid.uuid4().hex, "model": self._model.name}
        return JSONResponse({**identity, "choices": choices, "usage": usage(plan, rows)})

    def _completer(
        self, body: SamplingParameters, max_tokens: int | None, names: ParameterNames, images: Sequence[RowImage] = ()
    ) -> CompleteChat:
        """The function that continues a conversation."""
        base = new_seed() if body.seed is None else body.seed

        async def complete(choice: int, messages: Sequence[Mapping[str, Any]], number: int) -> Completion:
            seeded = body.model_copy(update={"seed": sample_seed(base, number, choice)})
            prompt, placed = await self._threads.run(self._prompt, messages, images)
            plan = self._plan(seeded, [prompt], max_tokens=max_tokens, names=names, images=placed)
            row = (await self._collect(plan))[0]
            stops = plan.rows[0].stop_strings
            return Completion(
                content=await self._threads.run(completion_text, self._model.tokenizer, row.token_ids, stops),
                finish_reason="length" if row.truncated else "stop",
                prompt_tokens=len(prompt),
                completion_tokens=len(row.token_ids),
            )

        return complete

    def _messages_of(self, body: ChatRequest) -> tuple[Sequence[Mapping[str, Any]], Sequence[RowImage]]:
        """The conversation of a request, and its images."""
        self._check(body)
        messages = self._service.prompts.conversation(read_messages([message.model_dump() for message in body.messages]))
        if body.continue_final_message:
            messages[-1]["prefix"] = True
        return self._chat.with_references(messages)

    async def _chat_choices(
        self,
        body: ChatRequest,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[RowImage],
        *,
        max_tokens: int | None,
        names: ParameterNames,
    ) -> ChatChoices:
        """The choices of a chat completion, with the plan of their rows.

        Raises:
            ApiError: the request is invalid, or requires a capability that the engine does not have.
        """
        schema = read_response_format(body.response_format)
        if schema is not None:
            refuse_without(self._model, Capability.STRUCTURED_OUTPUTS, "response_format")
        if requires_calls(body.tool_choice):
            refuse_without(self._model, Capability.STRUCTURED_OUTPUTS, "tool_choice")
        tools = read_offered_tools(body.tools, body.tool_choice, body.parallel_tool_calls, can_require=True)
        if tools and schema is not None:
            raise ApiError(
                400, 'response_format cannot be combined with tools. Set tool_choice to "none".', param="response_format"
            )
        prompt, placed = await self._threads.run(self._prompt, messages, images, tools)
        plan = self._plan(
            body,
            [prompt],
            n=body.n,
            max_tokens=max_tokens,
            names=names if tools.schema is None else replace(names, json_schema="tools"),
            top_logprobs=body.top_logprobs or 0,
            json_schema=tools.schema if schema is None else schema,
            images=placed,
        )
        return ChatChoices(
            tokenizer=self._model.tokenizer,
            plan=plan,
            logprobs=body.logprobs,
            top_logprobs=bool(body.top_logprobs),
            token_ids=body.return_token_ids,
            chat=self._chat,
            messages=messages,
            tools=tools,
        )

    def _prompt(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[RowImage], tools: OfferedTools = NO_TOOLS
    ) -> tuple[list[int], Sequence[RowImage]]:
        refuse_long_text(self._model, (text for message in messages for text in texts_of(message)), param="messages")
        return self._chat.prompt(messages, images, tools)

    def _check(self, body: SamplingRequest) -> None:
        """Refuse another model and unsupported fields."""
        body.refuse_unsupported()
        body.refuse_other_model(self._model.name)

    def _plan(self, body: SamplingParameters, prompts: Sequence[Sequence[int]], **options: Any) -> SamplingPlan:
        return plan_sampling(self._model, self._limits, prompts, body, **options)

    def _prompts_of(self, body: CompletionRequest) -> list[list[int]]:
        self._check(body)
        prompt: Any = body.prompt
        if isinstance(prompt, str):
            refuse_long_text(self._model, [prompt], param="prompt")
            return [self._raw_prompt(prompt, body)]
        if not prompt:
            raise ApiError(400, "There is no prompt.", param="prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        refuse_many_rows(self._limits, len(prompt), body.n)
        for one in prompt:
            refuse_long_text(self._model, [one] if isinstance(one, str) else (), param="prompt")
        return [self._raw_prompt(one, body) if isinstance(one, str) else one for one in prompt]

    def _raw_prompt(self, text: str, body: CompletionRequest) -> list[int]:
        """A text that may be a rendered conversation: its control tokens are tokens, unlike those in messages."""
        tokenizer = self._model.tokenizer
        return [*(start_tokens(tokenizer) if body.add_special_tokens else ()), *encode(text, tokenizer)]

    def _texts_of(self, body: CompletionRequest, prompts: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
        """The text of each prompt, as it was sent or decoded, and the number of tokens that were put before it."""
        given: Any = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        texts = given if len(given) == len(prompts) else [None] * len(prompts)  # one prompt of token ids
        tokenizer = self._model.tokenizer
        added = len(start_tokens(tokenizer)) if body.add_special_tokens else 0
        return [
            (text, added) if isinstance(text, str) else (decode(tokenizer, prompt), 0)
            for text, prompt in zip(texts, prompts, strict=True)
        ]

    async def _sample_all(self, plan: SamplingPlan, request: Request) -> dict[int, SampledRow]:
        """All completions, unless the client hangs up, which cancels them."""
        return await cancel_on_disconnect(request, self._collect(plan))

    async def _collect(self, plan: SamplingPlan) -> dict[int, SampledRow]:
        return {index: row async for index, row in self._rows(plan)}

    async def _rows(self, plan: SamplingPlan, *, stream: bool = False) -> AsyncGenerator[tuple[int, SampledRow], None]:
        try:
            async with contextlib.aclosing(self._engine.sample(plan.rows, greedy=plan.greedy, stream=stream)) as rows:
                async for index, row in rows:
                    yield index, row
        except DataError as error:
            _log.warning("the engine refused a request: %s", error)
            if any("json_schema" in (row.sampling or {}) for row in plan.rows):
                reason = f"The engine does not accept the JSON schema: {error}"
                raise ApiError(400, reason, param=plan.names.json_schema) from error
            reason = "The engine does not accept this request. The server's log has the details."
            raise ApiError(400, reason, param=plan.names.prompt) from error
        except WorkerDiedError as error:
            _log.exception("a generation replica exited")
            reason = str(error).partition(". ")[0].rstrip(".")
            raise ApiError(503, f"The engine failed: {reason}.", code="replica_exited") from error
        except RLCoreError as error:
            _log.exception("the engine failed")
            raise ApiError(503, f"The engine failed: {type(error).__name__}. The server's log has the details.") from error

    async def _whole(self, choices: Choices, request: Request) -> dict[str, Any]:
        rows = await self._sample_all(choices.plan, request)
        return await choices.response(rows, model=self._model.name, threads=self._threads)

    def _stream(self, body: SamplingRequest, choices: Choices) -> EventStream:
        rows = self._rows(choices.plan, stream=True)
        events = choices.events(rows, model=self._model.name, threads=self._threads, has_usage=body.has_usage)
        return EventStream(errors_as_events(events))


@lru_cache(maxsize=16)
def start_tokens(tokenizer: Any) -> list[int]:
    """The tokens with which the tokenizer begins a text; those that it may append would end a completion's prompt."""
    whole: list[int] = tokenizer("a")["input_ids"]
    text = encode("a", tokenizer)
    return whole[: next((start for start in range(len(whole)) if whole[start : start + len(text)] == text), 0)]
