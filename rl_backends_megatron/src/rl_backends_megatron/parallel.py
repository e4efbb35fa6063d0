"""Creates and destroys Megatron-Core's process groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from rl_backends_base.parallel import join_group
from rl_backends_megatron.config import MegatronConfig
from rl_backends_megatron.cpu_shim import cpu_shim
from rl_backends_megatron.megatron_internals import check_megatron
from rl_core.errors import UserError
from rl_core.interfaces.worker_context import WorkerContext


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The process groups of this rank.

    Attributes:
        device: device of this rank.
        tensor: ranks that share each matrix.
        pipeline: ranks with the other layers.
        context: ranks that share each row.
        expert: ranks with the other experts.
        expert_tensor: ranks that share each matrix of an expert.
        rank: global rank.
        world_size: number of ranks.
    """

    device: torch.device
    tensor: Any
    pipeline: Any
    context: Any
    expert: Any
    expert_tensor: Any
    rank: int
    world_size: int

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; collective."""
        number = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return bool(number.item() > 0)

    def from_last_stage(self, value: Any) -> Any:
        """The last pipeline stage's value, on every stage; collective over the pipeline.

        Args:
            value: a picklable object; used on the last stage only.
        """
        if self.pipeline.size() == 1:
            return value
        box = [value]
        source = dist.get_global_rank(self.pipeline, self.pipeline.size() - 1)
        dist.broadcast_object_list(box, src=source, group=self.pipeline)
        return box[0]

    def tensor_from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """The last pipeline stage's tensor, of the same shape and dtype on all stages, on any device; collective."""
        if self.pipeline.size() == 1:
            return tensor
        sent = tensor.to(self.device)
        source = dist.get_global_rank(self.pipeline, self.pipeline.size() - 1)
        dist.broadcast(sent, src=source, group=self.pipeline)
        return sent.to(tensor.device)


def join(context: WorkerContext, config: MegatronConfig) -> Ranks:
    """Join the process groups. Tensor-parallel ranks are adjacent; pipeline stages are farthest apart.

    Raises:
        UserError: this process already has a process group, or the installed version of Megatron-Core is not the required one.
    """
    check_megatron()
    if dist.is_initialized():
        raise UserError(
            "This process already has a torch.distributed process group, but Megatron-Core needs its own for the whole "
            "process: shut down the other policy first, or run this one on a cluster (`cluster.backend: ray`)."
        )
    # Megatron uses a GPU whenever torch finds one, so the device of this process cannot be chosen.
    on_gpu = torch.cuda.is_available()
    if on_gpu and context.device == "cpu" and not context.run_in_process:
        raise UserError(
            "The policy's ranks were assigned CPUs, but torch finds a GPU, which Megatron-Core would use. Set "
            "`cluster.use_gpus: true`, or CUDA_VISIBLE_DEVICES='' to train on CPUs."
        )
    join_group(context, on_gpu=on_gpu, timeout_s=config.distributed_timeout_s)
    return create_groups(config, rank=context.rank, world_size=context.world_size)


def create_groups(config: MegatronConfig, *, rank: int, world_size: int, has_gloo: bool = True) -> Ranks:
    """Create Megatron's groups of this rank from torch's default group; collective.

    Args:
        config: the section.
        rank: global rank.
        world_size: number of ranks.
        has_gloo: whether torch's group has the backend gloo, which Megatron uses for checkpoints.
    """
    with cpu_shim():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_ranks,
            distributed_timeout_minutes=max(1, round(config.distributed_timeout_s / 60)),
            create_gloo_process_groups=has_gloo,
        )
        # The tracker for inference has no device state, which is only needed for dropout.
        tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)
    return Ranks(
        device=torch.device("cuda:0" if torch.cuda.is_available() else "cpu"),
        tensor=parallel_state.get_tensor_model_parallel_group(),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        context=parallel_state.get_context_parallel_group(),
        expert=parallel_state.get_expert_model_parallel_group(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_group(),
        rank=rank,
        world_size=world_size,
    )


def leave() -> None:
    """Destroy the groups; may be called twice."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
