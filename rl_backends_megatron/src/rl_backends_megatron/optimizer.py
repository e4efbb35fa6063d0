"""Builds Megatron's data-parallel wrapper and optimizer and the learning-rate schedule, and takes steps.

Megatron-Core shards optimizer state over ranks, so it builds the optimizer itself, from the same names and arguments as other
backends. A *proxy*, the same torch optimizer class for a single number, is what torch's schedule acts on; the settings of its
parameter group are copied to Megatron's groups before each step. All torch schedules therefore work, and torch's own classes
check the arguments.

Megatron-Core 0.16.1 needs corrections to save and load its optimizers' state completely (`patched_state_io` and the functions
before it). Without them, three things go wrong, mostly silently:

- Megatron expects fused optimizers, which have state from the start and one step count for all parameters. torch's optimizers
  have no state before the first step, and a count per parameter. Loading then fails, or gives all parameters *one* shared
  counter, which each of them increments in a step (an error of 3.5e-4 in the next update).
- The distributed optimizer saves state without the padding between gradient buckets, but reads it at offsets that include the
  padding. With several buckets, every parameter after the first bucket is saved shifted.
- With expert parallelism, experts have a separate optimizer. Tensors are saved under names of the full model, but values saved
  once per optimizer (groups, step count) have a different form for one optimizer than for two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.multiprocessing.reductions import StorageWeakRef

from rl_backends_base import OptimizerSettings, TrainingStateBase, build_scheduler
from rl_backends_megatron.config import MegatronPolicyConfig
from rl_backends_megatron.megatron_internals import ENTRIES_OF_PARAMETER, GATHERED_STATE, LOADED_STATE
from rl_backends_megatron.model import DTYPES, Chunks
from rl_core.backend import first_non_finite
from rl_core.config.schema import OptimizerConfig
from rl_core.errors import UserError

_COPIED_SETTINGS = ("betas", "momentum", "eps")
"""Settings, besides learning rate and weight decay, that a schedule or a resume may change."""


class TrainableModel(TrainingStateBase):
    """Model chunks with gradients, optimizer and schedule. Its construction is collective; make all calls inside `cpu_shim`.

    Args:
        chunks: this rank's model chunks; their config gets the hooks of the data-parallel wrapper.
        config: the section `policy`.

    Attributes:
        models: the wrapped chunks, which schedules run.
        optimizer: Megatron's optimizer.
        settings: the settings of the proxy, and its schedule.
    """

    def __init__(self, chunks: Chunks, config: MegatronPolicyConfig) -> None:
        megatron = config.megatron_cfg
        wrapping = DistributedDataParallelConfig(
            grad_reduce_in_fp32=megatron.grad_reduce_in_fp32,
            overlap_grad_reduce=megatron.overlap_grad_reduce,
            overlap_param_gather=megatron.overlap_param_gather,
            use_distributed_optimizer=megatron.use_distributed_optimizer,
            bucket_size=megatron.ddp_bucket_size,
        )
        self.models = [
            # All chunks except the first have finished when the first bucket is reduced, so they use a single bucket.
            DistributedDataParallel(chunks.config, wrapping, module, disable_bucketing=number > 0)
            for number, module in enumerate(chunks.modules)
        ]
        chunks.config.finalize_model_grads_func = finalize_model_grads
        if megatron.overlap_grad_reduce:
            hooks = [model.no_sync for model in self.models]
            chunks.config.no_sync_func = hooks[0] if len(hooks) == 1 else hooks
        self._overlaps_gather = megatron.overlap_param_gather
        self._proxy = _proxy(config.optimizer)
        self.settings = OptimizerSettings(self._proxy, config.optimizer, config.scheduler)
        self.optimizer = get_megatron_optimizer(
            _settings(config),
            self.models,
            config_overrides=_no_decay_overrides(config.optimizer),
        )
        self._chunks = chunks

    @property
    def sub_optimizers(self) -> list[Any]:
        """Megatron's optimizers, one per kind of process group (experts have a separate one)."""
        return list(getattr(self.optimizer, "chained_optimizers", None) or [self.optimizer])

    def clear_gradients(self) -> None:
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def gradients(self) -> Mapping[str, torch.Tensor]:
        return {
            name: parameter.main_grad
            for model in self.models
            for name, parameter in model.module.named_parameters()
            if hasattr(parameter, "main_grad")
        }

    def gradient_norm(self) -> torch.Tensor:
        """The norm as float64; the gradients have been summed by the backward pass."""
        self.optimizer.prepare_grads()
        device = next(self._chunks.tensors()).device
        return torch.tensor(float(self.optimizer.get_grad_norm()), dtype=torch.float64, device=device)

    def step(self, norm: torch.Tensor, max_norm: float | None) -> float:
        if max_norm is not None:
            for sub_optimizer in self.sub_optimizers:
                if parameters := sub_optimizer.get_parameters():
                    clip_grad_by_total_norm_fp32(parameters, max_norm=max_norm, total_norm=float(norm))
        with self.settings.scaled_lr() as lr:
            self._apply_proxy_settings()
        self.optimizer.step_with_ready_grads()
        # Without gradients the proxy does not change; torch requires a step before the schedule's.
        self._proxy.step()
        self.settings.scheduler.step()
        self.weight_version += 1
        return lr

    def set_lr_factor(self, factor: float) -> None:
        self.settings.lr_factor = factor

    def complete_weights(self) -> None:
        """Finish gathering the weights if gathering overlaps the next forward pass; collective."""
        if self._overlaps_gather:
            for model in self.models:
                model.start_param_sync(force_sync=True)

    @torch.no_grad()
    def set_weight(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
        """Set a weight of the model and its float32 master weight.

        The master is not copied from the model's weight: one that starts exactly at its rounded value must move by half a
        rounding step before the model changes.

        Args:
            parameter: of a chunk of this rank.
            values: of its shape.
        """
        parameter.copy_(values)
        # Megatron's master weight: None if it is on another data-parallel rank, missing if the weight itself is float32.
        master = getattr(parameter, "main_param", None)
        if master is not None:
            master.copy_(values if master.shape == values.shape else values.flatten()[self._local_slice(parameter)])

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of this rank's float32 weights and optimizer state, under Megatron's weight names."""
        names: dict[int, str] = {}
        for model in self.models:
            for name, parameter in model.module.named_parameters():
                for stepped in (parameter, getattr(parameter, "main_param", None)):
                    names[id(stepped)] = name
        for sub_optimizer in self.sub_optimizers:
            for group in getattr(sub_optimizer.optimizer, "param_groups", ()):
                for parameter in group["params"]:
                    name = names.get(id(parameter), "a weight")
                    yield f"float32 {name}", parameter
                    for key, value in sub_optimizer.optimizer.state.get(parameter, {}).items():
                        if isinstance(value, torch.Tensor):
                            yield f"{key} of {name}", value

    def tensors_by_kind(self) -> dict[str, Iterable[torch.Tensor]]:
        buffers = (each for model in self.models for each in (*model.buffers, *model.expert_parallel_buffers))
        return {
            "float32 master weights": self._chunks.master_weights(),
            "gradients": [buffer.grad_data for buffer in buffers],
            "optimizer state": [each for name, each in self.named_state() if not name.startswith("float32 ")],
        }

    def find_non_finite(self) -> str | None:
        return first_non_finite(self.named_state())

    def move(self, device: torch.device) -> None:
        """Move the optimizer's state to `device`; weights and their float32 copies are not moved."""
        for sub_optimizer in self.sub_optimizers:
            for state in sub_optimizer.state.values():
                for key, value in state.items():
                    # Step counts stay where the optimizer needs them.
                    if isinstance(value, torch.Tensor) and value.ndim > 0:
                        state[key] = value.to(device)

    def free_gradients(self) -> None:
        """Free the memory of all gradients, four bytes per parameter, until `restore_gradients`."""
        for model in self.models:
            model.offload_grad_buffers(synchronize=False, empty_cache=False)

    def restore_gradients(self) -> None:
        """Allocate gradients again, set to zero; does nothing if they are allocated."""
        for model in self.models:
            model.restore_grad_buffers(synchronize=False)

    def _local_slice(self, parameter: torch.nn.Parameter) -> slice:
        """The parameter's flat entries that this data-parallel rank updates."""
        sub_optimizer = next(each for each in self.sub_optimizers if parameter in each.model_param_gbuf_map)
        ranges = ENTRIES_OF_PARAMETER.of(sub_optimizer)(parameter)["param"]
        return slice(ranges.start, ranges.end)

    def _apply_proxy_settings(self) -> None:
        # These factors are otherwise applied by Megatron's own scheduler.
        proxy = self._proxy.param_groups[0]
        for group in self.optimizer.param_groups:
            group["lr"] = proxy["lr"] * group.get("lr_mult", 1.0)
            group["weight_decay"] = proxy["weight_decay"] * group.get("wd_mult", 1.0)
            group.update({key: proxy[key] for key in _COPIED_SETTINGS if key in proxy and key in group})
            if "fused" in group:
                # One pass over memory instead of ten.
                group["fused"] = True


def check_optimizer(config: MegatronPolicyConfig) -> None:
    """Check the arguments of optimizer and schedule.

    Raises:
        UserError: one of them rejects its arguments.
    """
    build_scheduler(_proxy(config.optimizer), config.scheduler)


def _settings(config: MegatronPolicyConfig) -> MegatronOptimizerConfig:
    given = dict(_proxy(config.optimizer).param_groups[0])
    fields: dict[str, Any] = {"lr": given["lr"], "weight_decay": given["weight_decay"], "clip_grad": 0.0}
    if config.optimizer.name.endswith("SGD"):
        fields |= {"optimizer": "sgd", "sgd_momentum": given["momentum"]}
    else:
        beta1, beta2 = given["betas"]
        fields |= {
            "optimizer": "adam",
            "adam_beta1": beta1,
            "adam_beta2": beta2,
            "adam_eps": given["eps"],
            "decoupled_weight_decay": config.optimizer.name.endswith("AdamW"),
        }
    # Adapters are float32 with a base of any data type.
    dtype = DTYPES[config.dtype_name] if config.megatron_cfg.lora is None else torch.float32
    return MegatronOptimizerConfig(
        **fields,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=config.megatron_cfg.use_distributed_optimizer,
        overlap_param_gather=config.megatron_cfg.overlap_param_gather,
    )


def _no_decay_overrides(config: OptimizerConfig) -> dict[Any, Any]:
    """Overrides for parameters without weight decay: none, as in torch, or all one-dimensional ones if configured."""
    if not config.kwargs.get("decay_matrices_only", False):
        return {}
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

    one_axis = ParamPredicate(name="one_axis", fn=lambda parameter: parameter.ndim == 1)
    return {ParamKey(predicate=one_axis): {"wd_mult": 0.0}}


def _proxy(config: OptimizerConfig) -> torch.optim.Optimizer:
    kwargs = {key: value for key, value in config.kwargs.items() if key != "decay_matrices_only"}
    kind = getattr(torch.optim, config.name.rpartition(".")[2])
    try:
        proxy: torch.optim.Optimizer = kind([torch.zeros((), requires_grad=True)], **kwargs)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"`policy.optimizer.kwargs`: {config.name} rejects {kwargs}: {error}", key="policy.optimizer.kwargs"
        ) from error
    return proxy


