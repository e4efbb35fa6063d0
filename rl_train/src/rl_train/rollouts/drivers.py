"""How one rollout is run, as a coroutine: its turns, their tokens, and what the model reads before each (`rollout.history`).

Sampled tokens are kept and never retokenized; the messages of environments are tokenized after them.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch

from rl_core.data.images import RowImage
from rl_core.data.tokenizer import decode, encode
from rl_core.environments.scorer import StepResult
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces.records import Message, Observation, PartsMessage, messages_of
from rl_train.data.chat_template import form_for, render
from rl_train.data.images import located, read_images
from rl_train.data.messages import prompt_log
from rl_train.data.special_tokens import control_tokens, decode_answers, guarded, hidden_tokens
from rl_train.rollouts.engines import RolloutSampler
from rl_train.rollouts.environment_pool import StepFailedError
from rl_train.rollouts.sessions import Session
from rl_train.rollouts.trajectory import Trajectory
from rl_train.tools.parsers import ToolCallParser

_log = logging.getLogger("rlcore")


class RolloutDriver(ABC):
    """Runs rollouts. A driver keeps no state between them, because many run at the same time."""

    @abstractmethod
    async def run(self, prompt: Trajectory, engine: RolloutSampler, session: Session | None) -> Trajectory:
        """Run one rollout to its end.

        Args:
            prompt: the rollout with only its prompt; it is continued in place.
            engine: samples its turns.
            session: its environment; None without environments.

        Returns:
            The finished rollout.
        """


class EnvironmentDriver(RolloutDriver):
    """Turns of the model and responses of an environment alternate, until the environment or a limit ends the rollout.

    Args:
        tokenizer: decodes what the environment reads and tokenizes what it writes.
        max_turns: maximum number of turns, by task name.
        max_total_length: maximum number of tokens of a segment; a rollout that reaches it is truncated.
        tool_parsers: parsers of tool calls, by task name.
        history: `rollout.history`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_turns: Mapping[str, int],
        max_total_length: int,
        tool_parsers: Mapping[str, ToolCallParser] | None = None,
        history: str = "as_sampled",
    ) -> None:
        self._tool_parsers = tool_parsers or {}
        self._tokenizer, self._max_turns, self._max_total_length = tokenizer, max_turns, max_total_length
        self._has_warned = False
        self._history = HISTORIES[history](tokenizer) if max(max_turns.values(), default=1) > 1 else None

    async def run(self, prompt: Trajectory, engine: RolloutSampler, session: Session | None) -> Trajectory:
        """Run a rollout with its environment. Without a session, it is one answer without a reward."""
        rollout = prompt
        if session is not None:
            rollout.metadata, observation = await session.open(rollout.metadata)
            self._add_to_prompt(rollout, observation)
        while not rollout.done:
            sampled = await engine.sample(
                rollout.token_ids(),
                stop_strings=rollout.stop_strings,
                messages=rollout.conversation(),
                images=rollout.images(),
            )
            [text] = decode_answers(self._tokenizer, [sampled.token_ids])
            self._warn_of_hidden(sampled.token_ids[:-1].tolist())
            rollout.add_answer(
                text,
                sampled.token_ids,
                sampled.logprobs,
                weight_version=sampled.weight_version,
                token_versions=sampled.token_versions,
                sampled_sets=sampled.sampled_sets,
                parser=self._tool_parsers.get(rollout.task_name),
            )
            rollout.truncated = sampled.truncated
            if session is None:
                rollout.done = True
            else:
                self._continue(rollout, await session.step(rollout.conversation(), rollout.metadata))
        return rollout

    def _warn_of_hidden(self, token_ids: list[int]) -> None:
        """Warn once if a reward does not see tokens before the end of a completion."""
        hidden = hidden_tokens(self._tokenizer)
        if not self._has_warned and not hidden.isdisjoint(token_ids):
            self._has_warned = True
            _log.warning("sampled completions: %s", describe_hidden(self._tokenizer, hidden.intersection(token_ids)))

    def _add_to_prompt(self, rollout: Trajectory, observation: Observation | None) -> None:
        """Render the prompt again with the messages of the environment."""
        if observation is None:
            return
        read, own = observed_images(observation, self._tokenizer)
        messages = [*rollout.conversation(), *read]
        images = [*(rollout.images() or ()), *own]
        log = prompt_log(messages, self._tokenizer, tools=rollout.tools, prefill=rollout.prefill, images=images)
        rollout.message_log = [
            {**message, **{key: part[key] for key in ("token_ids", "images") if key in part}}
            for message, part in zip(messages, log, strict=True)
        ]
        if rollout.num_tokens() >= self._max_total_length:
            raise StepFailedError(
                DataError(
                    f"the prompt with the messages of `reset` has {rollout.num_tokens()} tokens, which leaves no space for an "
                    f"answer within {self._max_total_length} (policy.max_total_sequence_length)"
                )
            )

    def _continue(self, rollout: Trajectory, result: StepResult) -> None:
        rollout.add_rewards(result.rewards)
        rollout.scored = rollout.scored and result.scored
        rollout.answer, rollout.stop_strings = result.answer, result.stop_strings
        if result.metadata is not None:
            rollout.metadata = result.metadata
        rollout.done = result.terminated or rollout.truncated or rollout.turns >= self._max_turns[rollout.task_name]
        if rollout.done or self._history is None:
            rollout.feedback = _text_of_last(result.observation)
            return
        observation, images = observed_images(result.observation, self._tokenizer)
        prompt = self._history.next_prompt(rollout, observation, images)
        length = len(prompt.token_ids) + (rollout.num_tokens() if prompt.continues else 0)
        if length >= self._max_total_length:
            rollout.done = rollout.truncated = True
        elif prompt.continues:
            rollout.add_observation(observation, prompt.token_ids, prompt.images)
        else:
            rollout.start_segment(observation, prompt.token_ids, prompt.images)


