"""A policy on a torch module: the author writes the model, and the worker here trains it.

The device is synchronized only once in an optimizer step, at the end: losses, metrics and the gradient norm are copied to the
CPU in one tensor, and only then is the step taken. A NaN anywhere therefore leaves weights and optimizer unchanged.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rl_backends_base.host_memory import HostedModel, HostMemory
from rl_backends_base.microbatches import MicrobatchRows, ScoringInput, outside_sets, padded_input, reduce_metrics
from rl_backends_base.optimizer import MasterWeights, build_optimizer
from rl_backends_base.optimizer_settings import OptimizerSettings
from rl_backends_base.optimizer_step import LossAndMetrics, LossOfMicrobatch, non_finite_error, training_mode
from rl_backends_base.parallel import Parallel, join_ranks
from rl_backends_base.policy_worker import ConfigT, PolicyWorkerBase
from rl_backends_base.shards import copy_weights, local, round_parameters, whole
from rl_backends_base.training_state import TrainingState, TrainingStateBase
from rl_core.backend import (
    BatchedDataDict,
    GlobalCounts,
    PolicyFacts,
    RefitManifest,
    StepResult,
    WorkerContext,
    dtype_name,
    dtype_of,
    find_tokenizer,
    first_non_finite,
    weights_of,
)
from rl_core.data.batched_data_dict import to_device
from rl_core.errors import InvalidComponentError, NotSupportedError
from rl_core.interfaces.policy import LossFunction
from rl_core.interfaces.worker_context import explaining_memory, halved

_CPU = torch.device("cpu")


class TorchPolicyWorker(PolicyWorkerBase[ConfigT]):
    """One rank of a policy whose model is a torch module.

    A subclass defines:

    - `build`: the model.
    - `logits` or `token_logprobs`: its output. Top-k log-probabilities and losses with candidates need `logits`.
    - `values`, if the config may have `head: scalar`.
    - `save_weights`; and `checkpoint_weights`, if the names in the checkpoint are not those of the module.
    - `load_weights`, if `build` cannot read the folder that `save_weights` wrote.

    The base class joins the ranks, each of which has the whole model, and sums gradients over them. It builds the optimizer and
    the schedule, keeps float32 master weights of a bfloat16 model, clips, refuses steps that are not finite, moves tensors
    between the device and CPU memory, saves and restores the training state with any number of ranks, and scores with the
    reference policy, which is a second `build`. `facts`, `find_tokenizer` and all other public methods may be overridden.

    Args:
        context: rank, rendezvous address and device.
        config: the section `policy`.

    Attributes:
        model: the model; while the reference policy scores, that of the reference.
        parallel: the ranks; set by `load`.
        state: the optimizer and the weights that it updates; None if the model is frozen.
        exact_weights: name to float32 value of weights that were rounded when the model was loaded; masters start there.
    """

    model: nn.Module
    parallel: Parallel

    def __init__(self, context: WorkerContext, config: ConfigT) -> None:
        super().__init__(context, config)
        self.state: TrainingStateBase | None = None
        self.exact_weights: Mapping[str, torch.Tensor] = {}
        self._reference: HostedModel | None = None
        self._host_memory = HostMemory()

    @abstractmethod
    def build(self) -> nn.Module:
        """The model with the weights of `config.model_name`, on any device.

        Called when the worker loads, and again for the reference policy: use `self.model` and do not keep the model. float32
        parameters are rounded to `config.precision` afterwards. Those without `requires_grad` are not trained.
        """

    def logits(self, batch: BatchedDataDict[Any]) -> torch.Tensor:
        """Logits [b, T, V] of `self.model`; those at position t predict token t + 1.

        Args:
            batch: `input_ids` [b, T] int64, right-padded, and `input_lengths` [b] int64, on the device.
        """
        raise NotSupportedError(
            f"{type(self).__name__} does not define `logits`. With `token_logprobs` instead, `facts` must have `vocab_size`, "
            "and top-k log-probabilities and losses with candidates are not supported."
        )

    def token_logprobs(self, batch: BatchedDataDict[Any]) -> torch.Tensor:
        """Log-probabilities [b, T], in nats, of the tokens, given those before them; position 0 and padding are ignored.

        They are those of logits divided by `config.scoring_temperature`. `batch` is as in `logits`.
        """
        raise NotImplementedError  # `score` computes them from `logits`

    def values(self, batch: BatchedDataDict[Any]) -> torch.Tensor:
        """Values [b, T] of a scalar head after each token; `batch` as in `logits`."""
        raise NotSupportedError(f"{type(self).__name__} does not define `values`, which `head: scalar` requires.", key="head")

    def checkpoint_weights(self) -> Mapping[str, torch.Tensor]:
        """Live tensors of the model under the names of the checkpoint, each tensor once."""
        return weights_of(self.model)

    def facts(self) -> Mapping[str, Any]:
        """Facts that replace those of the base class; see `PolicyFacts`."""
        return {}

    def find_tokenizer(self) -> Any:
        return find_tokenizer(self.config.model_name, self.config.tokenizer)

    # The methods below may be overridden by a backend that shards the model, or has its own optimizer or layout of rows.

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.parallel.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type that the weights are computed with and exported in."""
        return dtype_of(self.config.dtype_name)

    def join(self) -> Parallel:
        """Join the other ranks."""
        join_ranks(self.context)
        return Parallel(self.context)

    def place(self) -> None:
        """Round the parameters of `self.model` to `self.dtype`, and move it to the device, without dropout."""
        if self.dtype != torch.float32 and not self.config.frozen:
            self.exact_weights = {name: each.detach() for name, each in self.trained_module.named_parameters()}
        round_parameters(self.model, self.dtype).to(self.device).eval()

    def load(self) -> PolicyFacts:
        if self.config.vocab_size is not None and self._computes_logprobs:
            raise NotSupportedError(
                f"{type(self).__name__} computes log-probabilities itself, so ids cannot be left out. Remove `vocab_size`, and "
                "use a model whose LM head is as large as the policy's.",
                key="vocab_size",
            )
        self.parallel = self.join()
        self.model = self.build()
        if kept := [name for name, value in vars(self).items() if value is self.model and name != "model"]:
            raise InvalidComponentError(
                f"{type(self).__name__}.build keeps the model as `self.{kept[0]}`, which that of the reference policy would "
                "replace. Use `self.model`."
            )
        self.place()
        parameters = list(self.model.parameters())
        if not self.config.frozen:
            self.state = self.make_state()
        self.exact_weights = {}
        trained = 0 if self.state is None else sum(each.numel() for each in parameters if each.requires_grad)
        facts: dict[str, Any] = {
            "device": str(self.device),
            "num_parameters": sum(each.numel() for each in parameters),
            "num_trained_parameters": trained,
            "device_name": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None,
            **self.facts(),
        }
        if "vocab_size" not in facts:
            facts["vocab_size"] = self._count_tokens()
        return cast(PolicyFacts, facts)

    @property
    def _computes_logprobs(self) -> bool:
        return type(self).token_logprobs is not TorchPolicyWorker.token_logprobs

    @property
    def trained_module(self) -> nn.Module:
        """The module whose parameters are trained, under whose names the training state is saved."""
        return self.model

    @property
    def trained_dtype(self) -> torch.dtype:
        """Data type to which trained weights are rounded when they are saved or sent."""
        return self.dtype

    def make_state(self) -> TrainingStateBase | None:
        """The optimizer of the trainable parameters; None if there are none."""
        masters = MasterWeights(self.trained_module, model_dtype=self.trained_dtype)
        if not masters.parameters:
            raise NotSupportedError(
                f"No parameter of {self.config.model_name} has `requires_grad`, so nothing can be trained. Set `frozen: true` "
                "for a model that only scores.",
                key="frozen",
            )
        masters.load_exact(self.exact_weights)
        optimizer = self.make_optimizer(masters.parameters)
        settings = OptimizerSettings(optimizer, self.config.optimizer, self.config.scheduler)
        return TrainingState(masters=masters, settings=settings, parallel=self.parallel)

    def make_optimizer(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of `parameters`, by name; an override may have several groups, or an `OptimizerChain`."""
        return build_optimizer(parameters, self.config.optimizer)

    def trainable_state(self) -> TrainingStateBase:
        """The training state; NotSupportedError if there is none."""
        self.require_trainable()
        assert self.state is not None
        return self.state

    def to_input(self, microbatch: BatchedDataDict[Any], *, training: bool, candidates_key: str | None = None) -> ScoringInput:
        """The input of `score` for a microbatch.

        Args:
            microbatch: see `MicrobatchSplitter.read`.
            training: score only tokens with `token_mask * sample_mask`; otherwise all.
            candidates_key: column [b, T, K] of further tokens to score at the same positions.
        """
        rows = self._splitter.read(microbatch, training=training)
        inputs = self.form(rows).among_sets(rows, shift=int(self.config.head == "tokens"))
        return inputs if candidates_key is None else inputs.with_candidates(microbatch[candidates_key])

    def form(self, rows: MicrobatchRows) -> ScoringInput:
        """Lay out the rows of a microbatch; padded and trimmed to the longest by default."""
        shift, lengths = int(self.config.head == "tokens"), to_device(rows.lengths, self.device)
        inputs = padded_input(rows.input_ids, rows.lengths, device=self.device, shift=shift, mask=rows.mask)
        return replace(inputs, attention={"input_lengths": lengths})

    def score(self, inputs: ScoringInput) -> torch.Tensor:
        """Log-probabilities or, with a scalar head, values [b, T], with candidates [b, T, 1 + K], float32, of a microbatch.

        They are 0.0 for tokens that are not scored.
        """
        is_scalar, takes_logits = self.config.head == "scalar", inputs.targets.ndim > 1
        if is_scalar or (self._computes_logprobs and not takes_logits):
            numbers = self._call(self.values if is_scalar else self.token_logprobs, inputs, axes=2)
            return inputs.scatter(numbers.float().flatten().index_select(0, inputs.hidden_index + (not is_scalar)))
        logits = self._next_logits(inputs)
        targets = inputs.targets if takes_logits else inputs.targets.unsqueeze(1)
        return inputs.scatter((logits.gather(1, targets) - logits.logsumexp(-1, keepdim=True)).view_as(inputs.targets))

    def score_topk(self, inputs: ScoringInput, k: int) -> Mapping[str, torch.Tensor]:
        """`topk_token_ids` [b, T, k] int64 and `topk_logprobs` [b, T, k] float32 of a microbatch."""
        logits = self._next_logits(inputs)
        top, ids = logits.topk(k, dim=-1)
        logprobs = top - logits.logsumexp(-1, keepdim=True)
        return {"topk_token_ids": inputs.scatter(ids), "topk_logprobs": inputs.scatter(logprobs)}

    def score_microbatches(
        self, microbatches: Iterator[BatchedDataDict[Any]], *, topk: int | None = None, reference: bool = False
    ) -> Sequence[Mapping[str, torch.Tensor]]:
        with self.scoring(reference=reference), torch.no_grad():
            inputs = (self.to_input(each, training=False) for each in microbatches)
            if topk is None:
                column = "values" if self.config.head == "scalar" else "logprobs"
                return [{column: self.score(each)} for each in inputs]
            scores = [self.score_topk(each, topk) for each in inputs]
            if self.device.type == "cuda":  # copies to the CPU may be in progress
                torch.cuda.synchronize(self.device)
            return scores

    @contextmanager
    def scoring(self, *, reference: bool) -> Iterator[None]:
        """The model is on the device and in evaluation mode while the block runs; with `reference`, `self.model` is another."""
        policy = self.model
        if not reference:
            self.move(weights=self.device)
        with self.reference_model() if reference else nullcontext(policy) as self.model:
            self.model.eval()
            try:
                yield
            finally:
                self.parallel.after_forward(self.model)
                self.model = policy

    def reference_model(self) -> AbstractContextManager[nn.Module]:
        """The initial policy, on the device while the block runs. By default, `build_reference`, kept in CPU memory otherwise.

        It is loaded when it is first used and not copied from the policy, so it is also the initial policy after a resume.
        """
        if self._reference is None:
            self._reference = HostedModel(self.build_reference(), self.device)
        return self._reference.on_device()

    def build_reference(self) -> nn.Module:
        """A model with the weights of the initial policy, in CPU memory. It is only scored with, without gradients."""
        return round_parameters(self.build().cpu(), self.dtype)

    def forward_backward(
        self,
        microbatches: Iterable[BatchedDataDict[Any]],
        loss_of: LossOfMicrobatch,
        *,
        candidates_key: str | None,
        learn: bool,
    ) -> list[LossAndMetrics]:
        """Compute the loss of each microbatch, and add up the gradients if the model learns.

        Args:
            microbatches: of one global batch.
            loss_of: takes the result of `score` and the microbatch.
            candidates_key: see `to_input`.
            learn: whether to run the backward pass.

        Returns:
            Loss, without gradient, and metrics of each microbatch; empty on a rank that computes none.
        """
        results = []
        for microbatch in microbatches:
            inputs = self.to_input(microbatch, training=True, candidates_key=candidates_key)
            loss, metrics = loss_of(self.score(inputs), microbatch)
            if learn:
                loss.backward()
            results.append((loss.detach().float(), metrics))
        return results

    def train_step(
        self, microbatches: Iterator[BatchedDataDict[Any]], loss_fn: LossFunction, counts: GlobalCounts, *, eval_mode: bool
    ) -> StepResult:
        """Accumulate the gradients of all microbatches and ranks, clip, and step.

        Raises:
            NonFiniteError: on every rank, if a loss or gradient on any rank is NaN or infinite; nothing has changed.
        """
        state, device = None if eval_mode else self.trainable_state(), self.device
        loss_of = LossOfMicrobatch(loss_fn, counts, device)
        learn, norm = state is not None, torch.zeros((), device=device)
        if state is not None:
            state.clear_gradients()
        with training_mode(self.model, learn=learn, dropout=loss_fn.allows_dropout), torch.set_grad_enabled(learn):
            results = self.forward_backward(microbatches, loss_of, candidates_key=loss_fn.candidates_key, learn=learn)
        losses, metrics = [loss for loss, _ in results], [each for _, each in results]
        if state is not None:
            norm = state.gradient_norm()
        else:
            self.parallel.after_forward(self.model)
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=device)
        broken = self.parallel.any(~(torch.isfinite(loss) & torch.isfinite(norm)))
        reduced = reduce_metrics(metrics, loss_fn.metric_reductions)
        numbers = torch.stack([broken, loss, norm, *reduced.values()]).tolist()
        if numbers[0] > 0:
            raise non_finite_error(losses, state, norm=numbers[2], rank=self.context.rank)
        group_lrs = {} if state is None else state.group_lrs()
        with explaining_memory(self, "the optimizer step"):
            lr = state.step(norm, self.config.max_grad_norm) if state is not None else 0.0
        total, by_name = self.collect_results(numbers[1], dict(zip(reduced, numbers[3:], strict=True)))
        return StepResult(loss=total, grad_norm=numbers[2], lr=lr, group_lrs=group_lrs, metrics=by_name)

    def collect_results(self, loss: float, metrics: dict[str, float]) -> tuple[float, dict[str, float]]:
        """Loss and metrics of this rank's rows, from the rank that computed them; all ranks call this. Unchanged by default."""
        return loss, metrics

    def move(self, *, weights: torch.device, state: torch.device | None = None) -> None:
        """Move the weights, and the optimizer state if `state` is given, between the device and CPU memory."""
        if self.device == _CPU:
            return
        if next(self.model.parameters()).device != weights:
            self._host_memory.move_module(self.model, weights)
        if state is not None and isinstance(self.state, TrainingState):
            self.state.move(state, self._host_memory)
        if _CPU in (weights, state):
            torch.cuda.current_stream().synchronize()
            # Memory in torch's cache is not available to an engine on the same GPU.
            torch.cuda.empty_cache()

    def average_weights(self, decay: float | None) -> None:
        """Update the moving average of the trained weights; without `decay`, exchange the two until the next such call."""
        if not isinstance(state := self.trainable_state(), TrainingState):
            raise NotSupportedError(f"{type(self).__name__} has no moving average of its weights.")
        self.move(weights=self.device, state=None if decay is None else self.device)
        if decay is None:
            state.exchange_average(self.trained_module)
        else:
            state.update_average(decay)

    def set_lr_factor(self, factor: float) -> None:
        self.trainable_state().set_lr_factor(factor)

    def prepare_for_training(self) -> None:
        self.move(weights=self.device, state=self.device)

    def finish_training(self) -> None:
        if self.state is not None:
            self.state.clear_gradients()

    def offload_before_refit(self) -> None:
        self.finish_training()
        self.move(weights=self.device, state=_CPU)

    def offload_after_refit(self) -> None:
        self.move(weights=_CPU, state=_CPU)

    def load_weights(self, folder: Path) -> None:
        """Load what `save_weights` wrote; by default, `build` reads it, with the folder as `config.model_name`."""
        config, self.config = self.config, self.config.model_copy(update={"model_name": str(folder)})
        try:
            copy_weights(self.model, self.build, folder=folder)
        finally:
            self.config = config

    def weights_loaded(self) -> None:
        if self.state is not None:
            self.state.weights_loaded()

    def save_training_state(self, folder: Path) -> None:
        self.trainable_state().save(folder)

    def load_training_state(self, folder: Path) -> None:
        self.trainable_state().load(folder)

    def find_non_finite(self) -> str | None:
        trained = ((name, each) for name, each in self.trained_module.named_parameters() if each.requires_grad)
        in_weights = first_non_finite(trained, published=self.trained_dtype)
        return in_weights if in_weights or self.state is None else self.state.find_non_finite()

    def trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        masters = self.state.masters.parameters if isinstance(self.state, TrainingState) else {}
        return ((name, local(parameter)) for name, parameter in masters.items())

    def weight_shard(self) -> str:
        return f"shard {self.parallel.rank % self.parallel.num_shards}" if self.parallel.shards else ""

    def get_weight_version(self) -> int:
        return self.state.weight_version if self.state is not None else 0

    def weight_manifest(self) -> RefitManifest:
        weights = self.checkpoint_weights().items()
        return {name: (tuple(each.shape), dtype_name(self._sent_dtype(each))) for name, each in weights}

    def iter_weights(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        weights = self.checkpoint_weights()
        for name in weights if names is None else names:
            tensor = weights[name].detach()
            yield name, whole(tensor).to(self._sent_dtype(tensor))

    def _sent_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Shards are float32, and rounded when they are gathered."""
        return self.dtype if isinstance(tensor, DTensor) else tensor.dtype

    def tensors_by_kind(self) -> Mapping[str, Iterable[torch.Tensor]]:
        kinds: dict[str, Iterable[torch.Tensor]] = {}
        if hasattr(self, "model"):
            kinds["weights"] = (*self.model.parameters(), *self.model.buffers())
        if self.state is not None:
            kinds |= self.state.tensors_by_kind()
        return {kind: map(local, tensors) for kind, tensors in kinds.items()}

    def memory_advice(self, doing: str) -> str:
        keys = self.phase_keys(doing)
        if doing in ("training", "scoring"):
            keys = halved(*self.config.microbatch_limit(training=doing == "training")) + keys
        elif doing == "a refit":
            keys.append("lower `policy.generation.refit_buffer_mib`")
        if not keys or doing in ("loading", "the optimizer step"):
            keys += self.size_keys(doing)
        keys.append("let the engine use less of the GPU, if both share it")
        return f"In the section of this model: {'; or '.join(keys)}."

    def phase_keys(self, doing: str) -> list[str]:
        """Further keys that lower the memory of a phase, such as "scoring", for the error of full memory."""
        return []

    def size_keys(self, doing: str) -> list[str]:
        """Keys that lower the memory of the model itself, for that error."""
        return ["set `precision: bfloat16`"] if self.config.dtype_name == "float32" else []

    def _next_logits(self, inputs: ScoringInput) -> torch.Tensor:
        """Logits [M, V] float32 that predict the scored tokens."""
        logits = self._call(self.logits, inputs, axes=3).flatten(0, 1).index_select(0, inputs.hidden_index).float()
        logits = logits[:, : self.config.vocab_size]
        temperature = self.config.scoring_temperature
        logits = logits / temperature if temperature != 1.0 else logits
        return logits if inputs.sets is None else logits.masked_fill(outside_sets(inputs.sets, logits), float("-inf"))

    def _call(self, method: Callable[[BatchedDataDict[Any]], torch.Tensor], inputs: ScoringInput, *, axes: int) -> torch.Tensor:
        """The result of a method of the author, which must have the shape of the rows and this number of axes."""
        output = method(BatchedDataDict(input_ids=inputs.input_ids, **inputs.attention))
        if output.ndim != axes or output.shape[:2] != inputs.input_ids.shape:
            raise InvalidComponentError(
                f"`{type(self).__name__}.{method.__name__}` returned shape {list(output.shape)} for `input_ids` of shape "
                f"{list(inputs.input_ids.shape)}, not {'[b, T, V]' if axes == 3 else '[b, T]'}."
            )
        return output

    def _count_tokens(self) -> int:
        """V, from the logits of one token."""
        one = torch.ones(1, dtype=torch.int64, device=self.device)
        with torch.no_grad():
            return self.logits(BatchedDataDict(input_ids=one[None] - 1, input_lengths=one)).shape[-1]