_OF_TORCH = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def init_state(megatron_optimizer: Any) -> None:
    """Give every parameter its initial optimizer state; does nothing for optimizers that are not torch's.

    Args:
        megatron_optimizer: one of Megatron's optimizers.
    """
    optimizer = megatron_optimizer.optimizer
    if not isinstance(optimizer, _OF_TORCH):
        return
    megatron_optimizer.init_state_fn = _do_nothing
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = _first_state(group, parameter)


def separate_step_counters(megatron_optimizer: Any) -> None:
    """Give every parameter its own step counter, on its device."""
    if not isinstance(megatron_optimizer.optimizer, _OF_TORCH):
        return
    for parameter, state in megatron_optimizer.optimizer.state.items():
        if "exp_avg" in state:
            state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).to(parameter.device, copy=True)


def match_layout(requested: Mapping[Any, Any], found: Mapping[Any, Any], *, steps: int) -> dict[Any, Any]:
    """A loaded state in the form that the current optimizers read, even if a different number of optimizers saved it.

    Args:
        requested: the current optimizers' own state; by index if there are several.
        found: the loaded state: tensors in the form of `requested`, and values saved once per optimizer.
        steps: number of steps that had been taken when it was saved.
    """
    several = all(isinstance(key, int) for key in requested)
    if all(isinstance(key, int) == several for key in found):
        return _set_step_counts(dict(found), 0)
    # Groups contain settings, which the schedule sets before each step, so the current optimizers' groups can be used.
    return _set_step_counts(_fill_missing(found, requested), steps)


