"""The socket, the API keys and the HTTP server of `rlcore serve`."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rl_core.errors import ConfigError
from rl_serve.sampling import MAX_HEADER_BYTES

API_KEYS = "RLCORE_SERVE_API_KEYS"
"""Environment variable with the accepted keys, separated by commas."""
_DRAIN_S = 30
"""Seconds that running requests may take after SIGTERM."""
KEEP_ALIVE_S = 65
"""Seconds that idle connections stay open. Longer than clients keep them, so that no client uses one that is being closed."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the server listens, and who may use it."""

    host: str
    port: int
    api_keys: Sequence[str] = field(repr=False)

    @classmethod
    def of(cls, host: str, port: int) -> Address:
        """The address, with the API keys of the environment.

        Raises:
            ConfigError: other machines can reach the address, and there are no keys.
        """
        keys = [key.strip() for key in os.environ.get(API_KEYS, "").split(",") if key.strip()]
        if not keys and not is_loopback(host):
            raise ConfigError(
                f"--host {host} is reachable from other machines, so API keys are required. Set {API_KEYS}, or listen on "
                "127.0.0.1."
            )
        return cls(host=host, port=port, api_keys=keys)

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Exit with code 143 on SIGTERM while the block runs, so that what it has started is shut down.

    A second SIGTERM ends the process at once. The HTTP server handles the signal while it runs, and passes it on when its
    requests have finished.
    """
    is_stopped = False

    def stop(*_: object) -> None:
        nonlocal is_stopped
        is_stopped = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise KeyboardInterrupt  # unlike SystemExit, not taken for an error of a model that is loaded in this process

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException:  # libraries convert the interruption to other errors
        if is_stopped:
            sys.exit(128 + signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def listening(address: Address) -> Iterator[socket.socket]:
    """A bound socket, closed at the end.

    Raises:
        ConfigError: the address cannot be used.
    """
    host, port = address.host, address.port
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(f"--host {host} --port {port} cannot be used: {error.strerror}. Choose another port.") from error
        yield listener


def run_server(app: Any, listener: socket.socket, address: Address, *, name: str) -> None:
    """Serve an application until SIGTERM or Ctrl-C; running requests then have 30 seconds to finish.

    Args:
        app: the ASGI application.
        listener: the socket.
        address: its address, for the message.
        name: what is served, for the message.
    """
    config = server_config(app)
    found = Address(host=address.host, port=listener.getsockname()[1], api_keys=())
    _Server(config, f"serving {name} on {found.url}/v1").run(sockets=[listener])


class _Server(uvicorn.Server):
    """Prints a message once it accepts connections and handles signals: either may follow as soon as the message is read."""

    def __init__(self, config: uvicorn.Config, message: str) -> None:
        super().__init__(config)
        self._message = message

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._message, flush=True)


def server_config(app: Any, *, drain_s: int = _DRAIN_S) -> uvicorn.Config:
    """The settings of an HTTP server with limits on headers and idle connections.

    Args:
        app: the ASGI application.
        drain_s: seconds that running requests may take after the end.
    """
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=drain_s,
        timeout_keep_alive=KEEP_ALIVE_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        http=TimedHttp,
        ws="none",
    )


class TimedHttp(H11Protocol):
    """HTTP connections that are closed if a request's headers do not arrive in time; uvicorn waits for them without a limit."""

    headers_timeout_s = 30.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._timer: asyncio.TimerHandle | None = None
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._wait_for_headers()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.headers_timeout_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        self.transport.close()


def is_loopback(host: str) -> bool:
    """Whether a name or an address is that of this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
