"""The environment `openenv`: an environment of an OpenEnv server, with one session per rollout over a WebSocket."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from websockets.sync.client import connect

from rl_core.interfaces.records import Observation
from rl_envs.text_games.config import OpenEnvConfig
from rl_envs.text_games.session import Move, TextGame, TextGameEnvironment, read_seed

_MAX_BYTES = 16 * 2**20
"""Maximum size of a reply of the server."""


class OpenEnvServerError(Exception):
    """The server replied with an error, or with something that is not an observation."""


class OpenEnvEnvironment(TextGameEnvironment):
    """Plays an episode of an OpenEnv environment, which runs in its own server.

    A row's metadata contain `seed`, with which the episode begins. Rewards are those of the server, turn by turn.

    Args:
        config: `OpenEnvConfig`, or a dict of its keys.
    """

    config_class = OpenEnvConfig
    config: OpenEnvConfig

    def start(self, info: Mapping[str, Any]) -> TextGame:
        return _Episode(self.config, read_seed(info, "openenv"))


class _Episode:
    """One connection: the server has an environment for each, and ends it with the connection."""

    def __init__(self, config: OpenEnvConfig, seed: int) -> None:
        self._config = config
        url = config.url.rstrip("/").replace("http", "ws", 1)
        self._connection = ExitStack()
        self._socket = self._connection.enter_context(connect(f"{url}/ws", open_timeout=config.timeout_s, max_size=_MAX_BYTES))
        first = self._exchange("reset", {**config.kwargs, "seed": seed})
        self.opening: Observation | None = self._shown(first["observation"])

    def play(self, message: str) -> Move:
        key = self._config.action_key
        try:
            action = _json_object(message) if key is None else {key: message}
        except ValueError as error:
            reply: Observation = {"role": "environment", "content": f"That is not an action: {error}."}
            return Move(reply, {"game": 0.0}, has_ended=False)
        data = self._exchange("step", action)
        reward = float(data.get("reward") or 0.0)
        return Move(
            self._shown(data["observation"]), {"game": reward}, has_ended=bool(data.get("done")), answer=message or None
        )

    def close(self) -> None:
        self._connection.close()

    def _exchange(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and wait for its observation. After an error, a late reply must not answer the next message."""
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            reply = json.loads(self._socket.recv(timeout=self._config.timeout_s))
            found = reply["data"]
            if reply["type"] != "observation" or not isinstance(found["observation"], Mapping):
                raise OpenEnvServerError(f"{kind}: the server replied {json.dumps(reply)[:500]}")
        except Exception:
            self.close()
            raise
        observation: dict[str, Any] = found
        return observation

    def _shown(self, observation: Mapping[str, Any]) -> Observation:
        key = self._config.observation_key
        if key is not None and key not in observation:
            raise OpenEnvServerError(f"the observation has no {key!r}, only {sorted(observation)}: set `observation_key`")
        value = observation if key is None else observation[key]
        return {"role": "environment", "content": value if isinstance(value, str) else json.dumps(value)}


def _json_object(message: str) -> dict[str, Any]:
    """The JSON object of an action, which may follow other text.

    Raises:
        ValueError: There is none.
    """
    start, end = message.find("{"), message.rfind("}")
    if start < 0 or end < start:
        raise ValueError("a JSON object is missing")
    found: dict[str, Any] = json.loads(message[start : end + 1])
    return found
