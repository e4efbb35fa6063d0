"""Endpoints that replace the weights of the served engine: `/pause`, `/weights/...`, `/resume`.

They exist only if the server was started with `--allow-weight-updates DIR`, and require the admin key. Weights are safetensors
files in DIR; requests contain only their names. The caller verifies them by the fingerprint of the engine's tensors.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Header
from pydantic import BaseModel, ConfigDict, Field
from starlette.middleware import Middleware

from rl_core.errors import RLCoreError, WeightSyncError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.weights.disk import resolve_below
from rl_serve.engine import EngineThread
from rl_serve.errors import ApiError
from rl_serve.pausing import Pause, PauseGate

ADMIN_HEADER = "X-Rlcore-Admin-Key"
PATHS = ("/pause", "/resume", "/weights/prepare", "/weights/update", "/weights/version", "/weights/fingerprint")
_log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class PauseRequest(BaseModel):
    """Body of `/pause`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """How long to wait for running requests, in seconds."""


class PrepareRequest(BaseModel):
    """Body of `/weights/prepare`."""

    model_config = ConfigDict(extra="forbid")

    weights: dict[str, tuple[list[Annotated[int, Field(ge=0)]], str]]
    """Name to shape and dtype of every weight of the update."""


class UpdateRequest(BaseModel):
    """Body of `/weights/update`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    file: str = Field(min_length=1, max_length=4096)
    """Path of a safetensors file, relative to the folder of the server."""
    refit: str = Field(min_length=1, max_length=200)
    """Name of the update; equal for all of its files."""
    weight_version: int = Field(ge=0)
    """Number of optimizer steps behind the weights."""


@dataclass
class WeightUpdates:
    """The handlers.

    Attributes:
        generation: the engine.
        engine: the thread in which it samples.
        folder: folder of the files, without symbolic links.
        admin_key: the key that requests need.
        pause: whether sampling is paused.
    """

    generation: GenerationInterface
    engine: EngineThread
    folder: Path
    admin_key: str = field(repr=False)
    pause: Pause = field(default_factory=Pause)
    _is_prepared: bool = False
    _has_begun: bool = False
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    def check_key(self, key: Annotated[str | None, Header(alias=ADMIN_HEADER)] = None) -> None:
        """Refuse a request without the admin key."""
        if not hmac.compare_digest((key or "").encode(), self.admin_key.encode()):
            raise ApiError(403, f"The admin key is required: send the header `{ADMIN_HEADER}`.", code="invalid_admin_key")

    async def start_pause(self, body: PauseRequest) -> dict[str, bool]:
        """Finish running requests and refuse new ones until `/resume`."""
        await self.pause.start(timeout_s=body.timeout_s)
        return {"paused": True}

    async def prepare(self, body: PrepareRequest) -> dict[str, Any]:
        """Begin an update: compare names and shapes with the engine's. Returns the dtype that it stores each weight in."""
        manifest = {name: (tuple(shape), dtype) for name, (shape, dtype) in body.weights.items()}
        dtypes = await self._call(self.generation.prepare_refit_info, manifest, while_paused=True)
        self._is_prepared = True
        return {"dtypes": {} if dtypes is None else dict(dtypes)}

    async def update(self, body: UpdateRequest) -> dict[str, int]:
        """Load one weights file. The version is the update's once every weight has arrived, and -1 until then."""
        try:
            file = resolve_below(self.folder, body.file)
        except WeightSyncError as error:
            raise ApiError(400, str(error), param="file") from error
        handles = {
            "kind": "disk",
            "file": str(file),
            "refit": body.refit,
            "weight_version": body.weight_version,
        }

        def load() -> None:
            self._has_begun = True
            self.generation.update_weights(handles)

        await self._call(load, while_paused=True)
        found = await self.version()
        if found["weight_version"] >= 0:
            self._is_prepared = False
        return found

    async def version(self) -> dict[str, int]:
        """Number of optimizer steps behind the weights; -1 before the first update and during an update."""
        return {"weight_version": await self._call(lambda: self.generation.weight_version)}

    async def fingerprint(self) -> dict[str, Any]:
        """Digest of the engine's weights, and the digest of each."""
        return {
            "fingerprint": await self._call(self.generation.weight_fingerprint),
            "digests": await self._call(self.generation.weight_digests),
        }

    async def resume(self) -> dict[str, bool]:
        """Drop cached prefixes and accept requests, unless the weights are incomplete."""
        # A prepared engine samples only after the update, although its version does not change before the first file.
        if self._is_prepared or (self._has_begun and (await self.version())["weight_version"] < 0):
            raise ApiError(
                409,
                "The weights are incomplete. Repeat the update, beginning with /weights/prepare.",
                code="incomplete_weights",
            )
        is_empty = await self._call(self.generation.invalidate_kv_cache)
        self.pause.end()
        return {"cache_is_empty": is_empty}

    async def _call(self, function: Callable[..., ResultT], *arguments: Any, while_paused: bool = False) -> ResultT:
        async with self._one_at_a_time:
            if while_paused and not self.pause.is_active:
                raise ApiError(409, "Weights can only be updated in a pause: send /pause first.", code="not_paused")
            try:
                return await self.engine.call(function, *arguments)
            except RLCoreError as error:
                _log.warning("a weight update failed: %s", error)
                raise ApiError(409, str(error), code=type(error).__name__) from error


def add_weight_updates(app: FastAPI, updates: WeightUpdates) -> None:
    """Add the endpoints to an application that has not been started."""
    secured = [Depends(updates.check_key)]
    handlers: tuple[Callable[..., Any], ...] = (
        updates.start_pause,
        updates.resume,
        updates.prepare,
        updates.update,
        updates.version,
        updates.fingerprint,
    )
    for path, handler in zip(PATHS, handlers, strict=True):
        app.post(path, dependencies=secured)(handler)
    # After the checks of the API key: only accepted requests delay a pause.
    app.user_middleware.append(Middleware(PauseGate, pause=updates.pause, open_paths=PATHS))
