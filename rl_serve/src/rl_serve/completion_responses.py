"""Responses of sampled completions, whole or as streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from rl_serve.deltas import Deltas
from rl_serve.engine import SampledRow
from rl_serve.event_streams import DONE, server_sent_event
from rl_serve.responses import usage
from rl_serve.tokenizer_threads import TokenizerThreads


class CompletionResponses:
    """Makes the responses of one model.

    Args:
        model: its name in the API.
        threads: decode completions.
    """

    def __init__(self, model: str, threads: TokenizerThreads) -> None:
        self._model, self._threads = model, threads

    async def whole(self, deltas: Deltas, rows: Mapping[int, SampledRow]) -> dict[str, Any]:
        """The body of a response with all completions."""
        found = await self._threads.run(lambda: [deltas.whole(index, row) for index, row in sorted(rows.items())])
        return deltas.head(self._model, is_stream=False).body(found, usage=usage(deltas.choices.plan, rows))

    async def events(
        self, deltas: Deltas, arrivals: AsyncGenerator[tuple[int, SampledRow], None], *, has_usage: bool
    ) -> AsyncGenerator[str, None]:
        """The events of completions that arrive, each with all of its tokens so far.

        Raises:
            ApiError: as `Deltas.choice` and `arrivals`.
        """
        head = deltas.head(self._model, is_stream=True)
        rows: dict[int, SampledRow] = {}
        async with aclosing(arrivals):
            async for index, row in arrivals:
                rows[index] = row
                # Only the end of a completion is decoded from its first token, so only that is done in a thread.
                new = await self._threads.run(deltas.choice, index, row) if row.is_finished else deltas.choice(index, row)
                if new is not None:
                    yield server_sent_event(head.body([new]))
        if has_usage:
            yield server_sent_event(head.body([], usage=usage(deltas.choices.plan, rows)))
        yield DONE
