"""One optimizer step over the microbatches of a global batch, and the models that it scores with.

The device is synchronized only once, at the end: losses, metrics and the gradient norm are copied to the CPU in one tensor, and
only then is the step taken. A NaN anywhere therefore leaves weights and optimizer unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import increment_version
from transformers import PreTrainedModel

from rl_backends_base import MicrobatchSplitter, first_non_finite_loss, non_finite_step_error, reduce_metrics
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.cpu_attention import use_cpu_sdpa
from rl_backends_hf.model import DTYPES, load_model
from rl_backends_hf.parallel import Parallel, clip_, compile_layers, load_sharded
from rl_backends_hf.scoring.scoring_model import (
    ScoringInput,
    ScoringModel,
    ValueScoring,
    packed_input,
    padded_input,
    shared_input,
)
from rl_backends_hf.scoring.token_scoring import TokenScoring
from rl_backends_hf.shards import local
from rl_backends_hf.training.lora import LoraAdapters
from rl_backends_hf.training.training_state import TrainingState
from rl_core.backend import BatchedDataDict, GlobalCounts, StepResult
from rl_core.errors import NonFiniteError
from rl_core.interfaces.policy import LossFunction


def optimizer_step(
    scoring: ScoringModel,
    microbatches: Iterable[tuple[ScoringInput, BatchedDataDict[Any]]],
    loss_fn: LossFunction,
    counts: GlobalCounts,
    *,
    state: TrainingState | None,
    parallel: Parallel,
    max_grad_norm: float | None,
    stepping: AbstractContextManager[None],
) -> StepResult:
    """Accumulate the gradients of all microbatches and ranks, clip, and step.

    Args:
        scoring: the model.
        microbatches: each as model input and as batch for the loss.
        loss_fn: the loss.
        counts: normalizers of the global batch.
        state: optimizer state; None to compute loss and metrics only.
        parallel: the ranks.
        max_grad_norm: maximum gradient norm; None disables clipping.
        stepping: entered while the optimizer updates the weights.

    Raises:
        NonFiniteError: on every rank, if a loss or gradient on any rank is NaN or infinite; nothing has changed.
    """
    learn = state is not None
    if state is not None:
        state.masters.clear_gradients()
    with training_mode(scoring, learn=learn, dropout=loss_fn.allows_dropout):
        losses, metrics = _forward_backward(scoring, microbatches, loss_fn, counts, parallel=parallel, learn=learn)
    norm = torch.zeros((), device=parallel.device)
    if state is not None:
        parallel.sum_gradients(state.masters.parameters)
        norm = parallel.gradient_norm(list(state.masters.gradients().values()))
    else:
        parallel.after_forward(scoring)
    loss = torch.stack(losses).sum()
    broken = parallel.any(~(torch.isfinite(loss) & torch.isfinite(norm)))
    reduced = reduce_metrics(metrics, loss_fn.metric_reductions)
    numbers = torch.stack([broken, loss, norm, *reduced.values()]).tolist()
    if numbers[0] > 0:
        raise _non_finite(losses, state, parallel, norm=numbers[2])
    if state is not None and max_grad_norm is not None:
        clip_(list(state.masters.gradients().values()), norm, max_grad_norm)
    with stepping:
        lr = _step(state) if state is not None else 0.0
    return StepResult(loss=numbers[1], grad_norm=numbers[2], lr=lr, metrics=dict(zip(reduced, numbers[3:], strict=True)))


def _forward_backward(
    scoring: ScoringModel,
    microbatches: Iterable[tuple[ScoringInput, BatchedDataDict[Any]]],
    loss_fn: LossFunction,
    counts: GlobalCounts,
    *,
    parallel: Parallel,
    learn: bool,
) -> tuple[list[torch.Tensor], list[Mapping[str, torch.Tensor]]]:
    seqs = torch.full((), counts.valid_seqs, dtype=torch.float32, device=parallel.device)
    toks = torch.full((), counts.valid_toks, dtype=torch.float32, device=parallel.device)
    losses: list[torch.Tensor] = []
    metrics: list[Mapping[str, torch.Tensor]] = []
    with nullcontext() if learn else torch.no_grad():
        for inputs, batch in microbatches:
            loss, loss_metrics = loss_fn(_split_candidates(scoring.score(inputs), batch, loss_fn), batch, seqs, toks)
            if learn:
                loss.backward()
            losses.append(loss.detach().float())
            metrics.append(loss_metrics)
    return losses, metrics


def _split_candidates(scored: torch.Tensor, batch: BatchedDataDict[Any], loss_fn: LossFunction) -> torch.Tensor:
    """The numbers [b, T] of the rows' own tokens; those of candidates are added to the batch."""
    if loss_fn.candidates_key is None:
        return scored
    batch["candidate_logprobs"] = scored[..., 1:]
    return scored[..., 0]


