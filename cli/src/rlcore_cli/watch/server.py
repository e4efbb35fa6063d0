"""Serves the page of a run on loopback, for reading only."""

from __future__ import annotations

import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rl_core.errors import DataError, UserError
from rlcore_cli.report.page import security_policy
from rlcore_cli.watch.live_page import LivePage

HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Host names of requests. A page of another site that resolves its own name to this machine sends that name (DNS rebinding)."""
_IDLE_S = 60.0
"""Seconds without a request after which a connection is closed."""


class WatchServer(ThreadingHTTPServer):
    """A server for one page.

    Args:
        page: The page.
        port: The port; 0 chooses a free one.

    Raises:
        UserError: The port cannot be used.
    """

    daemon_threads = True

    def __init__(self, page: LivePage, *, port: int) -> None:
        self.page, self.policy = page, security_policy()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise UserError(f"--port {port} cannot be used: {error.strerror}. Choose another, or 0 for a free one.") from error

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error, except if the browser closed its connection."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def do_GET(self) -> None:
        if self.headers.get("Host", "").rpartition(":")[0] not in _NAMES and self.headers.get("Host") not in _NAMES:
            self._send(HTTPStatus.FORBIDDEN, b"Requests must name localhost in their Host header.\n")
            return
        route, _, step = self.path[1:].partition("/")
        if self.path == "/":
            self._send(HTTPStatus.OK, self.server.page.page(), "text/html; charset=utf-8")
        elif self.path == "/state":
            self._send(HTTPStatus.OK, self.server.page.state(), "application/json")
        elif route == "rollouts" and step.isascii() and step.isdecimal() and len(step) < 16:
            self._send_rollouts(int(step))
        else:
            self._send(HTTPStatus.NOT_FOUND, b"There is no such page.\n")

    def _send_rollouts(self, step: int) -> None:
        try:
            content = self.server.page.rollouts(step)
        except DataError as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n".encode())
            return
        if content is None:
            self._send(HTTPStatus.NOT_FOUND, b"The run folder has no rollouts of this step.\n")
        else:
            self._send(HTTPStatus.OK, content, "application/json")

    def version_string(self) -> str:
        return "rlcore"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing: a page sends a request every few seconds."""

    def _send(self, status: HTTPStatus, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": self.server.policy,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
