"""Predicts the time of a policy's passes and of sampling on this machine's CPUs from the model's config, without its weights.

A model of the same shape with at most two layers and random weights runs the worker's own code for about half a second. Its
last layer is timed on its own, and counts for the layers that are missing. Larger microbatches than fit into this time are
extrapolated from smaller ones by their FLOPs.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from rl_backends_hf.cpu_attention import use_cpu_sdpa
from rl_backends_hf.cpu_products import CpuProducts
from rl_backends_hf.model import DTYPES, checkpoint_activations, decoder_layers, model_without_weights
from rl_backends_hf.model_options import HFModelConfig
from rl_backends_hf.planned_memory import adapt, depth_of, fewer_layers, rows_together, scoring_of, shards_of
from rl_backends_hf.sampling.decode_loop import DecodeLoop
from rl_backends_hf.sampling.generation_worker import PACKED_ROWS
from rl_backends_hf.sampling.kv_cache import CacheBudget
from rl_backends_hf.sampling.packed_linears import packed_bytes
from rl_backends_hf.sampling.prefill import AttentionLayout
from rl_backends_hf.sampling.sampler import Sampler, SamplerSettings
from rl_backends_hf.sampling.shared_prompts import PromptSharing
from rl_backends_hf.scoring.scoring_model import padded_input
from rl_backends_hf.training.optimizer import MasterWeights, build_optimizer
from rl_core.backend import BatchedDataDict, Head
from rl_core.errors import NotSupportedError

if TYPE_CHECKING:
    from rl_backends_hf.config import HFGenerationConfig, HFPolicyConfig

_DEPTH: Final = 2
"""Maximum number of layers of the model that is timed."""
_BUDGET_S: Final = 0.4
"""Approximate duration of a measurement, in CPU-seconds of its thread: other processes prolong it less than they do seconds."""
_REPEATS: Final = 3
"""Number of equal passes, of which the fastest counts, because others are prolonged by other processes."""
_FEW: Final = 64
_MANY: Final = 512
"""Maximum numbers of tokens of the two microbatches that are timed."""
_UPDATED: Final = 2**23
"""Minimum number of weights with which an optimizer step is timed, if the model has as many."""
_PROMPT: Final = 512
"""Maximum length of a prompt that is computed; longer ones are extrapolated."""
_CPU: Final = torch.device("cpu")
_MAX_BYTES: Final = 4 * 2**30
"""Maximum memory of a measurement, which also takes at most half of what is available."""


class PolicyTime:
    """The time of one rank of a policy. See `ModelTime` in `rl_train.plan.time_plan`."""

    refit_bytes_per_s = 1e9

    def __init__(self, config: HFPolicyConfig) -> None:
        self._config = config

    def seconds(
        self, *, tokens: int, scored: int, length: int, training: bool, ranks: int, microbatches: float
    ) -> dict[str, float]:
        """Does not depend on `microbatches`, because a rank does not wait for others between them."""
        config, dtype = self._config, DTYPES[self._config.dtype_name]
        if config.hf_cfg.compile_layers:
            raise NotSupportedError("compiling layers (hf_cfg.compile_layers) takes too long to try")
        full = model_without_weights(config.model_name, options=config.hf_cfg, head=config.head)
        model = _small(full, config.model_name, config.hf_cfg, dtype=dtype, head=config.head, copies=3)
        adapt(full, config)
        adapt(model, config)
        use_cpu_sdpa(model)
        if config.activation_checkpointing and training:
            checkpoint_activations(model)
        passes = _Passes(config, model, share=scored / tokens, training=training)
        products = CpuProducts.of(config.hf_cfg.cpu_products, dtype, _CPU, model=full)
        with products(), torch.set_grad_enabled(training):
            layer, rest = passes.seconds(tokens, length)
        depth = depth_of(full)
        seconds = {"score": depth * layer[0] + rest[0] * tokens / scored}
        if training:
            seconds["train"] = depth * sum(layer) + sum(rest)
            trained = sum(each.numel() for each in full.parameters() if each.requires_grad)
            shards = shards_of(config, ranks)
            seconds["update"] = trained // shards * passes.update_per_weight()
        return seconds


class EngineTime:
    """The time of one replica of the engine. See `EngineTime` in `rl_train.plan.time_plan`."""

    refit_bytes_per_s = 6e8

    def __init__(self, config: HFGenerationConfig) -> None:
        self._config = config

    def seconds(self, *, rows: int, prompts: int, prompt: int, completion: int) -> float:
        config, options = self._config, self._config.hf_cfg
        assert config.model_name is not None
        dtype = DTYPES[options.precision or "float32"]
        full = model_without_weights(config.model_name, options=options).to(dtype)
        model = _small(full, config.model_name, options, dtype=dtype, head="tokens", copies=2).requires_grad_(False)
        settings = replace(SamplerSettings.from_config(config), stop_strings=(), max_new_tokens=completion)
        sampler, times, layout = Sampler(model, settings=settings), _LayerTimes(model), AttentionLayout.of(model)
        together = rows_together(config, full, rows=rows, longest=prompt + completion)
        width = max(1, min(prompt, _PROMPT, sampler.max_model_len - 2))
        few = max(1, min(prompts, together, _PROMPT // width))
        sharing = PromptSharing.of(model, window=layout.window)
        ids = torch.randint(sampler.vocab_size, (few, width)).repeat_interleave(-(-together // few), dim=0)[:together]
        given: BatchedDataDict[Any] = BatchedDataDict({"input_ids": ids, "input_lengths": torch.full((together,), width)})
        missing, steps = depth_of(full) - depth_of(model), list[tuple[float, float]]()
        began = time.thread_time()
        with sampler.prepared(rows=PACKED_ROWS, steps=completion), sampler.without_gradients():
            packing = time.thread_time() - began
            budget = CacheBudget(model, max_rows=together, max_bytes=None)
            loop = DecodeLoop(model, layout, frozenset(), budget=budget, prefill_tokens=_PROMPT, sharing=sharing)
            loop.add(sampler.read(given, greedy=False))
            first = times.of_step(loop)
            unshared = 0 if sharing.shared_tokens(ids[0].tolist(), rows // prompts) else prompt - width
            loop.skip_tokens(unshared + completion // 2)
            while not loop.is_idle and len(steps) < 20 and (len(steps) < 3 or sum(step for step, _ in steps) < _BUDGET_S):
                steps.append(times.of_step(loop))
        step, layer = (min(numbers) for numbers in zip(*(steps or [first]), strict=True))
        prefill = max(0.0, first[0] - step) + missing * first[1]
        waves = -(-rows // together)
        packing *= packed_bytes(full, steps=completion) / max(1, packed_bytes(model, steps=completion))
        sampled: float = packing + prefill * prompts * prompt / (few * width) + waves * completion * (step + missing * layer)
        return sampled


class _LayerTimes:
    """Records when the output of each layer, and in the backward pass its gradient, has been computed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._depth = depth_of(model)
        self._marks: tuple[list[float], list[float]] = [], []
        for layer in decoder_layers(model):
            layer.register_forward_hook(self._mark)

    def clear(self) -> None:
        """Discard what was recorded."""
        for marks in self._marks:
            marks.clear()

    def of_layer(self, side: int) -> float:
        """Seconds of the last layer's forward (0) or backward pass (1); 0.0 in a model of one layer."""
        marks = self._marks[side][: self._depth]  # activation checkpointing computes outputs again
        return abs(marks[1] - marks[0]) if len(marks) > 1 else 0.0

    def of_step(self, loop: DecodeLoop) -> tuple[float, float]:
        """Seconds of a step of `loop`, and those of its last layer."""
        self.clear()
        began = time.thread_time()
        loop.step()
        return time.thread_time() - began, self.of_layer(0)

    def _mark(self, _: nn.Module, given: Any, output: Any) -> None:
        self._marks[0].append(time.thread_time())
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self._marks[1].append(time.thread_time()))