def _text_of_last(observation: Any) -> str:
    """The texts of the messages with which an environment ends a rollout, which are not checked; empty without any."""
    messages = observation if isinstance(observation, list | tuple) else [observation]
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return "\n".join(content for content in contents if isinstance(content, str))


def observed_images(observation: Observation, tokenizer: Any) -> tuple[list[Message | PartsMessage], Sequence[RowImage]]:
    """The messages of an environment, whose images are read now and replaced by references, and these images.

    Raises:
        DataError: a picture cannot be read.
        ConfigError: the model or its engine reads no images.
    """
    messages: list[Message | PartsMessage] = [*messages_of(observation)]
    if all(isinstance(message["content"], str) for message in messages):
        return messages, ()
    read, images = read_images(messages, tokenizer)
    return cast("list[Message | PartsMessage]", read), images


def describe_hidden(tokenizer: Any, hidden: Collection[int]) -> str:
    """A sentence that names special tokens that rewards do not see, and the key that shows them."""
    names = ", ".join(tokenizer.convert_ids_to_tokens(sorted(hidden)))
    seen = f"do not see {names}" if names else "see all special tokens"
    visible = vars(tokenizer).get("visible_special_tokens", "content")
    return f"rewards, tools and logs {seen} (policy.tokenizer.visible_special_tokens: {visible})"


_USER: Mapping[str, Any] = {"role": "user", "content": "A"}
_ANSWER = "RLCORE"


