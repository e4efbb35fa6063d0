"""Sends the policy's weights to a server: names of files in a folder that both sides can access, never the tensors.

`RlcoreUpdates` calls `rlcore serve`, `VllmUpdates` vLLM's server with our worker extension. The server loads each file and
digests its weights; `WeightSynchronizer` compares the digests with the policy's.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rl_backends_openai.config import OpenAIConfig
from rl_backends_openai.server import version_label
from rl_core.backend import file_digest
from rl_core.errors import ConfigError, RLCoreError, WeightSyncError
from rl_core.http import HttpClient, HttpError, RequestLimits

ADMIN_HEADER = "X-Rlcore-Admin-Key"
_RENEWALS = 4
"""Renewals per lease, so that a lost one does not end the pause."""
_log = logging.getLogger(__name__)


class WeightUpdates(ABC):
    """The weight updates of one server. Belongs to one event loop.

    Args:
        config: the section `policy.generation`.
        deadline_s: timeout of one request, in seconds.
    """

    def __init__(self, config: OpenAIConfig, *, deadline_s: float) -> None:
        settings = config.openai_cfg
        assert config.refit_folder is not None
        self._folder = Path(config.refit_folder).expanduser().resolve()
        self.url = settings.root_url
        headers = {ADMIN_HEADER: settings.admin_key} if settings.admin_key is not None else {}

        def client(max_retries: int, timeout_s: float = deadline_s) -> HttpClient:
            limits = RequestLimits(concurrency=4, timeout_s=timeout_s, deadline_s=timeout_s, max_retries=max_retries)
            return HttpClient(base_url=settings.root_url, api_key=settings.api_key, headers=headers, limits=limits)

        self._client = client
        # A file is never sent twice: a server that has loaded it refuses it.
        self._once, self._repeated = client(0), client(settings.max_retries)

    async def prepare(self, manifest: Mapping[str, Any]) -> dict[str, str]:
        """Stop sampling and begin an update; returns the dtype in which the server stores each weight.

        After an error the server samples again for its other clients, unless its weights are incomplete.

        Raises:
            ConfigError: the server does not accept weight updates.
            WeightSyncError: the server could not pause, or expects other weights; names what keeps it paused, if anything does.
        """
        was_paused = await self._is_paused()
        try:
            await self._pause()
            return await self._begin({name: [list(shape), dtype] for name, (shape, dtype) in manifest.items()})
        except RLCoreError as error:
            if reason := await self._end_pause(was_paused=was_paused):
                raise type(error)(f"{error} {reason}") from error
            raise

    @abstractmethod
    async def update(self, handles: Mapping[str, Any]) -> None:
        """Load one weights file."""

    @abstractmethod
    async def version(self) -> int:
        """Weight version of the server; -1 before the first update and during an update."""

    @abstractmethod
    async def digests(self) -> tuple[str, dict[str, str]]:
        """The fingerprint, and the digest of each weight."""

    @abstractmethod
    async def resume(self) -> bool:
        """Drop cached prefixes and sample again; False if the cache could not be emptied."""

    async def _is_paused(self) -> bool:
        """Whether the server was paused by an earlier update; False if it checks by itself that its weights are complete."""
        return False

    @abstractmethod
    async def _pause(self) -> None:
        """Finish running requests and start no further ones."""

    @abstractmethod
    async def _begin(self, weights: Mapping[str, Any]) -> dict[str, str]:
        """Begin an update of weights with these shapes and dtypes; returns the dtype in which each is stored."""

    async def _end_pause(self, *, was_paused: bool) -> str:
        """Resume sampling with the weights from before; returns why the server stays paused, or nothing if it does not."""
        if was_paused:
            return (
                "The server was paused before this update and stays paused, because an interrupted update may have left its "
                "weights incomplete. Send a complete update, or restart the server."
            )
        try:
            await self._post("resume", {})
        except ConfigError:  # it refuses all requests of this client, so it did not pause either
            return ""
        except WeightSyncError as error:
            return f"The server could not be resumed and stays paused. {error}"
        return ""

    async def close(self) -> None:
        """Close the connections."""
        await self._once.close()
        await self._repeated.close()

    def _relative(self, file: str) -> str:
        try:
            return Path(file).resolve().relative_to(self._folder).as_posix()
        except ValueError as error:
            raise WeightSyncError(f"{file} is not in policy.generation.refit_folder ({self._folder}).") from error

    async def _post(self, path: str, body: Mapping[str, Any], *, once: bool = False) -> dict[str, Any]:
        try:
            response = await (self._once if once else self._repeated).post_json(path, body)
        except HttpError as error:
            raise self._explained(error) from error
        if not isinstance(response.body, dict):
            raise WeightSyncError(f"{self.url}/{path} returned {type(response.body).__name__} instead of an object.")
        return response.body

    def _explained(self, error: HttpError) -> Exception:
        if error.status in (401, 403):
            return ConfigError(f"The server refused a weight update: check policy.generation.openai_cfg.admin_key. {error}")
        if error.status in (404, 405):
            return ConfigError(f"The server does not accept weight updates: {self._how_to_start()} {error}")
        return WeightSyncError(f"The server could not update its weights. {error}")

    @abstractmethod
    def _how_to_start(self) -> str: ...


class RlcoreUpdates(WeightUpdates):
    """Weight updates of `rlcore serve --allow-weight-updates DIR`. A task in this event loop renews the lease of the pause."""

    _renewing: asyncio.Task[None] | None = None

    async def _pause(self) -> None:
        lease_s = float((await self._post("pause", {}))["lease_s"])
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew(lease_s / _RENEWALS))

    async def _renew(self, period_s: float) -> None:
        client = self._client(0, period_s)
        try:
            while True:
                await asyncio.sleep(period_s)
                try:
                    await client.post_json("pause/renew", {})
                except HttpError as error:  # an update that is refused because of it names the reason
                    _log.warning("the pause of the server could not be renewed: %s", error)
        finally:
            await client.close()

    async def _stop_renewing(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})

    async def _end_pause(self, *, was_paused: bool) -> str:
        await self._stop_renewing()
        return await super()._end_pause(was_paused=was_paused)

    async def close(self) -> None:
        await self._stop_renewing()
        await super().close()

    async def _begin(self, weights: Mapping[str, Any]) -> dict[str, str]:
        return cast("dict[str, str]", (await self._post("weights/prepare", {"weights": weights}))["dtypes"])

    async def update(self, handles: Mapping[str, Any]) -> None:
        await self._post(
            "weights/update",
            {
                "file": self._relative(handles["file"]),
                "refit": handles["refit"],
                "weight_version": handles["weight_version"],
            },
            once=True,
        )

    async def version(self) -> int:
        return int((await self._post("weights/version", {}))["weight_version"])

    async def digests(self) -> tuple[str, dict[str, str]]:
        response = await self._post("weights/fingerprint", {})
        return response["fingerprint"], response["digests"]

    async def resume(self) -> bool:
        await self._stop_renewing()
        return bool((await self._post("resume", {}))["cache_is_empty"])

    def _how_to_start(self) -> str:
        return f"start it with `rlcore serve MODEL --allow-weight-updates {self._folder}`."


class VllmUpdates(WeightUpdates):
    """Weight updates of vLLM's server with `rl_backends_vllm.refit`."""

    async def _is_paused(self) -> bool:
        try:
            response = await self._repeated.get_json("is_paused")
        except HttpError as error:
            raise self._explained(error) from error
        return isinstance(response.body, dict) and bool(response.body.get("is_paused"))

    async def _pause(self) -> None:
        await self._post("pause?mode=wait", {})

    async def _end_pause(self, *, was_paused: bool) -> str:
        return await super()._end_pause(was_paused=was_paused and not await self._is_complete())

    async def _is_complete(self) -> bool:
        """Whether the server's weights are of one version; vLLM itself would sample with any."""
        try:
            await self._call("rlcore_fingerprint")
        except RLCoreError:
            return False
        return True

    async def _begin(self, weights: Mapping[str, Any]) -> dict[str, str]:
        return cast("dict[str, str]", (await self._call("rlcore_prepare", json.dumps(weights)))["dtypes"])

    async def update(self, handles: Mapping[str, Any]) -> None:
        version = str(handles["weight_version"])
        digest = file_digest(Path(handles["file"]))
        await self._call("rlcore_update", self._relative(handles["file"]), handles["refit"], version, digest, once=True)

    async def version(self) -> int:
        return int((await self._call("rlcore_version"))["weight_version"])

    async def digests(self) -> tuple[str, dict[str, str]]:
        response = await self._call("rlcore_fingerprint")
        return response["fingerprint"], response["digests"]

    async def resume(self) -> bool:
        done = await self._post("reset_prefix_cache", {})
        await self._post("update_weight_version", {"new_version": version_label(await self.version())})
        await self._post("resume", {})
        return bool(done.get("success"))

    async def _call(self, method: str, *arguments: str, once: bool = False) -> dict[str, Any]:
        """The response of the extension in all processes of the server, which must agree."""
        body = {"method": method, "args": list(arguments)}
        answers = (await self._post("collective_rpc", body, once=once))["results"]
        results = [json.loads(answer) if isinstance(answer, str) else answer for answer in answers]
        for one in results:
            if "error" in one:
                raise WeightSyncError(f"{self.url}: {one['error']}")
        if any(one != results[0] for one in results):
            raise WeightSyncError(f"The processes of the server {self.url} have different weights ({method} differs).")
        first: dict[str, Any] = results[0]
        return first

    def _how_to_start(self) -> str:
        return "start it with the command that `rlcore serve MODEL --print-vllm-command` prints."


def updates_of(config: OpenAIConfig, *, deadline_s: float) -> WeightUpdates | None:
    """The weight updates of a config's server; None if it keeps its own weights."""
    kinds: dict[str | None, type[WeightUpdates]] = {"rlcore": RlcoreUpdates, "vllm": VllmUpdates}
    kind = kinds.get(config.openai_cfg.weight_updates)
    return None if kind is None else kind(config, deadline_s=deadline_s)