class _Passes:
    """Runs and times passes over microbatches.

    Args:
        config: the section of the policy.
        model: the small model.
        share: fraction of the tokens that are trained.
        training: whether to run the backward pass.
    """

    def __init__(self, config: HFPolicyConfig, model: PreTrainedModel, *, share: float, training: bool) -> None:
        self._config, self._model, self._share, self._training = config, model, share, training
        self._scoring = scoring_of(config, model).train(training)
        self._masters = MasterWeights(model, model_dtype=DTYPES[config.dtype_name]) if training else None
        self._times = _LayerTimes(model)

    def seconds(self, tokens: int, length: int) -> tuple[list[float], list[float]]:
        """Seconds of a layer and of everything else for one microbatch, forward and backward.

        Both are linear in the tokens, with a part that is the same for each microbatch, such as adding gradients. A layer has 2
        FLOPs per weight and token, and 2 per hidden unit and token that it attends to (causal, two products).

        Args:
            tokens: tokens of the microbatch.
            length: tokens of its longest row.
        """
        few = self._fastest(1, min(length, _FEW))
        affordable = max(min(length, _FEW), min(tokens, _MANY, max(4 * _FEW, int(_FEW * _BUDGET_S / sum(few[1])))))
        width = min(length, affordable)
        rows = affordable // width
        many = self._fastest(rows, width)
        weights = sum(each.numel() for each in decoder_layers(self._model)[-1].parameters())
        hidden = self._model.config.get_text_config(decoder=True).hidden_size
        longer = (weights + length * hidden) / (weights + width * hidden)
        depth, first, computed = depth_of(self._model), min(length, _FEW), rows * width

        def at_tokens(small: float, large: float, factor: float) -> float:
            slope = max(0.0, large - small) / (computed - first) if computed > first else large / computed
            return max(0.0, large - slope * computed) + factor * slope * tokens

        layer = [at_tokens(few[0][side], many[0][side], longer) for side in (0, 1)]
        small, large = ([whole[side] - depth * own[side] for side in (0, 1)] for own, whole in (few, many))
        rest = [at_tokens(small[side], large[side], 1.0) for side in (0, 1)]
        return layer, rest

    def _fastest(self, rows: int, width: int) -> tuple[list[float], list[float]]:
        """`_timed` of the fastest of several equal passes, by side."""
        runs = [self._timed(rows, width) for _ in range(_REPEATS)]
        layer, whole = ([min(run[part][side] for run in runs) for side in (0, 1)] for part in (0, 1))
        return layer, whole

    def _timed(self, rows: int, width: int) -> tuple[tuple[float, float], tuple[float, float]]:
        """Seconds of the last layer, and of everything, forward and backward."""
        mask = torch.zeros(rows, width)
        mask[:, -max(1, round(width * self._share)) :] = 1
        ids, lengths = torch.randint(self._scoring.vocab_size, (rows, width)), torch.full((rows,), width)
        given = padded_input(ids, lengths, device=_CPU, shift=self._scoring.shift, mask=mask)
        self._times.clear()
        began = time.thread_time()
        scores = self._scoring(given.input_ids, given.hidden_index, given.targets, given.attention)
        between = time.thread_time()
        if self._training:
            scores.sum().backward()
        layer = self._times.of_layer(0), self._times.of_layer(1)
        return layer, (between - began, time.thread_time() - between)

    def update_per_weight(self) -> float:
        """Seconds of an optimizer step, of clipping and of copies for each trained weight."""
        assert self._masters is not None
        name = self._config.optimizer.name
        if not name.startswith("torch.optim."):
            raise NotSupportedError(f"steps of the optimizer {name} are not measured")
        chosen, size = dict[str, nn.Parameter](), 0
        for key, parameter in self._masters.parameters.items():
            if parameter.grad is not None and size < _UPDATED:
                chosen[key], size = parameter, size + parameter.numel()
        optimizer = build_optimizer(chosen, self._config.optimizer)
        optimizer.step()
        began = time.thread_time()
        nn.utils.clip_grad_norm_(list(chosen.values()), 1.0)
        optimizer.step()
        return (time.thread_time() - began) / size