class TurnFormatter:
    """Tokenizes an observation with the template's text around it and the generation prompt of the next answer.

    The text around the messages is found by rendering a conversation with a known answer: `closing` is the text of the template
    after an assistant's message. If the sampled tokens end with the end-of-turn token that the closing text starts with, it is
    not repeated. Messages of the role `tool` follow an answer with one call each, because templates expect that.

    Args:
        tokenizer: without a chat template, messages are concatenated.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._has_template = tokenizer.chat_template is not None
        control = control_tokens(tokenizer)
        self._control_names, self._control_ids = list(control), set(control.values())
        self._eos, self._eos_id = tokenizer.eos_token or "", tokenizer.eos_token_id
        self._history = lru_cache(maxsize=64)(self._rendered_history)
        self._closing = self._closing_text() if self._has_template else ""

    def observation_ids(
        self,
        observation: Observation,
        sampled_ids: torch.Tensor,
        *,
        tools: Sequence[Any] | None = None,
        images: Sequence[RowImage] = (),
    ) -> torch.Tensor:
        """Token ids [T] between the model's message and its next one.

        Args:
            observation: the environment's message or messages.
            sampled_ids: [T'] the model's message, as sampled.
            tools: the tools offered in this conversation; some templates repeat them.
            images: the images in the messages.

        Raises:
            DataError: the template cannot render the messages after an answer, or there are images and no template.
        """
        messages = messages_of(observation)
        if (tokenizer := guarded(self._tokenizer, messages, tools)) is not self._tokenizer:
            return _formatter(tokenizer).observation_ids(observation, sampled_ids, tools=tools, images=images)
        if self._has_template:
            text = self._after_answer(messages, tools, images)
            text = text[len(self._repeated_end(text, sampled_ids)) :]
        elif images:
            raise DataError("the environment sent an image, which requires a chat template: set policy.tokenizer.chat_template")
        else:
            text = "".join(message["content"] for message in messages)
        return torch.tensor(encode(text, self._tokenizer), dtype=torch.int64)

    def _repeated_end(self, text: str, sampled_ids: torch.Tensor) -> str:
        """The end of turn with which the text starts, if the sampled tokens already have it or another one."""
        if not sampled_ids.numel():
            return ""
        last = int(sampled_ids[-1])
        if last == self._eos_id:
            return self._eos if text.startswith(self._eos) else ""
        # Llama 3 ends a turn that calls tools with <|eom_id|>, although its template writes <|eot_id|>.
        return self._leading_control(text) if last in self._control_ids else ""

    def _leading_control(self, text: str) -> str:
        return max((name for name in self._control_names if text.startswith(name)), key=len, default="")

    def _closing_text(self) -> str:
        rendered = self._history(json.dumps([{"role": "assistant", "content": _ANSWER}, None]))
        return rendered[rendered.rindex(_ANSWER) + len(_ANSWER) :]

    def _after_answer(self, messages: Sequence[Message], tools: Sequence[Any] | None, images: Sequence[RowImage]) -> str:
        problems = []
        for answer in _answers_before(messages):
            try:
                return self._after(answer, messages, tools, images)
            except DataError as error:
                problems.append(error)
        raise problems[0]

    def _after(
        self,
        answer: Mapping[str, Any],
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        images: Sequence[RowImage],
    ) -> str:
        history_text = self._history(json.dumps([answer, tools]))
        rendered = self._render([_USER, answer, *messages], tools, next_answer=True, images=images)
        # The known text occurs equally often in both, and for the last time shortly before the answer's end.
        end_of_own = _split_after(history_text, history_text.count(_ANSWER))
        rest = _split_after(rendered, history_text.count(_ANSWER))
        if not history_text.count(_ANSWER) or not rest.startswith(end_of_own):
            raise DataError(
                "The chat template renders an assistant's message differently if another message follows it, so the tokens "
                "of several turns cannot be joined. Set rollout.history to `template`, which renders each prompt again, or use "
                "a template that does not change earlier turns (policy.tokenizer.chat_template)."
            )
        return self._closing_after(end_of_own) + rest[len(end_of_own) :]

    def _closing_after(self, end_of_answer: str) -> str:
        """What the template writes after the sampled part of an answer, possibly including a tool call's closing braces."""
        if end_of_answer.endswith(self._closing):
            return self._closing
        starts = [i for i in range(len(end_of_answer)) if self._leading_control(end_of_answer[i:])]
        return end_of_answer[starts[0] :] if starts else self._closing

    def _rendered_history(self, answer_and_tools: str) -> str:
        """The known conversation; the argument is JSON, as the key of a cache: most turns follow the same answer."""
        answer, tools = json.loads(answer_and_tools)
        return self._render([_USER, answer], tools, next_answer=False)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        *,
        next_answer: bool,
        images: Sequence[RowImage] = (),
    ) -> str:
        form = form_for(messages, self._tokenizer, tools=tools)
        return render(messages, self._tokenizer, form=form, add_generation_prompt=next_answer, tools=tools, images=images)


_formatter = lru_cache(maxsize=16)(TurnFormatter)


