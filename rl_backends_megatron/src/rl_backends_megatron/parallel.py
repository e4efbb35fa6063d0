"""The ranks' meeting: process groups of Megatron-Core by the named axes, joined and left; knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from rl_backends_megatron.config import MegatronConfig
from rl_backends_megatron.cpu_shim import check_megatron, cpu_shim
from rl_core.cluster.process_groups import join_process_group
from rl_core.errors import UserError
from rl_core.interfaces.worker_context import WorkerContext


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The process groups that this rank belongs to.

    Attributes:
        device: what this rank computes on.
        tensor: shares each matrix.
        pipeline: has the other layers.
        context: shares each row.
        expert: has the other experts.
        expert_tensor: shares each matrix of an expert.
        rank: in the world.
        world_size: of the world.
    """

    device: torch.device
    tensor: Any
    pipeline: Any
    context: Any
    expert: Any
    expert_tensor: Any
    rank: int
    world_size: int

    @property
    def is_last_stage(self) -> bool:
        """Whether logits, and so losses, appear here."""
        last: bool = self.pipeline.rank() == self.pipeline.size() - 1
        return last

    def any(self, flag: bool) -> bool:
        """Whether it holds on any rank of the world; collective."""
        number = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return bool(number.item() > 0)

    def from_last_stage(self, value: Any) -> Any:
        """What the last pipeline stage has, on every stage; collective over the pipeline.

        Args:
            value: a picklable object; read on the last stage only.
        """
        if self.pipeline.size() == 1:
            return value
        box = [value]
        source = dist.get_global_rank(self.pipeline, self.pipeline.size() - 1)
        dist.broadcast_object_list(box, src=source, group=self.pipeline)
        return box[0]

    def tensor_from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` as the last pipeline stage has it; of one shape and dtype everywhere, on any device; collective."""
        if self.pipeline.size() == 1:
            return tensor
        sent = tensor.to(self.device)
        source = dist.get_global_rank(self.pipeline, self.pipeline.size() - 1)
        dist.broadcast(sent, src=source, group=self.pipeline)
        return sent.to(tensor.device)


def join(context: WorkerContext, config: MegatronConfig) -> Ranks:
    """Meet the other ranks and form groups: tensor-parallel ranks are neighbours, pipeline stages lie farthest apart.

    Raises:
        UserError: this process belongs to a process group already, or Megatron-Core is another than expected.
    """
    check_megatron()
    if dist.is_initialized():
        raise UserError(
            "This process has a torch.distributed process group already, and Megatron-Core keeps its own for the whole "
            "process: shut the other policy down first, or give this one a cluster (`cluster.backend: ray`)."
        )
    # Megatron takes a GPU wherever torch sees one, so in this process the device is not a matter of choice.
    on_gpu = torch.cuda.is_available()
    if on_gpu and context.device == "cpu" and not context.run_in_process:
        raise UserError(
            "The policy's ranks were given CPUs, and torch sees a GPU, which Megatron-Core would take. Set "
            "`cluster.use_gpus: true`, or CUDA_VISIBLE_DEVICES='' to train on CPUs."
        )
    if on_gpu:
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    join_process_group(context, backend, timeout=timedelta(seconds=config.distributed_timeout_s))
    with cpu_shim():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_ranks,
            distributed_timeout_minutes=max(1, round(config.distributed_timeout_s / 60)),
        )
        # The tracker for inference keeps no device state: there is no dropout whose draws would have to agree.
        tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)
    return Ranks(
        device=torch.device("cuda:0" if on_gpu else "cpu"),
        tensor=parallel_state.get_tensor_model_parallel_group(),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        context=parallel_state.get_context_parallel_group(),
        expert=parallel_state.get_expert_model_parallel_group(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_group(),
        rank=context.rank,
        world_size=context.world_size,
    )


def leave() -> None:
    """Forget the groups; calling it twice is fine."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
