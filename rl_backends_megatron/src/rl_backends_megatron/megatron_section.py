"""The section `policy.megatron_cfg`. Does not import torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rl_core.config.schema import Section


class MegatronConfig(Section):
    """`policy.megatron_cfg`: parallelism and options of Megatron-Core.

    Ranks that remain after tensor, pipeline and context parallelism are data parallel.
    """

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Tensor parallelism: number of ranks that share each weight matrix. They are adjacent ranks; keep them on one node."""
    sequence_parallel: bool = False
    """Whether to shard activations between matrix multiplications along the sequence over the tensor-parallel ranks: less
    memory, same communication volume."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """Pipeline parallelism: number of stages that the layers are divided into."""
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=2)
    """Number of model chunks per stage (interleaved schedule): smaller pipeline bubbles, more communication."""
    num_layers_in_first_pipeline_stage: int | None = Field(default=None, ge=1)
    """Number of layers in the first stage; by default, layers are divided evenly."""
    num_layers_in_last_pipeline_stage: int | None = Field(default=None, ge=1)
    """Number of layers in the last stage; by default, layers are divided evenly."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Context parallelism: number of ranks that share each row, for rows that are too long for one device."""
    expert_model_parallel_size: int = Field(default=1, ge=1)
    """Expert parallelism: number of ranks, among the data- and context-parallel ones, that the experts of a mixture are divided
    over."""
    expert_tensor_parallel_size: int | None = Field(default=None, ge=1)
    """Number of ranks that share each matrix of an expert. Defaults to 1 with expert parallelism and to
    `tensor_model_parallel_size` without. More than one with expert parallelism requires NCCL."""
    use_distributed_optimizer: bool | None = None
    """Whether to shard optimizer state and float32 weights over the data-parallel ranks. By default, Adam does on GPUs, and a
    resumed run does what its checkpoint did."""
    overlap_grad_reduce: bool = False
    """Whether to overlap the gradient reduction over data-parallel ranks with the backward pass."""
    overlap_param_gather: bool = False
    """Whether to overlap gathering the updated weights with the next forward pass. Requires `use_distributed_optimizer` and
    `overlap_grad_reduce`."""
    ddp_bucket_size: int | None = Field(default=None, ge=1)
    """Number of parameters per gradient bucket; chosen by Megatron by default."""
    grad_reduce_in_fp32: bool = True
    """Whether to accumulate and reduce gradients in float32 if weights are bfloat16."""
    recompute_granularity: Literal["selective", "full"] | None = None
    """What to recompute in the backward pass: only attention (`selective`), or whole layers (`full`).
    `policy.activation_checkpointing` means `full`."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Which whole layers to recompute: `uniform` recomputes all of them in groups of `recompute_num_layers`, `block` only the
    first `recompute_num_layers` of each stage."""
    recompute_num_layers: int = Field(default=1, ge=1)
    """Number of layers; see `recompute_method`."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Implementation of the layers: `local` (PyTorch) or `transformer_engine` (GPU only). `auto` uses Transformer Engine if
    it is installed."""
    use_flash_attention: bool | None = None
    """Whether to use flash attention. True fails without a flash attention kernel; false uses the plain kernel. By default, the
    fastest available kernel is used."""
    moe_grouped_gemm: bool | None = None
    """Whether to compute all experts of a rank in one kernel. Requires Transformer Engine, and is the default with it."""
    make_vocab_size_divisible_by: int = Field(default=1, ge=1)
    """Pad each rank's shard of the vocabulary to a multiple of this value. Padding entries have probability 0."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Number of positions for which float32 logits are in memory at one time."""
    reference: bool = True
    """Whether a reference policy is available: a frozen copy of the initial weights, made when it is first needed."""
    trust_remote_code: bool = False
    """Whether to run Python code that comes with the tokenizer."""
    seed: int = 0
    """Seed of `generate` for rows that do not specify one."""
    distributed_timeout_s: float = Field(default=600.0, gt=0.0)
    """Timeout of collective operations between ranks, in seconds."""

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks that hold one copy of the model together."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def expert_tensor_ranks(self) -> int:
        """`expert_tensor_parallel_size`, or its default."""
        default = 1 if self.expert_model_parallel_size > 1 else self.tensor_model_parallel_size
        return self.expert_tensor_parallel_size or default

    @model_validator(mode="after")
    def _check_parallel_sizes(self) -> Self:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel shards activations over tensor-parallel ranks, but there is only one: increase "
                "tensor_model_parallel_size, or leave sequence_parallel out"
            )
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                "virtual_pipeline_model_parallel_size splits pipeline stages into chunks, but there is only one stage: "
                "increase pipeline_model_parallel_size, or leave it out"
            )
        uneven = self.num_layers_in_first_pipeline_stage or self.num_layers_in_last_pipeline_stage
        if uneven and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage require several stages: increase "
                "pipeline_model_parallel_size, or leave them out"
            )
        return self

    @model_validator(mode="after")
    def _check_option_requirements(self) -> Self:
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "overlap_param_gather requires use_distributed_optimizer and overlap_grad_reduce: set both, or leave "
                "overlap_param_gather out"
            )
        if self.expert_model_parallel_size == 1 and self.expert_tensor_ranks != self.tensor_model_parallel_size:
            raise ValueError(
                f"expert_tensor_parallel_size {self.expert_tensor_ranks} differs from tensor_model_parallel_size "
                f"{self.tensor_model_parallel_size} without expert parallelism: Megatron-Core would not sum the gradients of "
                "experts that several ranks hold. Leave it out, or increase expert_model_parallel_size"
            )
        if self.moe_grouped_gemm and self.transformer_impl == "local":
            raise ValueError(
                "moe_grouped_gemm requires Transformer Engine: leave it out, or set transformer_impl: transformer_engine"
            )
        return self