def _step(state: TrainingState) -> float:
    """Take a step and return its learning rate."""
    lr = float(state.optimizer.param_groups[0]["lr"])
    state.optimizer.step()
    # Fused optimizers change parameters without counting it, but an engine that shares them checks the counts.
    increment_version(list(state.masters.parameters.values()))
    state.scheduler.step()
    state.masters.copy_to_model()
    state.masters.clear_gradients()
    state.weight_version += 1
    return lr


def _non_finite(losses: list[torch.Tensor], state: TrainingState | None, parallel: Parallel, *, norm: float) -> NonFiniteError:
    """The error for the first non-finite value on this rank; clears the gradients."""
    where = "The non-finite value is on another rank; see its error."
    broken = first_non_finite_loss(losses)
    if broken is not None:
        where = f"The loss of microbatch {broken + 1} of {len(losses)} on rank {parallel.rank} is {float(losses[broken])}."
    else:
        for name, gradient in state.masters.gradients().items() if state is not None else ():
            if not bool(torch.isfinite(local(gradient)).all()):
                where = f"The losses are finite; the first non-finite gradient on rank {parallel.rank} is that of {name}."
                break
    step = 1
    if state is not None:
        state.masters.clear_gradients()
        step = state.weight_version + 1
    return non_finite_step_error(step, where, norm=norm)


class Microbatcher(MicrobatchSplitter):
    """Splits batches into microbatches as configured, and converts them to model inputs.

    Args:
        config: the section `policy`.
        device: device of the model.

    Attributes:
        shares_prefixes: whether rows with the same `prompt_id` are computed as one sequence; set once the model is known to
            support it.
        variable_length_kernel: attention function that takes sequence boundaries, if any.
    """

    def __init__(self, config: HFPolicyConfig, *, device: torch.device) -> None:
        super().__init__(config)
        self._config, self._device = config, device
        self._shift = (ValueScoring if config.head == "scalar" else TokenScoring).shift
        self.shares_prefixes = False
        flash = config.hf_cfg.attn_implementation == "flash_attention_2" and device.type == "cuda"
        self.variable_length_kernel: str | None = "flash_attention_2" if flash else None

    def form(self, microbatch: BatchedDataDict[Any], *, training: bool, candidates_key: str | None = None) -> ScoringInput:
        """Convert a microbatch to model input.

        Args:
            microbatch: `input_ids`, `input_lengths`, for training `token_mask` and `sample_mask`, and `prompt_id` if rows of a
                prompt should share their prefix.
            training: score only tokens with `token_mask * sample_mask`; otherwise all.
            candidates_key: column [b, T, K] of further tokens to score at the same positions.

        Raises:
            DataError: a row is longer than `max_total_sequence_length` or than the batch's width.
        """
        read = self.read(microbatch, training=training)
        ids, lengths, mask = read.input_ids, read.lengths, read.mask
        if self.shares_prefixes and read.prompt_ids is not None:
            formed = shared_input(ids, lengths, read.prompt_ids, device=self._device, shift=self._shift, mask=mask)
        elif self.packing:
            formed = packed_input(
                ids,
                lengths,
                device=self._device,
                shift=self._shift,
                mask=mask,
                pad_multiple=self._config.sequence_packing.sequence_length_pad_multiple,
                variable_length_kernel=self.variable_length_kernel,
            )
        else:
            formed = padded_input(ids, lengths, device=self._device, shift=self._shift, mask=mask)
        return formed if candidates_key is None else formed.with_candidates(microbatch[candidates_key])


