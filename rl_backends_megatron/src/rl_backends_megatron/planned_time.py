"""Predicts the time of a rank's passes on this machine's CPUs from the model's config, without weights and without other ranks.

Models of the same shape with one and two layers and random weights run the worker's own code, in process groups whose
collectives do nothing. The difference of the two counts for each of the other layers of a stage. Larger microbatches than those
that are timed are extrapolated by their FLOPs.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import psutil
import torch

from rl_backends_megatron.cpu_shim import cpu_shim
from rl_backends_megatron.model_inputs import Microbatcher
from rl_backends_megatron.optimizer import FrozenModel, TrainableModel
from rl_backends_megatron.parallel import Ranks
from rl_backends_megatron.planned_memory import PolicyMemory, layers_of_stage, lone_rank, without_data
from rl_backends_megatron.scoring import forward, forward_backward, make_head
from rl_core.backend import BatchedDataDict
from rl_core.errors import NotSupportedError

if TYPE_CHECKING:
    from rl_backends_megatron.config import MegatronPolicyConfig

_clock: Final[Callable[[], float]] = time.thread_time
_DEPTHS: Final = (1, 2)
"""Numbers of layers that are timed."""
_FEW: Final = 64
_MANY: Final = 512
"""Maximum numbers of tokens of the two microbatches that are timed."""
_BUDGET_S: Final = 0.2
"""Approximate seconds of the passes over the larger one, which is reduced to it."""
_REPEATS: Final = 3
"""Number of equal passes, of which the fastest counts."""
_MAX_BYTES: Final = 4 * 2**30
"""Maximum memory of a measurement, which also takes at most half of what is available."""
_BYTES_PER_WEIGHT: Final = 20
"""Bytes of a float32 weight, its gradient, a copy and two moments."""


class PolicyTime:
    """The time of one rank of a policy. See `ModelTime` in `rl_train.plan.time_plan`."""

    refit_bytes_per_s = 1.5e8

    def __init__(self, config: MegatronPolicyConfig) -> None:
        self._config, self._memory = config, PolicyMemory(config)

    def seconds(
        self, *, tokens: int, scored: int, length: int, training: bool, ranks: int, microbatches: float
    ) -> dict[str, float]:
        """Seconds of `score`, `train` and `update`; see `ModelTime` in `rl_train.plan.time_plan`.

        Raises:
            NotSupportedError: the model cannot be measured here.
        """
        megatron, hf = self._config.megatron_cfg, self._memory.hf
        if self._memory.is_mixture:
            raise NotSupportedError("how many tokens an expert of a mixture gets depends on the data")
        share, tokens = scored / tokens, -(-tokens // megatron.context_parallel_size)
        with lone_rank(megatron, ranks) as joined, cpu_shim(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS")  # which its workers set
            self._check_memory(joined)
            one, two = (_Model(self._memory, depth, joined, share, training=training) for depth in _DEPTHS)
            few = min(length, tokens, _FEW)
            affordable = int(few * _BUDGET_S / sum(two.fastest(1, few).values()))
            many = max(few, min(tokens, _MANY, max(4 * few, affordable)))
            width = min(length, many)
            shapes = {few: (1, few), many // width * width: (many // width, width)}
            times = [{size: model.fastest(*shape) for size, shape in shapes.items()} for model in (one, two)]
            update = two.update_per_weight() if training else 0.0
        layers, matrices = layers_of_stage(hf.num_hidden_layers, megatron), two.weights - one.weights
        longer = (matrices + length * hf.hidden_size) / (matrices + width * hf.hidden_size)
        stages = megatron.pipeline_model_parallel_size
        seconds = dict[str, float]()
        for kind in times[0][few]:
            whole = {size: times[0][size][kind] for size in shapes}
            layer = {size: max(0.0, times[1][size][kind] - first) for size, first in whole.items()}
            rest = {size: max(0.0, first - layer[size]) for size, first in whole.items()}
            microbatch = layers * _extrapolated(layer, tokens, longer) + _extrapolated(rest, tokens, 1.0)
            seconds[kind] = microbatch * (microbatches + stages - 1) / microbatches  # stages wait while the pipeline fills
        return seconds | ({"update": update * (one.weights + (layers - 1) * matrices)} if training else {})

    def _check_memory(self, ranks: Ranks) -> None:
        with without_data():
            chunks = [self._memory.few_layers(ranks, depth) for depth in _DEPTHS]
        weights = sum(tensor.numel() for each in chunks for tensor in each.tensors())
        if _BYTES_PER_WEIGHT * weights > min(_MAX_BYTES, psutil.virtual_memory().available // 2):
            needed = _BYTES_PER_WEIGHT * weights / 2**30
            raise NotSupportedError(f"a measurement with three layers needs {needed:.1f} GiB, which is too much to try")


class _Model:
    """A model of few layers, and its passes over microbatches.

    Args:
        memory: builds the model.
        depth: number of layers.
        ranks: the groups.
        share: fraction of the tokens that are trained.
        training: whether it is trained.
    """

    def __init__(self, memory: PolicyMemory, depth: int, ranks: Ranks, share: float, *, training: bool) -> None:
        self._share, self._config, self._vocab_size = share, memory.on_one_stage, memory.hf.vocab_size
        chunks = memory.few_layers(ranks, depth)
        [module] = chunks.modules
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
        self.weights = sum(parameter.numel() for parameter in module.parameters())
        unscheduled = self._config.model_copy(update={"scheduler": None})
        self._trainable = TrainableModel(chunks, unscheduled, has_gloo=False) if training else None
        self._models = FrozenModel(chunks).models if self._trainable is None else self._trainable.models
        self._head = make_head(self._config, ranks, vocab_size=self._vocab_size)
        self._microbatcher = Microbatcher(self._config, ranks)

    def fastest(self, rows: int, width: int) -> dict[str, float]:
        """Seconds of `score` and, if it is trained, `train` (forward and backward): the fastest of several equal passes."""
        ones, mask = torch.ones(rows), torch.zeros(rows, width)
        mask[:, -max(1, round(width * self._share)) :] = 1
        ids, lengths = torch.randint(self._vocab_size, (rows, width)), torch.full((rows,), width)
        columns = {"input_ids": ids, "input_lengths": lengths, "token_mask": mask, "sample_mask": ones}
        runs = [self._timed(BatchedDataDict(columns)) for _ in range(_REPEATS)]
        return {kind: min(run[kind] for run in runs) for kind in runs[0]}

    def _timed(self, batch: BatchedDataDict[Any]) -> dict[str, float]:
        head, began = self._head, _clock()
        given = self._microbatcher.form(batch, training=False)
        forward(self._models, [given], lambda output, _: head(output, given))
        seconds = {"score": _clock() - began}
        if self._trainable is not None:
            began = _clock()
            trained = self._microbatcher.form(batch, training=True)
            forward_backward(self._models, [trained], lambda output, _: (head(output, trained).sum(), None))
            seconds["train"] = _clock() - began
        return seconds

    def update_per_weight(self) -> float:
        """Seconds of an optimizer step for each weight."""
        assert self._trainable is not None
        for _ in range(2):  # the first creates the optimizer's state
            began = _clock()
            self._trainable.step(self._trainable.gradient_norm(), self._config.max_grad_norm)
        per_weight: float = (_clock() - began) / self.weights
        return per_weight


def _extrapolated(seconds: dict[int, float], tokens: int, factor: float) -> float:
    """Seconds for `tokens`, linearly from those of one or two numbers of tokens; the increase is multiplied by `factor`."""
    few, many = min(seconds), max(seconds)
    slope = max(0.0, seconds[many] - seconds[few]) / (many - few) if many > few else seconds[many] / many
    return max(0.0, seconds[many] - slope * many) + factor * slope * tokens
