"""Answers of chat and `/generate`: the prompt config, rounds of code, and the comparison with an expected answer.

A conversation with a local model, outside of HTTP.

Fills a prompt config with the question of a request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from rl_core.config.schema import EnvironmentConfig
from rl_core.errors import DataError, UserError
from rl_core.event_loop import in_thread
from rl_serve.chat_format import ChatFormat
from rl_serve.choices import RowDeltas
from rl_serve.code_rounds import CodeRunner, python_blocks
from rl_serve.engine import EngineThread
from rl_serve.errors import ApiError
from rl_serve.grading import Grader
from rl_serve.requests import SamplingParameters
from rl_serve.sampling import Limits, ParameterNames, SamplingPlan, plan_sampling
from rl_serve.served_model import ServedModel
from rl_serve.settings import ChatSettings
from rl_serve.text import completion_text
from rl_train.data.conversations import is_begun
from rl_train.prompts.templates import PromptTemplate, load_prompt


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

    async def answer(self, messages: Sequence[Mapping[str, Any]], complete: CompleteChat) -> Answer:
        """The whole answer to a conversation."""
        answer = Answer()
        async with aclosing(self.stream(messages, complete)) as parts:
            async for part in parts:
                answer.add(part)
        return answer

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
        return await grader.grade(messages, answer, record)


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
