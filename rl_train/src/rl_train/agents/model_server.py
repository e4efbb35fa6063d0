"""The interface of endpoints that answer agents from the training engine (`rlcore_model_servers`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_core.data.images import RowImage
from rl_core.errors import RLCoreError
from rl_core.interfaces.records import Message


@dataclass(frozen=True, kw_only=True)
class AgentRequest:
    """One turn that an agent requests."""

    prompt: Sequence[int]
    """Token ids of the conversation as the chat template renders it, with the header of the model's next message."""
    messages: Sequence[Message]
    """The conversation."""
    images: Sequence[RowImage] = field(default_factory=tuple)
    """The images in the prompt."""
    stop_strings: Sequence[str] = field(default_factory=tuple)
    """Strings that end the turn."""
    max_new_tokens: int | None = None
    """Maximum number of new tokens; limited by `policy.generation.max_new_tokens`."""
    on_tokens: Callable[[AgentTurn], None] | None = None
    """Called with all tokens so far when there are new ones, if the engine streams tokens; in the thread of the engine."""


@dataclass(frozen=True, kw_only=True)
class AgentTurn:
    """A sampled turn."""

    prompt: list[int]
    """The tokens that the model has read: those of earlier turns as they were sampled, if the history was not rewritten."""
    token_ids: list[int]
    """The sampled tokens."""
    logprobs: list[float]
    """Their log-probabilities in nats."""
    truncated: bool
    """Whether a length limit ended the turn; without meaning before its end."""
    weight_version: int
    """Version of the weights that sampled it."""


class AgentLimitError(RLCoreError):
    """The rollout has reached its maximum number of turns or tokens."""


class AgentSessionEndedError(RLCoreError):
    """The rollout has ended, so no more turns can be sampled in it."""


class TurnSource(Protocol):
    """Samples and records the turns of one rollout."""

    @property
    def images(self) -> Mapping[str, RowImage]:
        """The images of its prompt, by the URLs that the agent was given for them."""

    async def sample(self, request: AgentRequest) -> AgentTurn:
        """Sample one turn; may be called from any event loop, also concurrently. Cancelling the call cancels the turn.

        Raises:
            AgentLimitError: the rollout has reached a limit.
            AgentSessionEndedError: the rollout has ended.
            RLCoreError: the engine failed.
        """


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What an endpoint needs to know about the engine."""

    tokenizer: Any
    """The policy's tokenizer, with a chat template."""
    model: str
    """Name of the model in the API."""
    temperature: float
    """Temperature at which turns are sampled."""


class ModelServer(ABC):
    """A local endpoint with the chat completions of OpenAI's API. Each rollout has a key, which is valid until it ends.

    Args:
        settings: describes the engine.
    """

    @abstractmethod
    def __init__(self, settings: ServerSettings) -> None:
        """Start the endpoint."""

    @property
    @abstractmethod
    def base_url(self) -> str:
        """URL for OpenAI clients, such as `http://127.0.0.1:40000/v1`."""

    @abstractmethod
    def open(self, turns: TurnSource) -> str:
        """A new key; requests with it are answered by `turns`."""

    @abstractmethod
    def close(self, key: str) -> None:
        """Refuse further requests with this key."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the endpoint; may be called repeatedly."""
