"""The device memory that policy, companion models and engine share: at most one of them has its tensors there.

If the engine has its own devices or never sleeps, the policy stays on its devices too.
"""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface


class DeviceMemory:
    """Moves models between devices and host memory, and lets the engine sleep, so that one at a time has its tensors there.

    Only before another one needs the memory: an engine stays awake over several draws of rollouts. On CPUs, the backends have
    nothing to move. Rollouts must not be in progress when the engine's memory is freed.

    Args:
        policy: the model being trained.
        generation: the engine; None if its rollouts continue during training, so that it cannot sleep.
        companions: critic and teacher.
        limited: whether policy and engine take turns on the GPUs that they share.
        both_fit: whether the policy stays on its device at a refit: the engine has its own (`policy.generation.resources`), or
            keeps its memory while the policy trains, so that there is memory for both.
    """

    def __init__(
        self,
        policy: ColocatablePolicyInterface,
        generation: GenerationInterface | None = None,
        *,
        companions: Sequence[ColocatablePolicyInterface] = (),
        limited: bool = False,
        both_fit: bool = False,
    ) -> None:
        self._policy = policy
        self._models = (policy, *companions)
        self._generation = generation
        self._engine_has_it = False
        self._both_fit = both_fit
        self._was_offloaded = bool(companions)  # the policy leaves before they load
        """Whether a companion has used the memory since the policy's weights were there."""
        self.limited = limited
        self.shares_weights = False
        """Whether the engine computes with the policy's own tensors, which then stay on the device while it samples."""

    @property
    def is_with_engine(self) -> bool:
        """Whether the memory is limited, and no model has used it since it was freed for the engine."""
        return self.limited and self._engine_has_it

    def free_for_model(self, model: object) -> None:
        """Let the engine sleep and offload all models but `model`."""
        self._engine_has_it = False
        self._was_offloaded = model is not self._policy
        if self._generation is not None:
            self._generation.finish_generation()
        self._offload(except_for=model)

    def free_for_refit(self, engine: GenerationInterface) -> None:
        """Offload everything but the policy's weights, which are to be sent; the engine wakes as far as it needs to.

        Args:
            engine: the engine to be refitted, or its restarted replicas; other replicas continue their rows.
        """
        self._engine_has_it = False
        if self.limited:
            engine.finish_generation()
        if self._both_fit and not self._was_offloaded:
            return
        self._offload(except_for=self._policy)
        self._policy.offload_before_refit()
        self._was_offloaded = False

    def free_for_engine(self) -> None:
        """Offload all models, unless engine and policy fit together."""
        if self._both_fit:
            return
        self._offload(except_for=self._policy if self.shares_weights else None)
        if self.shares_weights:
            self._policy.offload_before_refit()
        self._engine_has_it = True

    def _offload(self, *, except_for: object) -> None:
        for model in self._models:
            if model is not except_for:
                model.offload_after_refit()