def _small(
    full: PreTrainedModel, name: str, options: HFModelConfig, *, dtype: torch.dtype, head: Head, copies: int
) -> PreTrainedModel:
    """The model with at most two layers and random weights.

    Args:
        full: the model on the device `meta`.
        name: name of the model.
        options: how it is loaded.
        dtype: dtype of its weights.
        head: its head.
        copies: memory of the measurement, as a multiple of the weights.

    Raises:
        NotSupportedError: its layers are unknown, it is quantized, or the measurement needs too much memory.
    """
    if options.load_in_4bit or options.load_in_8bit:
        raise NotSupportedError("quantized weights are not timed")
    if not decoder_layers(full):
        raise NotSupportedError(f"{type(full).__name__} does not name its layers")
    fewer = fewer_layers(full, options, min(_DEPTH, depth_of(full)))
    weights = sum(each.numel() for each in model_without_weights(name, options=fewer, head=head).parameters())
    available = min(_MAX_BYTES, psutil.virtual_memory().available // 2)
    if copies * weights * 4 > available:
        raise NotSupportedError(
            f"two layers of the model need {copies * weights * 4 / 2**30:.1f} GiB, which is too much to try"
        )
    with no_init_weights():
        model = model_without_weights(name, options=fewer, head=head, device="cpu").to(dtype)
    noise = 0.02 * torch.randn(65521)  # a prime, so that rows of a matrix differ
    with torch.no_grad():
        for parameter in model.parameters():
            for chunk in parameter.view(-1).split(len(noise)):
                chunk.copy_(noise[: len(chunk)]) if parameter.ndim > 1 else chunk.fill_(1.0)
    return model.eval()
