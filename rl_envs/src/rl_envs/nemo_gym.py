"""The environment `nemo_gym`: the tools and the reward of a resources server of NeMo Gym, over HTTP.

The server is asked as NeMo Gym's own agent asks it: `POST /seed_session` begins a session, which cookies identify, `POST /NAME`
calls a tool, and `POST /verify` returns the reward of the finished rollout in the form of OpenAI's Responses API.
"""

from __future__ import annotations

import json
import logging
import math
import re
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import httpx

from rl_core.config.validator import read_section
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.environments import StepResult, environment_return, final_text
from rl_core.interfaces.environment import SESSION_KEY, Conversation, EnvironmentInterface, EnvironmentReturn
from rl_core.interfaces.records import Message, ToolCall
from rl_envs.config import NemoGymConfig

_TOOL_NAME = re.compile(r"(?!(?:seed_session|verify|aggregate_metrics|mcp)$)[A-Za-z0-9_-]+")
_RESPONSE = {
    "id": "resp_rollout",
    "object": "response",
    "created_at": 0,
    "model": "policy",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
_FIRST_SERVER_ERROR = 500
_log = logging.getLogger("rlcore.nemo_gym")


class NemoGymEnvironment(EnvironmentInterface):
    """Runs the tool calls of the model on the server and lets it verify each rollout.

    The metadata of a row are sent to the server, so `env_keys` of the dataset must name the columns that it reads. The row's
    `tools` are those of the server that the model is offered. If the server replies with status 5xx or cannot be reached,
    the row fails; if it refuses a call, the model reads why. Metrics: `accuracy` and `tool_calls`.

    Args:
        config: `NemoGymConfig`, or a dict of its keys.
    """

    reads_tool_calls: ClassVar[bool] = True
    config_class = NemoGymConfig

    def __init__(self, config: NemoGymConfig | Mapping[str, Any]) -> None:
        self.config = read_section(self.config_class, config)
        self._certificates = ssl.create_default_context()
        self._sessions: dict[str, _Session] = {}

    def reset(self, metadata: dict[str, Any]) -> None:
        """Begin a session on the server."""
        row = {key: value for key, value in metadata.items() if key != SESSION_KEY}
        client = httpx.Client(base_url=self.config.url, timeout=self.config.timeout_s, verify=self._certificates)
        session = self._sessions[metadata[SESSION_KEY]] = _Session(client, row)
        session.post("/seed_session", row)

    def step(self, message_log_batch: list[Conversation], metadata: list[Any]) -> EnvironmentReturn:
        """Run the tool calls of B rollouts, and let the server verify those without calls."""
        rows = zip(message_log_batch, metadata, strict=True)
        return environment_return([self._turn(log, info) for log, info in rows])

    def close(self, session: str) -> None:
        """End the connections of a session."""
        if found := self._sessions.pop(session, None):
            found.client.close()

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """`accuracy`: fraction of rollouts with at least `success_reward`; `tool_calls`: mean number of calls."""
        states = batch["extra_env_info"]
        right = sum(state.get("verified_reward", -math.inf) >= self.config.success_reward for state in states)
        calls = sum(state.get("tool_calls", 0) for state in states)
        return batch, {"accuracy": right / len(states), "tool_calls": calls / len(states)}

    def _turn(self, log: Conversation, info: dict[str, Any]) -> StepResult:
        session = self._sessions[info[SESSION_KEY]]
        if session.prompt is None:
            session.prompt = log[:-1]
        calls, turns = log[-1].get("tool_calls") or [], info.get("tool_turns", 0)
        try:
            if calls and turns < self.config.max_tool_turns:
                made = info.get("tool_calls", 0) + len(calls)
                return StepResult(
                    observation=[session.call(call) for call in calls],
                    metadata={**info, "tool_turns": turns + 1, "tool_calls": made},
                    rewards={},
                    terminated=False,
                )
            reward = session.verify(log[len(session.prompt) :])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            _log.warning("NeMo Gym's server at %s failed.", self.config.url, exc_info=error)
            failure = f"the server at {self.config.url} failed: {type(error).__name__}: {error}"
            return StepResult(observation=[], metadata=info, rewards={"verified": 0.0}, terminated=True, failure=failure)
        return StepResult(
            observation=[],
            metadata={**info, "verified_reward": reward},
            rewards={"verified": reward},
            terminated=True,
            answer=final_text(str(log[-1]["content"])) or None,
        )


class _Session:
    """The connections of one rollout; the client keeps the cookies that identify the session."""

    def __init__(self, client: httpx.Client, row: Mapping[str, Any]) -> None:
        self.client, self._row = client, row
        self.prompt: Sequence[Message] | None = None

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        response = self.client.post(path, json=body)
        response.raise_for_status()
        return response.json()

    def call(self, call: ToolCall) -> Message:
        """The result of a tool call, or why the server refuses it."""
        name = call["function"]["name"]
        text = call.get("error") or (None if _TOOL_NAME.fullmatch(name) else f"there is no tool {name!r}")
        if text is None:
            response = self.client.post(f"/{name}", json=call["function"]["arguments"])
            if response.status_code >= _FIRST_SERVER_ERROR:
                response.raise_for_status()
            text = response.text
        message: Message = {"role": "tool", "content": text, "name": name}
        return {**message, "tool_call_id": call["id"]} if "id" in call else message

    def verify(self, turns: Sequence[Message]) -> float:
        """The reward of the finished rollout."""
        prompt = [{"role": one["role"], "content": one["content"]} for one in self.prompt or ()]
        given = {"responses_create_params": {"input": prompt}, **self._row}
        reward = float(self.post("/verify", {**given, "response": {**_RESPONSE, "output": output_items(turns)}})["reward"])
        if not math.isfinite(reward):
            raise ValueError(f"the reward is {json.dumps(reward)}")
        return reward


def output_items(turns: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages, calls and results of a rollout, in order; the model's thoughts are left out."""
    items: list[dict[str, Any]] = []
    unanswered: list[str] = []
    for number, turn in enumerate(turns):
        if turn["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": unanswered.pop(0), "output": turn["content"]})
            continue
        if text := final_text(turn["content"]):
            content = [{"type": "output_text", "text": text, "annotations": []}]
            message = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed", "content": content}
            items.append(message)
        unanswered = [call.get("id") or f"call_{number}_{index}" for index, call in enumerate(turn.get("tool_calls") or [])]
        for name, call in zip(unanswered, turn.get("tool_calls") or [], strict=True):
            function = {"name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])}
            items.append({"type": "function_call", "id": name, "call_id": name, "status": "completed", **function})
    return items
