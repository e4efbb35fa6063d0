"""Records the turns that an agent samples in one rollout, as segments."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from rl_core.data.images import RowImage, prompt_identity
from rl_core.data.tokenizer import decode
from rl_core.event_loop import in_thread
from rl_core.interfaces.records import MESSAGE_KEYS
from rl_train.agents.model_server import AgentLimitError, AgentRequest, AgentSessionEndedError, AgentTurn
from rl_train.data.images import located
from rl_train.data.messages import images_of
from rl_train.data.special_tokens import decode_answers, guarded
from rl_train.rollouts.drivers import prompt_after
from rl_train.rollouts.engines import RolloutSampler, SampledTurn
from rl_train.rollouts.environment_pool import StepFailedError
from rl_train.rollouts.trajectory import MessageLog, Trajectory, log_token_ids, sets_entry


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Limits of a rollout."""

    max_turns: int
    """Maximum number of turns."""
    max_total_length: int
    """Maximum number of tokens of a segment."""
    max_new_tokens: int
    """Maximum number of new tokens of a turn."""


class AgentSession:
    """Samples and records the turns of one rollout; see `rl_train.agents.model_server.TurnSource`.

    A request continues a segment if its text begins with the text of the segment, and its images with those of the segment; the
    tokens of the segment are then kept as they were sampled. Otherwise, the history was rewritten, or the agent has several
    conversations, and a new segment starts.

    Args:
        rollout: the rollout with only its prompt.
        engine: samples the turns; it is used in the event loop that is running now.
        tokenizer: the policy's.
        limits: limits of the rollout.

    Attributes:
        engine_error: the error of the engine that ended a request, if there was one. Agents cannot be relied on to raise it.
    """

    def __init__(self, rollout: Trajectory, engine: RolloutSampler, tokenizer: Any, *, limits: SessionLimits) -> None:
        self._rollout, self._engine, self._tokenizer, self._limits = rollout, engine, tokenizer, limits
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self.images = {image_url(image.digest): image for image in rollout.images() or ()}
        self._segments: list[MessageLog] = []
        self._started = self._recorded = 0
        self._has_ended = self._truncated = False
        self.engine_error: Exception | None = None

    async def sample(self, request: AgentRequest) -> AgentTurn:
        """Sample the next turn of this rollout and record it; raises as `TurnSource.sample`.

        Long texts are tokenized and decoded in separate threads, because the caller's event loop also serves other agents.
        """
        prompt, images = await in_thread(partial(self._tokens_before, request), name="agent-text")
        report = request.on_tokens
        with self._lock:
            new_tokens = self._begin(len(prompt), request.max_new_tokens)
        sampling = asyncio.run_coroutine_threadsafe(
            self._engine.sample(
                torch.tensor(prompt, dtype=torch.int64),
                stop_strings=list(request.stop_strings) or None,
                messages=request.messages,
                images=images or None,
                max_new_tokens=new_tokens,
                on_tokens=None if report is None else lambda turn: report(_agent_turn(prompt, turn)),
            ),
            self._loop,
        )
        try:
            turn = await asyncio.wrap_future(sampling)
        except Exception as error:
            self.engine_error = self.engine_error or error
            raise
        finally:
            sampling.cancel()
        [text] = await in_thread(partial(decode_answers, self._tokenizer, [turn.token_ids]), name="agent-text")
        with self._lock:
            self._refuse_if_ended()
            self._record(request, prompt, images, turn, text)
        return _agent_turn(prompt, turn)

    def finish(self) -> None:
        """End the rollout: later requests are refused, and the recorded segments become those of the rollout."""
        with self._lock:
            self._has_ended = True
            self._rollout.turns, self._rollout.truncated = self._recorded, self._truncated
            if self._segments:
                *self._rollout.earlier_segments, self._rollout.message_log = self._segments

    def _begin(self, length: int, asked: int | None) -> int:
        """Check the limits; returns the maximum number of new tokens."""
        self._refuse_if_ended()
        limits = self._limits
        if self._started >= limits.max_turns:
            self._truncated = True
            raise AgentLimitError(f"This rollout has already used all {limits.max_turns} turns (max_rollout_turns).")
        if length >= limits.max_total_length:
            self._truncated = True
            raise AgentLimitError(
                f"The conversation has {length} tokens, which leaves no space for an answer within {limits.max_total_length} "
                "(policy.max_total_sequence_length)."
            )
        self._started += 1
        most = min(limits.max_new_tokens, limits.max_total_length - length)
        return most if asked is None else min(asked, most)

    def _refuse_if_ended(self) -> None:
        if self._has_ended:
            raise AgentSessionEndedError(
                "The rollout of this API key has ended. Wait for all requests before the agent returns."
            )

    def _tokens_before(self, request: AgentRequest) -> tuple[list[int], list[RowImage]]:
        """What the model reads: the longest segment that the request continues and the tokens after it, or its own tokens.

        And the images in these tokens.
        """
        tokenizer = guarded(self._tokenizer, request.messages)
        text = decode(tokenizer, request.prompt)
        best, images = list(request.prompt), list(request.images)
        longest = -1
        with self._lock:
            segments = [(log_token_ids(log), images_of(log) or []) for log in self._segments]
        for tokens, seen in segments:
            is_same = [image.digest for image in seen] == [image.digest for image in request.images[: len(seen)]]
            found = prompt_after(tokens, text, tokenizer) if is_same and len(tokens) > longest else None
            if found is not None:
                after = found.token_ids.tolist()
                longest, best = len(tokens), [*tokens.tolist(), *after]
                images = [*seen, *(image.moved(longest) for image in located(request.images[len(seen) :], after))]
        return best, images

    def _record(
        self, request: AgentRequest, prompt: list[int], images: Sequence[RowImage], turn: SampledTurn, text: str
    ) -> None:
        """Append the turn to the segment whose tokens it continues; one that grew meanwhile is not continued."""

        def is_continued(log: MessageLog) -> bool:
            tokens = log_token_ids(log).tolist()
            seen = [image for image in images if image.end <= len(tokens)]
            return tokens == prompt[: len(tokens)] and prompt_identity(images_of(log)) == prompt_identity(seen)

        continued = [log for log in self._segments if is_continued(log)]
        messages = [_plain(message) for message in request.messages]
        log = max(continued, key=lambda log: len(log_token_ids(log)), default=None)
        if log is None:
            log, read = [], prompt
        else:
            self._segments.remove(log)
            read = prompt[len(log_token_ids(log)) :]
            messages = messages[len(log) :] or [{"role": "user", "content": ""}]
        self._segments.append(log)
        start = len(prompt) - len(read)
        _append(log, messages, read, [image.moved(-start) for image in images if image.start >= start])
        self._recorded += 1
        self._truncated = turn.truncated
        log.append(
            {
                "role": "assistant",
                "content": text,
                "token_ids": turn.token_ids,
                "generation_logprobs": turn.logprobs,
                "weight_version": turn.weight_version,
                "token_versions": turn.token_versions,
                "turn": self._recorded,
                **sets_entry(turn.sampled_sets),
            }
        )