def _fill_missing(found: Any, requested: Any) -> Any:
    """`found`, completed with entries of `requested`; lists are loaded at full length, but without plain values."""
    if isinstance(requested, Mapping):
        have = found or {}
        return {key: _fill_missing(have.get(key), value) for key, value in requested.items()}
    if isinstance(requested, list) and isinstance(found, list) and len(found) == len(requested):
        return [_fill_missing(*pair) for pair in zip(found, requested, strict=True)]
    return requested if found is None else found


def _set_step_counts(state: dict[Any, Any], steps: int) -> dict[Any, Any]:
    """Set the step counts that a checkpoint omits, which it also does if they are zero; changes and returns `state`."""
    entries = state.get("state")
    for group in state.get("param_groups", ()):
        if "step" in group and steps:
            group["step"] = float(steps)
    if isinstance(entries, dict) and "param_groups" in state:
        if any("exp_avg" in entry and "step" not in entry for entry in entries.values() if isinstance(entry, dict)):
            entries.setdefault("common_step", torch.tensor(float(steps)))
    else:
        for each in state.values():
            if isinstance(each, dict):
                _set_step_counts(each, steps)
    return state


@contextmanager
def patched_state_io(megatron_optimizers: Sequence[Any]) -> Iterator[None]:
    """Make distributed optimizers save and load complete state while the block runs."""
    distributed = [each for each in megatron_optimizers if isinstance(each, DistributedOptimizer)]
    for megatron_optimizer in distributed:
        gather = GATHERED_STATE.of(megatron_optimizer)
        setattr(megatron_optimizer, GATHERED_STATE.name, partial(_with_padding, megatron_optimizer, gather))
        if isinstance(megatron_optimizer.optimizer, _OF_TORCH):
            setattr(megatron_optimizer, LOADED_STATE.name, partial(_copy_into, megatron_optimizer))
    try:
        yield
    finally:
        for megatron_optimizer in distributed:
            for internal in (GATHERED_STATE, LOADED_STATE):
                megatron_optimizer.__dict__.pop(internal.name, None)