def _answers_before(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Answers that the messages may follow, the best first: with a call for each tool result, with one call, without calls.

    Their content, or the arguments of their calls, are known.
    """
    calls = [
        {
            "id": message.get("tool_call_id", f"call{number:05}"),
            "type": "function",
            "function": {"name": message.get("name") or "unknown", "arguments": {_ANSWER: _ANSWER}},
        }
        for number, message in enumerate(messages)
        if message["role"] == "tool"
    ]
    numbers = dict.fromkeys((len(calls), 1)) if calls else ()
    return [
        *({"role": "assistant", "content": "", "tool_calls": calls[:count]} for count in numbers),
        {"role": "assistant", "content": _ANSWER},
    ]


def _split_after(text: str, count: int) -> str:
    """The text after the `count`-th occurrence of the known answer; empty if there are fewer."""
    return text.split(_ANSWER, count)[-1] if text.count(_ANSWER) >= count else ""


@dataclass(frozen=True, kw_only=True)
class NextPrompt:
    """The tokens before the next turn."""

    token_ids: torch.Tensor
    """[T] int64: the tokens after those of the current segment, or all tokens of a new segment."""
    continues: bool
    """Whether the current segment continues."""
    images: Sequence[RowImage] = ()
    """The images in these tokens."""


class History(ABC):
    """Tokenizes what an environment wrote, together with the history that the model reads."""

    @abstractmethod
    def next_prompt(self, rollout: Trajectory, observation: Observation, images: Sequence[RowImage] = ()) -> NextPrompt:
        """What the model reads before its next turn.

        Args:
            rollout: ends with the model's last message.
            observation: the environment's message or messages.
            images: the images in these messages.

        Raises:
            DataError: the chat template cannot render the messages.
        """


class AsSampled(History):
    """The tokens of all earlier turns as they were sampled; a rollout has one segment.

    Args:
        tokenizer: without a chat template, messages are concatenated.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._formatter = TurnFormatter(tokenizer)

    def next_prompt(self, rollout: Trajectory, observation: Observation, images: Sequence[RowImage] = ()) -> NextPrompt:
        """Append the observation to the sampled tokens; the segment always continues."""
        last = rollout.message_log[-1]["token_ids"]
        tokens = self._formatter.observation_ids(observation, last, tools=rollout.tools, images=images)
        return NextPrompt(token_ids=tokens, continues=True, images=located(images, tokens.tolist()))


class Rendered(History):
    """The conversation as the chat template renders it before each turn, which may change earlier turns.

    The segment continues if the rendered text begins with the text of its tokens. They are then kept as they were sampled, and
    only the text after them is tokenized: tokenizing sampled text again could give other tokens.

    Args:
        tokenizer: has a chat template.

    Raises:
        ConfigError: it has none.
    """

    def __init__(self, tokenizer: Any) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            error = ConfigError(
                "rollout.history is `template`, but the tokenizer has no chat template. Set policy.tokenizer.chat_template, or "
                "use `as_sampled`."
            )
            error.key = "rollout.history"
            raise error
        self._tokenizer = tokenizer

    def next_prompt(self, rollout: Trajectory, observation: Observation, images: Sequence[RowImage] = ()) -> NextPrompt:
        """Render the conversation again; a prompt that does not continue the sampled tokens begins a new segment."""
        messages = [*rollout.conversation(), *messages_of(observation)]
        tokenizer = guarded(self._tokenizer, messages, rollout.tools)
        form = form_for(messages, tokenizer, tools=rollout.tools)
        shown = [*(rollout.images() or ()), *images]
        text = render(messages, tokenizer, form=form, add_generation_prompt=True, tools=rollout.tools, images=shown)
        if (prompt := prompt_after(rollout.token_ids(), text, tokenizer)) is not None:
            return replace(prompt, images=located(images, prompt.token_ids.tolist()))
        tokens = encode(text, tokenizer)
        placed = located(shown, tokens)
        return NextPrompt(token_ids=torch.tensor(tokens, dtype=torch.int64), continues=False, images=placed)


def prompt_after(token_ids: torch.Tensor, text: str, tokenizer: Any) -> NextPrompt | None:
    """The tokens of a rendered conversation after those of a segment; None if the text does not begin with their text.

    Args:
        token_ids: [T] all tokens of the segment.
        text: the rendered conversation.
        tokenizer: decodes the tokens and encodes the rest of the text.
    """
    before = decode(tokenizer, token_ids.tolist())
    if not text.startswith(before):
        return None
    return NextPrompt(token_ids=torch.tensor(encode(text[len(before) :], tokenizer), dtype=torch.int64), continues=True)


HISTORIES: dict[str, type[AsSampled] | type[Rendered]] = {"as_sampled": AsSampled, "template": Rendered}
"""By the value of `rollout.history`."""