def failed_by_engine(error: Exception | None) -> bool:
    """Whether an error of the engine concerns more than one rollout."""
    return error is not None and not isinstance(error, StepFailedError | AgentLimitError | AgentSessionEndedError)


def _agent_turn(prompt: list[int], turn: SampledTurn) -> AgentTurn:
    return AgentTurn(
        prompt=prompt,
        token_ids=turn.token_ids.tolist(),
        logprobs=turn.logprobs.tolist(),
        truncated=turn.truncated,
        weight_version=turn.weight_version,
    )


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    return cast("dict[str, Any]", {key: message[key] for key in MESSAGE_KEYS if message.get(key) is not None})


def image_url(digest: str) -> str:
    """The URL by which an agent sends an image of its prompt to the endpoint of the run."""
    return f"rlcore-image:{digest}"


def _append(log: MessageLog, messages: Sequence[dict[str, Any]], token_ids: Sequence[int], images: Sequence[RowImage]) -> None:
    """Append messages that the model reads; the last one has all tokens and their images."""
    tokens = torch.tensor(token_ids, dtype=torch.int64)
    for number, message in enumerate(messages, start=1):
        log.append({**message, "token_ids": tokens if number == len(messages) else tokens[:0]})
    if images:
        log[-1]["images"] = list(images)
