"""Answers of chat and `/generate`: the prompt config, rounds of code, the comparison with an expected answer, and responses."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from rl_core.config.schema import EnvironmentConfig
from rl_core.errors import UserError
from rl_core.event_loop import in_thread
from rl_core.plugins.component import Kind
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_sandbox.config import SandboxConfig
from rl_sandbox.interface import Outcome, Result, SandboxError, SandboxInterface, SessionInterface
from rl_serve.conversation import PromptFiller
from rl_serve.errors import ApiError
from rl_serve.grading import Grader
from rl_serve.requests import ChatRequest, ForwardedChatRequest
from rl_serve.responses import (
    DONE,
    EventStream,
    cancel_on_disconnect,
    errors_as_events,
    response_head,
    server_sent_event,
    token_counts,
)
from rl_serve.sampling import Limits
from rl_serve.settings import ChatSettings
from rl_train.data.conversations import is_begun

_PER_MESSAGE = ("tools", "logprobs", "top_logprobs", "return_token_ids", "response_format", "continue_final_message")
_BLOCK = re.compile(
    r"^```[ \t]*(?:python|python3|py)[ \t]*\n(?P<code>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL | re.IGNORECASE
)


class ChatService:
    """Fills prompts, runs the code of answers and grades them.

    Args:
        prompts: fills prompts.
        code: runs code; None if code is not executed.
        evaluator: environment or task that compares answers with `expected_answer`; by default the run's own, else `math`.
    """

    def __init__(
        self, prompts: PromptFiller | None = None, *, code: CodeRunner | None = None, evaluator: str | None = None
    ) -> None:
        self.prompts = prompts if prompts is not None else PromptFiller(None)
        self.code = code
        self._tasks: Mapping[str, EnvironmentConfig] = {}
        self._evaluator = evaluator
        self._graders: dict[str, Grader] = {}
        self._lock = threading.Lock()

    def use_tasks(self, tasks: Mapping[str, EnvironmentConfig]) -> None:
        """Grade with these environments of a run, by task, unless another was chosen, which is started.

        Raises:
            UserError: the chosen environment does not exist.
        """
        self._tasks = tasks
        if self._evaluator is not None:
            self.start_grader(self._evaluator)

    def start_grader(self, name: str) -> Grader:
        """The grader of an environment or task, created at the first call; threads may call this at the same time.

        Raises:
            UserError: there is no such environment.
        """
        with self._lock:
            if name not in self._graders:
                self._graders[name] = Grader(name, self._tasks.get(name))
            return self._graders[name]

    def evaluator_of(self, record: Mapping[str, Any]) -> str:
        """The environment or task that grades the answer to a record.

        Raises:
            ApiError: the run has several, and the record names none of them.
        """
        if self._evaluator is not None or not self._tasks:
            return self._evaluator or "math"
        task = record.get("task_name", next(iter(self._tasks)) if len(self._tasks) == 1 else None)
        if task not in self._tasks:
            raise ApiError(
                400,
                f"The run has the tasks {', '.join(self._tasks)}: send one of them as `task_name` to /generate, or start the "
                "server with ++evaluator=TASK.",
                param="task_name",
            )
        return str(task)

    def close(self) -> None:
        """End the sandbox and the environment."""
        if self.code is not None:
            self.code.close()
        for grader in self._graders.values():
            grader.close()

    async def answer(self, messages: Sequence[Mapping[str, Any]], complete: CompleteChat, choice: int = 0) -> Answer:
        """The whole answer to a conversation."""
        answer = Answer()
        async with aclosing(self.stream(messages, complete, choice)) as parts:
            async for part in parts:
                answer.add(part)
        return answer

    async def stream(
        self, messages: Sequence[Mapping[str, Any]], complete: CompleteChat, choice: int = 0
    ) -> AsyncGenerator[Completion | str, None]:
        """The messages of the model and, as text, the output of their code between them.

        Ends with an output if the conversation has no space for another message.

        Raises:
            ApiError: the first message cannot be sampled, or the model or the sandbox failed.
        """
        log = [*messages]
        most = 0 if self.code is None else self.code.max_rounds
        async with self.code.answer() if self.code is not None else nullcontext() as session:
            for number in range(most + 1):
                try:
                    completion = await complete(choice, log, number)
                except ApiError as error:
                    if number > 0 and error.code == "context_length_exceeded":
                        return
                    raise
                yield completion
                blocks = python_blocks(completion.content) if session is not None and completion.finish_reason == "stop" else []
                if session is None or not blocks or number == most:
                    return
                output = await session.run(blocks)
                yield output
                log += [{"role": "assistant", "content": completion.content}, {"role": "user", "content": output}]

    async def grade(self, messages: Sequence[Mapping[str, Any]], answer: str, record: Mapping[str, Any]) -> dict[str, Any]:
        """`predicted_answer` and `is_correct` of an answer; empty if the record has no expected answer.

        A last message with `prefix: true` is the beginning of the answer.

        Raises:
            ApiError: the record or the environment cannot be used.
        """
        if record.get("expected_answer") is None:
            return {}
        if is_begun(messages):
            messages, answer = messages[:-1], messages[-1]["content"] + answer
        name = self.evaluator_of(record)
        try:
            # Creating it imports Ray and may take seconds, so the event loop does not wait for it.
            grader: Grader = await in_thread(partial(self.start_grader, name), name="rl-serve-grader")
        except UserError as error:
            raise ApiError(400, f"expected_answer needs the environment {name!r}: {error}", param="expected_answer") from error
        return await grader.grade(messages, answer, record)

    async def respond_to_record(
        self, messages: Sequence[Mapping[str, Any]], complete: CompleteChat, record: Mapping[str, Any], request: Request
    ) -> Response:
        """The response of `/generate`."""

        async def work() -> dict[str, Any]:
            answer = await self.answer(messages, complete)
            rounds = {} if self.code is None else {"code_rounds": answer.code_rounds}
            return {
                "generation": answer.text,
                "num_generated_tokens": answer.completion_tokens,
                "finish_reason": answer.finish_reason,
                **rounds,
                **await self.grade(messages, answer.last, record),
            }

        return JSONResponse(await cancel_on_disconnect(request, work()))

    async def respond(
        self,
        messages: Sequence[Mapping[str, Any]],
        complete: CompleteChat,
        body: ChatRequest | ForwardedChatRequest,
        request: Request,
        *,
        model: str,
        limits: Limits,
    ) -> Response:
        """The response of chat if answers may run code, or its stream, which has an event for each message and each output."""
        n = body.n or 1
        if n > limits.max_rows:
            raise ApiError(400, f"n={n} exceeds the {limits.max_rows} completions of a request.", param="n")
        if body.stream:
            return await self._respond_with_events(messages, complete, body, request, model)

        async def one(index: int) -> tuple[dict[str, Any], Answer]:
            answer = await self.answer(messages, complete, index)
            choice = {
                "index": index,
                "message": {"role": "assistant", "content": answer.text},
                "finish_reason": answer.finish_reason,
                "logprobs": None,
                "code_rounds": answer.code_rounds,
                **await self.grade(messages, answer.last, body.record()),
            }
            return choice, answer

        found = await cancel_on_disconnect(request, _gathered([one(index) for index in range(n)]))
        choices, answers = zip(*found, strict=True)
        return JSONResponse({**response_head("chat.completion", model), "choices": list(choices), "usage": _usage(answers)})

    async def _respond_with_events(
        self,
        messages: Sequence[Mapping[str, Any]],
        complete: CompleteChat,
        body: ChatRequest | ForwardedChatRequest,
        request: Request,
        model: str,
    ) -> EventStream:
        """The events; an error before the first message of the model has its own status."""
        head = response_head("chat.completion.chunk", model)

        def event(index: int, delta: Mapping[str, Any], reason: str | None = None) -> str:
            choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
            return server_sent_event({**head, "choices": [choice]})

        async def events() -> AsyncGenerator[str, None]:
            answers = []
            for index in range(body.n or 1):
                answers.append(answer := Answer())
                async with aclosing(self.stream(messages, complete, index)) as parts:
                    async for part in parts:
                        yield event(index, {"role": "assistant", "content": answer.add(part)})
                yield event(index, {}, answer.finish_reason)
            if body.has_usage:
                yield server_sent_event({**head, "choices": [], "usage": _usage(answers)})
            yield DONE

        made = events()
        try:
            first = await cancel_on_disconnect(request, anext(made))
        except BaseException:
            await made.aclose()
            raise

        async def all_events() -> AsyncGenerator[str, None]:
            yield first
            async for event in made:
                yield event

        return EventStream(errors_as_events(all_events()), aclosing(made))


async def _gathered(works: Sequence[Any]) -> list[Any]:
    """The results of all; the first error cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    return token_counts(answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers))


