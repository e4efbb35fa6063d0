"""Endpoints that replace the weights of the served engine: `/pause`, `/weights/...`, `/resume`.

They exist only if the server was started with `--allow-weight-updates DIR`, and require the admin key. Weights are safetensors
files in DIR; requests contain only their names. The caller verifies them by the fingerprint of the engine's tensors.

If the caller exits, the lease of its pause expires. The server then samples again, unless some tensors of an update have
arrived and others have not: it stays paused until a complete update.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Header
from pydantic import BaseModel, ConfigDict, Field
from starlette.middleware import Middleware

from rl_core.data.hub import model_source
from rl_core.dispatch.worker_facade import local_device
from rl_core.errors import ConfigError, RLCoreError, WeightSyncError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.weights.disk import refuse_non_finite_file, resolve_below
from rl_serve.engine import EngineThread
from rl_serve.errors import ApiError
from rl_serve.pausing import EngineState, Pause, PauseMiddleware
from rl_serve.served_model import is_run

ADMIN_HEADER = "X-Rlcore-Admin-Key"
ADMIN_KEY = "RLCORE_SERVE_ADMIN_KEY"
"""Environment variable with the admin key."""
FOLDER = "RLCORE_WEIGHT_UPDATES_DIR"
"""Environment variable with the folder from which the worker extension loads weights."""
EXTENSION = "rl_backends_vllm.refit.ServerWeights"
_ON_A_CPU = ("--enforce-eager", "--kv-cache-memory-bytes", str(2**30), "--no-enable-chunked-prefill")
"""Compiling takes a minute there, vLLM would take most of the memory, and rows with seeds need whole prompts."""
PATHS = ("/pause", "/pause/renew", "/resume", "/weights/prepare", "/weights/update", "/weights/version", "/weights/fingerprint")
_INTERRUPTED = (
    "An update was interrupted, so the weights are incomplete. Send a complete update, beginning with /pause, or restart the "
    "server."
)
_log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class PauseRequest(BaseModel):
    """Body of `/pause`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """How long to wait for running requests, in seconds."""
    lease_s: float = Field(default=60.0, gt=0, le=86_400)
    """Time in seconds after which the pause expires, unless it is renewed."""


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
    """Whether an update was prepared and has not completed."""
    _is_mixed: bool = False
    """Whether some tensors of an update have arrived, but not all."""
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start_pause(self, body: PauseRequest) -> dict[str, Any]:
        """Finish running requests and refuse new ones until `/resume`, or until the lease expires."""
        await self.pause.start(timeout_s=body.timeout_s, lease_s=body.lease_s)
        return {"paused": True, "lease_s": body.lease_s}

    async def renew(self) -> dict[str, bool]:
        """Begin the lease of the pause again."""
        if not (self.pause.is_active and self._one_at_a_time.locked()):  # else a call has used up the lease
            self._require_pause()
        self.pause.renew()
        return {"paused": True}

    async def prepare(self, body: PrepareRequest) -> dict[str, Any]:
        """Begin an update, which replaces an unfinished one: compare names and shapes with the engine's.

        Returns the dtype that it stores each weight in.
        """
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
            refuse_non_finite_file(file)
            self._is_mixed = True
            try:
                self.generation.update_weights(handles)
            except RLCoreError:
                self._is_mixed = not self._is_complete()
                raise

        await self._call(load, while_paused=True)
        found = await self.version()
        if found["weight_version"] >= 0:
            self._is_prepared = self._is_mixed = False
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
        """Drop cached prefixes and accept requests, unless the weights are incomplete; discards an update without tensors."""
        if self._is_mixed:
            raise ApiError(
                409,
                "The weights are incomplete. Repeat the update, beginning with /weights/prepare.",
                code="incomplete_weights",
            )
        is_empty = await self._call(self.generation.invalidate_kv_cache)
        self._is_prepared = False
        self.pause.end()
        return {"cache_is_empty": is_empty}

    async def end_expired(self) -> None:
        """End a pause whose lease has expired, unless the weights are incomplete; called before each request is refused.

        Raises:
            ApiError: the weights are incomplete, or the engine failed.
        """
        # During a call, its client still waits for the response.
        if not self.pause.is_expired or self._one_at_a_time.locked():
            return
        if self._is_mixed:
            raise ApiError(503, _INTERRUPTED, code="unhealthy")
        async with self._one_at_a_time:
            try:
                await self._run(self.generation.invalidate_kv_cache)
            except ApiError as error:
                raise ApiError(503, error.message, code="unhealthy") from error
            if self.pause.is_expired:
                _log.warning("a pause was not renewed and has ended: the server samples again with weights of one version")
                self._is_prepared = False
                self.pause.end()

    async def state(self) -> EngineState | None:
        """What `/health` reports about the updates; None if requests are accepted."""
        try:
            await self.end_expired()
        except ApiError as error:
            return EngineState(status="unhealthy", reason=error.message)
        if not self.pause.is_active:
            return None
        if self._is_prepared or self._is_mixed:
            return EngineState(status="updating", reason="The weights are being updated.")
        return EngineState(status="paused", reason="The server is paused for an update of its weights.")

    def _is_complete(self) -> bool:
        """Whether the engine's weights are of one version, after it has refused a file."""
        try:
            self.generation.weight_fingerprint()
        except RLCoreError:
            return False
        return True

    def _require_pause(self) -> None:
        if not self.pause.is_held:
            expired = " The pause was not renewed in time, and has expired." if self.pause.is_expired else ""
            raise ApiError(409, f"Weights can only be updated in a pause: send /pause first.{expired}", code="not_paused")

    async def _call(self, function: Callable[..., ResultT], *arguments: Any, while_paused: bool = False) -> ResultT:
        async with self._one_at_a_time:
            if not while_paused:
                return await self._run(function, *arguments)
            self._require_pause()
            try:
                return await self._run(function, *arguments)
            finally:
                self.pause.renew()

    async def _run(self, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        try:
            return await self.engine.call(function, *arguments)
        except RLCoreError as error:
            _log.warning("a weight update failed: %s", error)
            raise ApiError(409, str(error), code=type(error).__name__) from error


def admin_check(admin_key: str) -> Callable[..., None]:
    """A dependency that refuses requests without the admin key."""

    def check(key: Annotated[str | None, Header(alias=ADMIN_HEADER)] = None) -> None:
        if not hmac.compare_digest((key or "").encode(), admin_key.encode()):
            raise ApiError(403, f"The admin key is required: send the header `{ADMIN_HEADER}`.", code="invalid_admin_key")

    return check


def add_weight_updates(app: FastAPI, updates: WeightUpdates) -> None:
    """Add the endpoints to an application that has not been started."""
    secured = [Depends(admin_check(updates.admin_key))]
    handlers: tuple[Callable[..., Any], ...] = (
        updates.start_pause,
        updates.renew,
        updates.resume,
        updates.prepare,
        updates.update,
        updates.version,
        updates.fingerprint,
    )
    for path, handler in zip(PATHS, handlers, strict=True):
        app.post(path, dependencies=secured)(handler)
    # After the checks of the API key: only accepted requests delay a pause.
    gate = Middleware(PauseMiddleware, pause=updates.pause, end_expired=updates.end_expired, open_paths=PATHS)
    app.user_middleware.append(gate)


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """Weight updates that the server accepts."""

    folder: Path
    """Folder of the weights, without symbolic links."""
    admin_key: str = field(repr=False)
    """Key that updates require; empty for vLLM's own server, which checks none."""


def admin_key_of_environment() -> str | None:
    """The admin key; None if there is none."""
    return os.environ.get(ADMIN_KEY, "").strip() or None


def read_update_options(target: str, folder: Path | None, *, is_for_vllm: bool = False) -> UpdateOptions | None:
    """Check `--allow-weight-updates`; None without it.

    Raises:
        ConfigError: the folder does not exist, there is no admin key although this is not for vLLM's own server, or a run is
            served.
    """
    if folder is None:
        if is_for_vllm:
            raise ConfigError("--print-vllm-command requires --allow-weight-updates DIR, the folder of the weights.")
        return None
    if is_run(Path(target)):
        raise ConfigError(
            f"--allow-weight-updates: {target} is a run, which is served with the weights of its checkpoint. Convert the "
            "checkpoint (rlcore convert) and serve the model."
        )
    if not folder.is_dir():
        raise ConfigError(f"--allow-weight-updates {folder}: this folder does not exist. Create it first.")
    key = admin_key_of_environment()
    if key is None and not is_for_vllm:
        raise ConfigError(f"--allow-weight-updates requires an admin key: set the environment variable {ADMIN_KEY}.")
    return UpdateOptions(folder=folder.resolve(), admin_key=key or "")


def vllm_command(
    model: str,
    *,
    updates: UpdateOptions | None,
    name: str | None,
    host: str,
    port: int,
    refused: Mapping[str, object],
    device: str | None = None,
) -> str:
    """The shell command, in one line.

    Args:
        model: name or folder of the model.
        updates: the folder of the weights.
        name: name of the model in the API; by default the last component of `model`.
        host: address to listen on.
        port: port to listen on.
        refused: options of our own server with their values.
        device: "cpu" or "cuda"; by default that of this machine.

    Raises:
        ConfigError: options of our own server were given, or others could replace the weights.
    """
    assert updates is not None
    for option, value in refused.items():
        if value:
            raise ConfigError(f"--print-vllm-command: {option} has no effect on vLLM's own server. Remove it.")
    if host not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(
            f"--print-vllm-command with --host {host}: vLLM's routes for weight updates check no key, so it must listen "
            "on 127.0.0.1. Reach it from other machines through a tunnel."
        )
    variables = {"VLLM_SERVER_DEV_MODE": "1", FOLDER: str(updates.folder)}
    source, revision = model_source(model)
    arguments = {
        "--model": source,
        **({"--revision": revision, "--tokenizer-revision": revision} if revision is not None else {}),
        "--served-model-name": name or Path(model).name,
        "--host": host,
        "--port": str(port),
        "--logprobs-mode": "processed_logprobs",
        # Otherwise, the model's top-p, top-k and penalties apply to requests that do not set them.
        "--generation-config": "vllm",
        "--worker-extension-cls": EXTENSION,
    }
    words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--enable-scale-out"]
    words += [word for pair in arguments.items() for word in pair]
    words += _ON_A_CPU if (device or local_device()) == "cpu" else ()
    return " ".join([*(f"{key}={shlex.quote(value)}" for key, value in variables.items()), shlex.join(words)])
