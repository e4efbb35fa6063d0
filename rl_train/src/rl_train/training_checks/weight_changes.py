"""Checks that optimizer steps change the weights, and that ranks with the same shard have the same weights."""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.errors import BrokenPromiseError
from rl_core.interfaces.trainable import TrainableInterface, WeightSample
from rl_train.weight_sync.sent_weights import STEPS

CERTAIN = 1e-6
"""Learning rate times gradient norm (at most 1) from which a step changes some float32 weight."""
LEAST = 1e-9
"""Smaller steps may change no weight at all."""


def is_expected_to_change(grad_norm: float, lr: float) -> bool:
    """Whether some of the following steps of this size must change a weight."""
    return lr * min(grad_norm, 1.0) >= LEAST


def is_certain_to_change(grad_norm: float, lr: float) -> bool:
    """Whether a step of this size changes some float32 weight."""
    return lr * min(grad_norm, 1.0) >= CERTAIN


class WeightChanges:
    """Compares the weights of a model before and after each call of `train`.

    Args:
        model: the model.
        label: its name in errors.
    """

    def __init__(self, model: TrainableInterface, label: str) -> None:
        self._model, self._label = model, label
        self._before: Sequence[WeightSample] | None = None
        self._unchanged = 0

    def before_training(self) -> None:
        """Sample the weights before the first step."""
        if self._before is None:
            self._before = self._samples()

    def check(self, step: int, *, grad_norm: float, lr: float, taken: int) -> None:
        """Sample the weights after `taken` optimizer steps and compare.

        Raises:
            BrokenPromiseError: a step with a gradient changed nothing, or ranks with the same shard differ.
        """
        before, self._before = self._before, self._samples()
        check_equal_ranks(self._before, f"After step {step}", self._label)
        if not before or not is_expected_to_change(grad_norm, lr):
            return
        if [each.digest for each in before] != [each.digest for each in self._before]:
            self._unchanged = 0
            return
        self._unchanged += taken
        if self._unchanged >= STEPS or (is_certain_to_change(grad_norm, lr) and all(each.exact for each in self._before)):
            raise BrokenPromiseError(
                f"Step {step}: {self._label} reports {self._unchanged} optimizer step(s), the last one with learning rate "
                f"{lr:g} and gradient norm {grad_norm:g}, but no element of a fixed sample of its weights has changed. `train` "
                "must take the optimizer steps that it reports. Check that its optimizer has the parameters of the model that "
                "it trains, and that it steps."
            )

    def _samples(self) -> Sequence[WeightSample]:
        return self._model.weight_samples() if isinstance(self._model, TrainableInterface) else ()


def check_equal_ranks(samples: Sequence[WeightSample], when: str, label: str) -> None:
    """Compare the ranks that hold the same shard.

    Raises:
        BrokenPromiseError: two of them differ.
    """
    first: dict[str, WeightSample] = {}
    for sample in samples:
        other = first.setdefault(sample.shard, sample)
        if other.digest != sample.digest:
            shard = f" ({sample.shard})" if sample.shard else ""
            raise BrokenPromiseError(
                f"{when}, the weights of {label} differ between rank {other.rank} and rank {sample.rank}, which hold the same "
                f"weights{shard}. Each rank must step with the sum of the gradients of all data-parallel ranks. Check that its "
                "ranks exchange gradients. This step is not saved."
            )
