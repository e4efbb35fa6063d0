"""Checks that the weights that a policy sends change when it is trained."""

from __future__ import annotations

from rl_core.errors import BrokenPromiseError

STEPS = 20
"""Optimizer steps after which weights that are rounded or hardly trained must have changed."""


class SentWeights:
    """The fingerprint of the weights that were sent last, and the optimizer steps since.

    Attributes:
        label: the policy's name in errors.
    """

    def __init__(self) -> None:
        self.label = "the policy"
        self._fingerprint: str | None = None
        self._steps = 0
        self._certain = False

    def expect_change(self, steps: int, *, certain: bool) -> None:
        """Count optimizer steps with a gradient; `certain` if they are large enough to change some float32 weight."""
        self._steps += steps
        self._certain = self._certain or certain

    def check(self, fingerprint: str, *, version: int, exact: bool) -> None:
        """Compare with the weights that were sent before.

        Args:
            fingerprint: of the weights that were sent now.
            version: their version.
            exact: the engine stores them in float32, so that no step is lost in rounding.

        Raises:
            BrokenPromiseError: they are the same, although the policy was trained.
        """
        same, self._fingerprint = fingerprint == self._fingerprint, fingerprint
        if same and (self._steps >= STEPS or (exact and self._certain)):
            raise BrokenPromiseError(
                f"{self.label} sent the weights of version {version}, but they are the same as before the last {self._steps} "
                "optimizer step(s), which had a gradient and a learning rate above 0. `get_weights_ipc_handles` and "
                "`broadcast_weights_for_collective` must send, and `weight_fingerprint` must digest, the current weights. "
                "Check that the policy does not send a copy, and that it takes the steps that it reports."
            )
        if not same:
            self._steps, self._certain = 0, False
