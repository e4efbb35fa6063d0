"""What the model reads before the next turn of a rollout (`rollout.history`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.data.conversation_tokens import decode, encode
from rl_core.errors import ConfigError
from rl_core.interfaces.messages import Observation, messages_of
from rl_train.data.chat_template import form_for, render
from rl_train.data.guarded_text import guarded
from rl_train.rollouts.trajectory import Trajectory
from rl_train.rollouts.turns import TurnFormatter


@dataclass(frozen=True, kw_only=True)
class NextPrompt:
    """The tokens before the next turn."""

    token_ids: torch.Tensor
    """[T] int64: the tokens after those of the current segment, or all tokens of a new segment."""
    continues: bool
    """Whether the current segment continues."""


class History(ABC):
    """Tokenizes what an environment wrote, together with the history that the model reads."""

    @abstractmethod
    def next_prompt(self, rollout: Trajectory, observation: Observation) -> NextPrompt:
        """What the model reads before its next turn.

        Args:
            rollout: ends with the model's last message.
            observation: the environment's message or messages.

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

    def next_prompt(self, rollout: Trajectory, observation: Observation) -> NextPrompt:
        """Append the observation to the sampled tokens; the segment always continues."""
        last = rollout.message_log[-1]["token_ids"]
        return NextPrompt(token_ids=self._formatter.observation_ids(observation, last, tools=rollout.tools), continues=True)


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

    def next_prompt(self, rollout: Trajectory, observation: Observation) -> NextPrompt:
        """Render the conversation again; a prompt that does not continue the sampled tokens begins a new segment."""
        messages = [*rollout.conversation(), *messages_of(observation)]
        tokenizer = guarded(self._tokenizer, messages, rollout.tools)
        form = form_for(messages, tokenizer, tools=rollout.tools)
        text = render(messages, tokenizer, form=form, add_generation_prompt=True, tools=rollout.tools)
        return prompt_after(rollout.token_ids(), text, tokenizer) or NextPrompt(
            token_ids=torch.tensor(encode(text, tokenizer), dtype=torch.int64), continues=False
        )


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