@contextmanager
def training_mode(model: nn.Module, *, learn: bool, dropout: bool) -> Iterator[None]:
    """Put `model` into the mode of one forward and backward pass.

    Without dropout, all modules stay in evaluation mode, as for scoring: dropout, layerdrop and router noise are off, and
    log-probabilities equal those of `get_logprobs`. Two kinds of modules still need the training flag: layers that recompute
    activations check it, so their own drop probabilities are set to 0 while the block runs; and the dropout of LoRA adapters is
    configured explicitly (`lora.dropout`), so it stays on.

    Args:
        model: the model.
        learn: whether gradients are computed.
        dropout: whether the model's own dropout may be on; see `LossFunction.allows_dropout`.
    """
    model.train(learn and dropout)
    changed: list[tuple[nn.Module, str, float]] = []
    if learn and not dropout:
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True
                changed += [(module, name, value) for name, value in _drop_probabilities(module)]
            adapter: Any = getattr(module, "lora_dropout", None)
            if isinstance(adapter, nn.Module):
                module.training = True
                adapter.train()
    for module, name, _ in changed:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


def _drop_probabilities(module: nn.Module) -> list[tuple[str, float]]:
    """Attributes of the module itself such as `dropout`, `activation_dropout` or `layerdrop`."""
    return [(name, value) for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]


class Reference(Protocol):
    """A model with the initial policy's weights."""

    def on_device(self) -> AbstractContextManager[ScoringModel]:
        """The model, ready to score on the rank's device while the block runs."""


class FrozenBase:
    """The policy's own model with its adapters disabled; needs no second copy of the weights.

    Args:
        scoring: the policy's model.
        adapters: its adapters.
    """

    def __init__(self, scoring: ScoringModel, adapters: LoraAdapters) -> None:
        self._scoring, self._adapters = scoring, adapters

    @contextmanager
    def on_device(self) -> Iterator[ScoringModel]:
        with self._adapters.disabled(), torch.no_grad():
            yield self._scoring.eval()


class ReferencePolicy:
    """A second model that is kept in CPU memory and moved to the device while it scores.

    It is loaded from `model_name`, not copied from the policy, so it is also the initial policy after a resume, and costs
    nothing if it is not used.

    Args:
        config: the section `policy`.
        parallel: how the ranks share a model.
        temperature: logits are divided by it.
        attention: attention function of the policy.
    """

    def __init__(self, config: HFPolicyConfig, parallel: Parallel, *, temperature: float, attention: str) -> None:
        def make_scoring(model: PreTrainedModel) -> ScoringModel:
            return TokenScoring(model, chunk_tokens=config.hf_cfg.logprob_chunk_tokens, temperature=temperature)

        source: dict[str, Any] = {"options": config.hf_cfg, "dtype": DTYPES[config.dtype_name]}
        if parallel.shards:
            self._scoring = load_sharded(config.model_name, make_scoring, parallel=parallel, trainable=False, **source)
        else:
            self._scoring = make_scoring(load_model(config.model_name, device="cpu", **source))
            parallel.distribute(self._scoring, trainable=False)
        if parallel.device.type == "cpu":
            use_cpu_sdpa(self._scoring.model)
        else:
            # The rows are laid out for the policy's attention.
            self._scoring.model.set_attn_implementation(attention)
        if config.hf_cfg.compile_layers:
            compile_layers(self._scoring.model, float32_products=False)
        self._parallel = parallel
        self._moves_to_device = not parallel.shards and config.hf_cfg.device_map is None and parallel.device.type != "cpu"
        self._on_host: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The weights and their pinned memory, which stays when they are copied to the device."""
        if self._moves_to_device:
            weights = (*self._scoring.parameters(), *self._scoring.buffers())
            self._on_host = [(weight, weight.data.pin_memory()) for weight in weights]

    @contextmanager
    def on_device(self) -> Iterator[ScoringModel]:
        for weight, host in self._on_host:
            weight.data = host.to(self._parallel.device, non_blocking=True)
        try:
            with torch.no_grad():
                yield self._scoring.eval()
        finally:
            self._parallel.after_forward(self._scoring)
            for weight, host in self._on_host:
                weight.data = host
