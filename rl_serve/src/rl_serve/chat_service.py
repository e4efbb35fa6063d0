"""Answers of chat and `/generate`: the prompt config, rounds of code, and the comparison with an expected answer."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from rl_core.config.schema import EnvironmentConfig
from rl_core.errors import UserError
from rl_core.event_loop import in_thread
from rl_serve.code_rounds import CodeRunner, python_blocks
from rl_serve.errors import ApiError
from rl_serve.grading import Grader
from rl_serve.prompt_filler import PromptFiller
from rl_serve.settings import ChatSettings
from rl_train.data.conversations import is_begun


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One message of the model."""

    content: str
    finish_reason: str
    """`stop` or `length`."""
    prompt_tokens: int
    completion_tokens: int


CompleteChat = Callable[[Sequence[Mapping[str, Any]], int], Awaitable[Completion]]
"""Continues a conversation; the second argument is the number of the round, from 0."""


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """The messages of the model, with the output of their code between them."""

    texts: Sequence[str]
    """Messages and outputs in turn; the first is a message."""
    last: str
    """The last message, which has the final answer."""
    finish_reason: str
    prompt_tokens: int
    """Tokens of the first prompt."""
    completion_tokens: int
    """Tokens of all messages."""
    code_rounds: int
    """Number of times that code was run."""

    @property
    def text(self) -> str:
        """All messages and outputs."""
        return "\n\n".join(self.texts)


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

    async def answer(self, messages: Sequence[Mapping[str, Any]], complete: CompleteChat) -> Transcript:
        """The whole answer to a conversation."""
        texts: list[str] = []
        completions: list[Completion] = []
        async with aclosing(self.stream(messages, complete)) as parts:
            async for part in parts:
                texts.append(part if isinstance(part, str) else part.content)
                completions += [] if isinstance(part, str) else [part]
        cut_off = len(texts) % 2 == 0
        return Transcript(
            texts=texts,
            last=completions[-1].content,
            finish_reason="length" if cut_off else completions[-1].finish_reason,
            prompt_tokens=completions[0].prompt_tokens,
            completion_tokens=sum(completion.completion_tokens for completion in completions),
            code_rounds=len(texts) - len(completions),
        )

    async def stream(
        self, messages: Sequence[Mapping[str, Any]], complete: CompleteChat
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
                    completion = await complete(log, number)
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
        return (await grader.grade(messages, answer, record)).as_json()


@contextmanager
def open_chat_service(settings: ChatSettings, *, of_run: bool = False) -> Iterator[ChatService]:
    """Answer with these settings while the block runs; the sandbox and the environment are closed at its end.

    Args:
        settings: the settings.
        of_run: whether a run is served, whose tasks are set with `use_tasks` when its config was read.

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
