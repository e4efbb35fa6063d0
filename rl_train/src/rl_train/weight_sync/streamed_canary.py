"""The canary of runs whose rollouts are sampled row by row and continue over refits: its rows are streamed in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_train.weight_sync.canary import Canary, RowStreaming

_MOST_REFITS = 3
"""Number of refits with streamed rows until some of them were in progress when the weights changed."""


class StreamedCanary:
    """Streams the rows of a canary over the first refit that changes the weights.

    Args:
        rows: streams them as rollouts are.
        over_refits: whether rows may be in progress at a refit.
    """

    def __init__(self, rows: RowStreaming, *, over_refits: bool) -> None:
        self._rows, self._over_refits = rows, over_refits
        self._due = _MOST_REFITS

    @contextmanager
    def over_refit(
        self, canary: Canary, policy: ColocatablePolicyInterface, generation: GenerationInterface
    ) -> Iterator[Callable[[], dict[str, float]]]:
        """Stream rows during the block if that is due; the function ends and compares them.

        The function returns `refit/canary_error` in nats per token, or nothing.

        Raises:
            WeightSyncError: the canary failed.
        """
        if not self._due:
            yield dict
            return
        with self._rows(canary.streamed_rows, canary.greedy) as finish:

            def compare() -> dict[str, float]:
                output = finish()
                error = canary.check_streamed(policy, generation, output)
                were_in_progress = bool((output["weight_version"] < output["newest_version"]).any())
                self._due = 0 if were_in_progress or not self._over_refits else self._due - 1
                return {"refit/canary_error": error}

            yield compare

    def sample(self, canary: Canary, generation: GenerationInterface) -> Callable[[ColocatablePolicyInterface], float]:
        """Stream rows now; returns `Canary.check_streamed` for a policy that scores them later."""
        with self._rows(canary.streamed_rows, canary.greedy) as finish:
            output = finish()
        return lambda policy: canary.check_streamed(policy, generation, output)