def _with_padding(megatron_optimizer: Any, gather: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The gathered state of every buffer, including the padding between its buckets."""
    found = gather(*args, **kwargs)
    for number, buffer in enumerate(megatron_optimizer.buffers):
        if found is None or len(buffer.buckets) == 1:
            continue
        for tensors in found[number].values():
            for name in ("param", "exp_avg", "exp_avg_sq"):
                tensors[name] = _insert_padding(tensors[name], buffer)
    return found


def _insert_padding(compact: torch.Tensor, buffer: Any) -> torch.Tensor:
    padded = compact.new_zeros(buffer.numel)
    start = 0
    for bucket in buffer.buckets:
        padded[bucket.offset : bucket.offset + bucket.numel_unpadded] = compact[start : start + bucket.numel_unpadded]
        start += bucket.numel_unpadded
    return padded


@torch.no_grad()
def _copy_into(megatron_optimizer: Any, model_parameter: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
    group, index = megatron_optimizer.model_param_group_index_map[model_parameter]
    own = megatron_optimizer.optimizer.param_groups[group]["params"][index]
    for name, target in {"param": own, **megatron_optimizer.optimizer.state[own]}.items():
        if name in tensors:
            target.copy_(tensors[name])


def _first_state(group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    if "betas" in group:
        return {
            "step": torch.tensor(0.0, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return {"momentum_buffer": torch.zeros_like(parameter)} if group.get("momentum") else {}


def _do_nothing(*_: Any) -> None:
    return None


class Offloader:
    """Tensors that leave the device while nothing computes with them.

    Only the memory of a storage is freed: parameters that are views of one buffer, and buckets of the distributed optimizer,
    are valid again after `restore`. Host memory is kept for the next `offload`, because pinning it takes longer than a copy.

    Args:
        tensors: returns the tensors; called at each `offload`.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._offloaded: list[tuple[torch.Tensor, torch.Tensor]] = []
        """All bytes of each storage that was freed, and their copy in host memory."""
        self._kept: dict[StorageWeakRef, torch.Tensor] = {}
        """Host memory by storage."""

    def offload(self) -> None:
        """Copy the tensors to host memory and free them; does nothing for those that have no memory."""
        storages = {StorageWeakRef(tensor.untyped_storage()): tensor for tensor in self._tensors()}
        for identity, tensor in storages.items():
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                continue
            everything = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            host = self._kept.get(identity)
            if host is None or host.numel() != everything.numel():
                host = torch.empty(everything.numel(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
                self._kept[identity] = host
            host.copy_(everything, non_blocking=True)
            self._offloaded.append((everything, host))
        if any(everything.is_cuda for everything, _ in self._offloaded):
            torch.cuda.current_stream().synchronize()
        for everything, _ in self._offloaded:
            everything.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Copy the tensors back; does nothing if they are on the device."""
        for everything, host in self._offloaded:
            everything.untyped_storage().resize_(host.numel())
            everything.copy_(host, non_blocking=True)
        self._offloaded.clear()
