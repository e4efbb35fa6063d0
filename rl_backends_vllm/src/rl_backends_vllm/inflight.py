"""Requests in progress in one engine: submitted, collected once each, and cancelled."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rl_backends_vllm.engine import Engine, FailedRequest
from rl_backends_vllm.requests import completion_of, completion_so_far, row_error
from rl_core.data.generation_io import Completion, Prompt
from rl_core.errors import DataError, RLCoreError

_WAIT_S = 1.0
_PAUSED_WAIT_S = 0.01
"""How long `collect` waits while a refit has paused the engine; the next refit call must wait for it."""


class InFlightRequests:
    """Rows submitted to the engine and not collected yet.

    Args:
        engine: processes the rows.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rows: dict[str, _Row] = {}
        self._by_request: dict[str, str] = {}
        self._requests = itertools.count()
        self._completed = 0, 0
        """Number of rows and of their tokens that the latest call of `complete` has collected."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, name: str, prompt: Prompt, parameters: Any) -> None:
        """Submit a row.

        Args:
            name: unique among the rows in progress.
            prompt: its tokens and images.
            parameters: `vllm.SamplingParams`.
        """
        # The output of an aborted request may still arrive, so each has its own ID.
        request = f"{name}#{next(self._requests)}"
        self._by_request[request], self._rows[name] = name, _Row(prompt.tokens, parameters)
        try:
            self._engine.add(request, prompt.tokens, parameters, prompt.images)
        except BaseException as error:
            del self._by_request[request], self._rows[name]
            raise row_error(error) or error from error.__cause__

    def collect(self, wait_s: float, *, only: Collection[str] | None = None) -> dict[str, Completion | RLCoreError]:
        """Finished rows or their errors by name, in order of completion. Each is returned once; rows not in `only` are kept.

        Args:
            wait_s: maximum time to wait for the first finished row.
            only: names to collect; all by default.
        """
        if self._engine.is_paused:
            wait_s = min(wait_s, _PAUSED_WAIT_S)
            time.sleep(wait_s)
        until = time.monotonic() + wait_s
        while True:
            for output in self._engine.finished(max(until - time.monotonic(), 0.0)):
                self._record(output)
            wanted = [name for name in self._rows if only is None or name in only]
            ready = {name: done for name in wanted if (done := self._rows[name].done) is not None}
            if ready or not wanted or self._engine.is_paused or time.monotonic() >= until:
                break
        for name in ready:
            del self._rows[name]
        return ready

    def complete(self, rows: Mapping[str, tuple[Prompt, Any]]) -> list[Completion]:
        """Submit rows, as prompt and parameters by name, and wait for them; if one fails, cancel all and raise its error."""
        done: dict[str, Completion] = {}
        self._completed = 0, 0
        try:
            for name, (prompt, parameters) in rows.items():
                self.add(name, prompt, parameters)
            while len(done) < len(rows):
                for name, row in self.collect(_WAIT_S, only=rows.keys()).items():
                    if isinstance(row, RLCoreError):
                        raise row
                    done[name] = row
                    self._completed = len(done), self._completed[1] + len(row.tokens)
        except BaseException:
            self.cancel(list(rows))
            raise
        return [done[name] for name in rows]

    def batch_progress(self) -> tuple[int, int]:
        """Number of rows that `complete` has collected, and of all tokens sampled so far; read in other threads."""
        rows, tokens = self._completed
        return rows, tokens + self._engine.tokens_in_progress()

    def unfinished(self, weight_version: int) -> dict[str, Completion]:
        """Rows that stream and have tokens that were not returned yet, with all their tokens, marked with `weight_version`."""
        completions: dict[str, Completion] = {}
        for name, row in self._rows.items():
            if row.latest is not None and row.done is None:
                so_far = completion_so_far(row.latest, prompt=row.tokens, weight_version=weight_version)
                if len(so_far.tokens) > row.streamed:
                    row.streamed, completions[name] = len(so_far.tokens), so_far
        return completions

    def cancel(self, names: Sequence[str]) -> None:
        """Cancel rows; unknown and collected ones are skipped."""
        known = {name for name in names if self._rows.pop(name, None) is not None}
        self._abort(known)

    def clear(self) -> None:
        """Cancel all rows."""
        self.cancel(list(self._rows))

    def _abort(self, names: Collection[str]) -> None:
        requests = [request for request, name in self._by_request.items() if name in names]
        for request in requests:
            del self._by_request[request]
        if requests:
            self._engine.abort(requests)

    def _record(self, output: Any) -> None:
        if not isinstance(output, FailedRequest) and not output.finished:
            if (name := self._by_request.get(output.request_id)) is not None:
                self._rows[name].latest = output
            return
        name = self._by_request.pop(output.request_id, None)
        if name is None:
            return
        self._rows[name] = row = self._rows.pop(name)  # keeps the order of completion
        if isinstance(output, FailedRequest):
            failure = RLCoreError(f"vLLM failed on this row: {type(output.error).__name__}: {output.error}")
            row.done = row_error(output.error) or failure
            return
        try:
            row.done = completion_of(output, prompt=row.tokens)
        except RLCoreError as error:
            row.done = error
            if row.parameters.structured_outputs is not None and output.outputs[0].finish_reason == "error":
                row.done = DataError(
                    "vLLM could not compile the JSON schema of the row, or the tokenizer cannot write JSON. vLLM's log has the "
                    "reason."
                )


class _Row:
    """A submitted row."""

    def __init__(self, tokens: list[int], parameters: Any) -> None:
        self.tokens, self.parameters = tokens, parameters
        self.done: Completion | RLCoreError | None = None
        self.latest: Any = None
        """Newest unfinished output, if the row streams."""
        self.streamed = 0
        """Number of tokens that `unfinished` has returned."""
