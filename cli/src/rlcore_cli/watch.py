"""`rlcore watch`: serves a live page of a run on loopback, for reading only. It is rendered again when the run has new data."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_core.errors import DataError, UserError
from rl_train.metrics.jsonl import METRICS, TIMELINE
from rl_train.metrics.progress import PROGRESS
from rl_train.run_folders.run_names import RUNS, completed_runs, existing_run_path, newest_run
from rlcore_cli.report.page import Ending, Live, ending_of, render_live, security_policy
from rlcore_cli.report.rollouts import rollouts_of_step
from rlcore_cli.report.run_folder import CONFIG, STATUS, RunFolder, RunFolderReader, read_run_folder, stamp_of


def watch(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            help="A run folder, or its name in runs; by default the newest in runs.",
            show_default=False,
            autocompletion=completed_runs,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")] = 0,
) -> None:
    """Show a live page of a run in a browser: progress, curves, rollouts, log.

    The page is served to this machine only, and changes nothing. Without RUN, it shows the run that started last, also if that
    run starts later. Ctrl-C ends the command.

    Example:
        rlcore watch
        rlcore watch grpo_addition --port 8000
    """
    if run is not None:
        run = existing_run_path(run)
        read_run_folder(run)
    waiting = f"There is no run in {RUNS.resolve()} yet. This page shows the first one that starts."
    page = LivePage((lambda: newest_run(RUNS)) if run is None else (lambda: run), waiting=waiting)
    with WatchServer(page, port=port) as server, suppress(KeyboardInterrupt):
        print(f"{run or newest_run(RUNS) or RUNS}: {server.url} (Ctrl-C ends)", flush=True)
        server.serve_forever()


EVERY_S = 2.0
"""Interval at which a page asks for changes, in seconds."""
LOG = Path("logs", "driver.log")
LOG_BYTES = 32 * 2**10
"""How much of the end of the log is shown."""
ROLLOUT_BYTES = 2 * 2**20
"""Maximum size of the rollouts of a step."""
_CHANGING = (METRICS, TIMELINE, STATUS, CONFIG)
"""Files whose changes change the charts."""
Stamp = tuple[tuple[int, int, int] | None, ...]


class LivePage:
    """The page of a run and its state. Its methods may be called from several threads.

    Args:
        find: Returns the run folder, which may be another one in each call; None if there is none yet.
        waiting: What the page shows as long as there is none.
    """

    def __init__(self, find: Callable[[], Path | None], *, waiting: str) -> None:
        self._find, self._lock = find, threading.Lock()
        self._nothing = Ending(state="waiting", sentence=waiting, is_over=False)
        self._path: Path | None = None
        self._reader: RunFolderReader | None = None
        self._stamp: Stamp = ()
        self._version = 0
        self._page: tuple[int, bytes] = (-1, b"")
        self._run = RunFolder(path=Path(), metrics={})
        self._ending = self._nothing

    def page(self) -> bytes:
        """The page as HTML."""
        with self._lock:
            self._update()
            if self._page[0] != self._version:
                live = Live(run=str(self._path or ""), version=str(self._version), every_s=EVERY_S)
                self._page = (self._version, render_live(self._run, self._ending, live).encode())
            return self._page[1]

    def state(self) -> bytes:
        """The status of the run, its progress and the end of its log as JSON."""
        with self._lock:
            self._update()
            alive = self._path is not None and not self._ending.is_over
            return json.dumps(
                {
                    "run": str(self._path or ""),
                    "version": str(self._version),
                    "state": self._ending.state,
                    "sentence": f"{self._ending.sentence} {self._ending.times}".strip(),
                    "progress": _text(self._path / PROGRESS) if self._path is not None and alive else "",
                    "log": (_text(self._path / LOG) if self._path is not None else "") or "Nothing logged.",
                }
            ).encode()

    def rollouts(self, step: int) -> bytes | None:
        """The first rollouts of a step as JSON; None if it has none.

        Raises:
            DataError: The file of the step is corrupt.
        """
        with self._lock:
            self._update()
            if step not in self._run.rollouts or not self._run.rollouts[step].is_file():
                return None
            return rollouts_of_step(self._run, step, budget_bytes=ROLLOUT_BYTES).encode()

    def _update(self) -> None:
        """Read what is new. If the folder was deleted or a file is corrupt, the last contents stay, with a message."""
        path = self._find()
        if path is None and self._path is None:
            return
        if path is not None and path != self._path:
            self._path, self._reader = path, None
        assert self._path is not None
        stamp = tuple(stamp_of(self._path / name) for name in _CHANGING)
        run = self._run
        try:
            if self._reader is None or stamp != self._stamp:
                self._reader = self._reader or RunFolderReader(self._path)
                run = self._reader.read()
            ending = ending_of(run)
        except (DataError, UserError, FileNotFoundError) as error:
            gone = not self._path.is_dir()
            sentence = f"The run folder {self._path} does not exist any more." if gone else str(error)
            self._reader, ending = None, Ending(state="unreadable", sentence=sentence)
        if run is not self._run or ending != self._ending:
            self._version += 1
        self._run, self._ending, self._stamp = run, ending, stamp


def _text(path: Path) -> str:
    """The last complete lines of a text file; '' if it does not exist."""
    try:
        with path.open("rb") as file:
            skipped = file.seek(0, 2) - LOG_BYTES
            file.seek(max(skipped, 0))
            content = file.read()
    except FileNotFoundError:
        return ""
    if skipped > 0:
        content = content.partition(b"\n")[2]
    return content.decode(errors="replace")


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