@contextmanager
def open_chat_service(settings: ChatSettings, *, of_run: bool = False) -> Iterator[ChatService]:
    """Answer with these settings while the block runs; the sandbox and the environment are closed at its end.

    The tasks of a run are set with `use_tasks` when its config was read.

    Raises:
        UserError: the prompt config, the sandbox or the environment cannot be used.
    """
    code = CodeRunner(settings.sandbox, max_rounds=settings.max_code_rounds) if settings.code_execution else None
    service = ChatService(
        PromptFiller.load(settings.prompt_config, settings.examples_type), code=code, evaluator=settings.evaluator
    )
    try:
        if not of_run:
            service.use_tasks({})
        yield service
    finally:
        service.close()


def refuse_with_code(body: Mapping[str, Any]) -> None:
    """Refuse fields about single messages, which an answer with code consists of.

    Raises:
        ApiError: names the first.
    """
    for name in _PER_MESSAGE:
        if body.get(name) and body[name] != {"type": "text"}:
            raise ApiError(
                400,
                f"{name} cannot be used, because this server runs code (code_execution): an answer has several messages.",
                param=name,
                code="unsupported_parameter",
            )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One message of the model."""

    content: str
    finish_reason: str
    """`stop` or `length`."""
    prompt_tokens: int
    completion_tokens: int


CompleteChat = Callable[[int, Sequence[Mapping[str, Any]], int], Awaitable[Completion]]
"""Continues a conversation: the arguments are the number of the choice, the messages, and the number of the round, from 0."""


class Answer:
    """The messages of the model so far, with the output of their code between them."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._completions: list[Completion] = []

    def add(self, part: Completion | str) -> str:
        """Add a message, or the output of its code; returns what is new in the text."""
        separator = "\n\n" if self._texts else ""
        self._texts.append(part if isinstance(part, str) else part.content)
        self._completions += [] if isinstance(part, str) else [part]
        return separator + self._texts[-1]

    @property
    def text(self) -> str:
        """All messages and outputs."""
        return "\n\n".join(self._texts)

    @property
    def last(self) -> str:
        """The last message, which has the final answer."""
        return self._completions[-1].content

    @property
    def finish_reason(self) -> str:
        """That of the last message; `length` if there was no space for a message after the last output."""
        return "length" if self.code_rounds == len(self._completions) else self._completions[-1].finish_reason

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the first prompt."""
        return self._completions[0].prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """Tokens of all messages."""
        return sum(completion.completion_tokens for completion in self._completions)

    @property
    def code_rounds(self) -> int:
        """Number of times that code was run."""
        return len(self._texts) - len(self._completions)


def python_blocks(text: str) -> list[str]:
    """The contents of the complete fenced blocks that are marked as Python, in order."""
    return [found["code"] for found in _BLOCK.finditer(text)]


class CodeRunner:
    """Opens one session per answer; variables are kept between the at most `max_rounds` rounds of an answer.

    Raises:
        SandboxUnavailableError: the isolation of this machine is weaker than required.
    """

    def __init__(self, config: SandboxConfig, *, max_rounds: int) -> None:
        self.max_rounds = max_rounds
        component = Registry(discover()).find(Kind.SANDBOX, config.backend)
        self._sandbox: SandboxInterface = component.load(expect=SandboxInterface)(config)

    def close(self) -> None:
        """End all sessions and the sandbox."""
        self._sandbox.close()

    @asynccontextmanager
    async def answer(self) -> AsyncIterator[CodeSession]:
        """The session of one answer, which starts when the first code runs."""
        session = CodeSession(self._sandbox)
        try:
            yield session
        finally:
            # Also if the client hung up: closing ends a program that is running.
            await asyncio.shield(asyncio.to_thread(session.close))


class CodeSession:
    """The sandbox session of one answer."""

    def __init__(self, sandbox: SandboxInterface) -> None:
        self._sandbox = sandbox
        self._session: SessionInterface | None = None
        self._is_closed = False

    async def run(self, blocks: list[str]) -> str:
        """What the blocks print, as a fenced block; an error is part of the output.

        Raises:
            ApiError: the sandbox could not start a session.
        """
        try:
            printed = await asyncio.to_thread(lambda: [self._run(code) for code in blocks])
        except SandboxError as error:
            raise ApiError(503, f"The sandbox failed: {error}", code="sandbox_failed") from error
        output = "\n".join(text for text in printed if text).rstrip("\n") or "(no output)"
        fence = "```" if "```" not in output else "````"
        return f"{fence}output\n{output}\n{fence}"

    def close(self) -> None:
        """End the session."""
        self._is_closed = True
        if self._session is not None:
            self._session.close()

    def _run(self, code: str) -> str:
        if self._session is None:
            self._session = self._sandbox.open_session()
            if self._is_closed:
                self._session.close()
        return _printed(self._session.run(code))


def _printed(result: Result) -> str:
    output = (result.stdout + result.stderr).rstrip("\n")
    if result.truncated:
        output += "\n(output was cut)"
    if result.outcome is Outcome.TIMEOUT:
        output += f"\n(stopped after {result.seconds:.0f} seconds)"
    if result.outcome in (Outcome.KILLED, Outcome.LOST):
        output += "\n(ended: it used too much memory or CPU time, or ended its own processes)"
    return output.lstrip("\n")
