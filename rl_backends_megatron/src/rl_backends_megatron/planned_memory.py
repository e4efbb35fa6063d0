"""Predicts the memory of a rank from the model's config, without weights and without other ranks.

Megatron's own layers run one microbatch, forward and backward, on tensors without data, in process groups of torch's backend
`fake`, whose collectives do nothing. torch's tracker counts the bytes. What a layer adds is measured with two small depths and
multiplied by the depth.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.hooks import RemovableHandle

from rl_backends_base import MicrobatchSplitter
from rl_backends_megatron.cpu_shim import cpu_shim
from rl_backends_megatron.families import family_of
from rl_backends_megatron.hf_folder import find_folder, read_config
from rl_backends_megatron.lora import add_adapters
from rl_backends_megatron.lora_targets import adapted_layers
from rl_backends_megatron.megatron_internals import check_megatron
from rl_backends_megatron.model import DTYPES, build_chunks, is_tied, matrix_sizes, sizes_of
from rl_backends_megatron.model_inputs import Layout, ModelInput
from rl_backends_megatron.parallel import Ranks, create_groups, leave
from rl_backends_megatron.scalar_head import with_scalar_head
from rl_backends_megatron.scoring import OutputHead, forward, forward_backward
from rl_core.backend import BatchedDataDict
from rl_core.errors import UserError

if TYPE_CHECKING:
    from rl_backends_megatron.config import MegatronConfig, MegatronPolicyConfig

_DEPTHS: Final = (2, 4)
"""Numbers of layers that are traced."""


class PolicyMemory:
    """The memory of one rank of a policy. See `ModelMemory` in `rl_train.plan.planner`."""

    is_shared = False
    libraries = 420 * 2**20
    """Proportional set size of a process after its imports; those of Megatron-Core need 70 MiB more than Transformers alone."""

    def __init__(self, config: MegatronPolicyConfig) -> None:
        self._config = config
        self._hf: Any = read_config(find_folder(config.model_name, weights=False))

    def by_phase(
        self,
        *,
        ranks: int,
        train: tuple[int, int] | None,
        several: bool,
        score: tuple[int, int] | None,
        reference: bool,
        on_gpu: bool,
    ) -> dict[str, dict[str, int]]:
        counts = self._traced(ranks, None)
        weights = counts["weights"]
        held = self._state(weights, counts["trained"], ranks)
        if reference and self._config.megatron_cfg.lora is None:
            held["reference weights"] = DTYPES[self._config.dtype_name].itemsize * weights
        phases: dict[str, dict[str, int]] = {"held": held}
        if score is not None:
            phases["score"] = self._traced(ranks, score, training=False)
        if train is not None:
            phases["train"] = self._traced(ranks, train, training=True)
            if several:  # the first stage has forwarded as many microbatches as there are stages when the backward pass begins
                phases["train"]["activations"] *= self._config.megatron_cfg.pipeline_model_parallel_size
            phases["update"] = {}
        return phases

    @property
    def stages(self) -> int:
        return self._config.megatron_cfg.pipeline_model_parallel_size

    def matrix_sizes(self) -> dict[str, float]:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self._hf)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        if self._config.head == "scalar":
            shapes.pop("lm_head.weight", None)
        lora, adapters = self._config.megatron_cfg.lora, None
        if lora is not None:  # A and B of each layer, as one matrix
            adapted = adapted_layers(self._hf, lora, model_name=self._config.model_name)
            adapters = [(lora.rank, sum(shapes[f"{name}.weight"])) for name in sorted(adapted)]
        return matrix_sizes(shapes, self._hf, tied=is_tied(self._hf, self._config), adapters=adapters)

    def shares_prefixes(self, *, on_gpu: bool) -> bool:
        """False: rows of the same prompt are computed separately."""
        return False

    def not_counted(self) -> list[str]:
        megatron, left_out = self._config.megatron_cfg, []
        if self._is_mixture:
            left_out.append("activations, because which tokens an expert gets depends on the data")
        if megatron.pipeline_model_parallel_size > 1:
            left_out.append("differences of pipeline stages: each is counted with embedding and output layer")
        if megatron.context_parallel_size > 1:
            left_out.append("keys and values that context-parallel ranks exchange")
        return left_out

    def saving_overrides(self) -> list[str]:
        lora = [] if self._config.megatron_cfg.lora is not None else ["++policy.megatron_cfg.lora.rank=16"]
        return ["++policy.megatron_cfg.use_distributed_optimizer=true", *lora]

    @property
    def _is_mixture(self) -> bool:
        """Whether the model is a mixture of experts."""
        return bool(getattr(self._hf, "num_experts", None) or getattr(self._hf, "num_local_experts", None))

    def _state(self, weights: int, trained: int, ranks: int) -> dict[str, int]:
        """Bytes of weights, gradients, masters and optimizer state, from numbers of values.

        Megatron keeps a buffer of all gradients. A float32 weight is its own master, and so is an adapter. The distributed
        optimizer shards masters and moments over the ranks that have the same weights (https://arxiv.org/abs/1910.02054,
        section 5.1).
        """
        config, megatron = self._config, self._config.megatron_cfg
        width = DTYPES[config.dtype_name].itemsize
        adapts = megatron.lora is not None
        held = {"weights": width * weights if not adapts else width * (weights - trained) + 4 * trained}
        if config.frozen:
            return held
        same = ranks // (megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size)
        shards = same if megatron.use_distributed_optimizer else 1
        moments = 2 if "Adam" in config.optimizer.name else int(bool(config.optimizer.kwargs.get("momentum")))
        held["gradients"] = (4 if megatron.grad_reduce_in_fp32 or adapts else width) * trained
        held["optimizer state"] = 4 * moments * trained // shards
        if width < 4 and not adapts:
            held["float32 master weights"] = 4 * weights // shards
        return held

    def _traced(self, ranks: int, shape: tuple[int, int] | None, *, training: bool = False) -> dict[str, int]:
        """The peak bytes of a microbatch on the stage with the most layers; without `shape`, its numbers of values."""
        megatron = self._config.megatron_cfg
        if shape is not None:
            shape = (shape[0], -(-shape[1] // megatron.context_parallel_size))
        with _lone_rank(megatron, ranks) as joined:
            few, more = (self._trace(joined, shape, layers, training=training) for layers in _DEPTHS)
        layers = _layers_of_stage(self._hf.num_hidden_layers, megatron)
        steps = (layers - _DEPTHS[0]) / (_DEPTHS[1] - _DEPTHS[0])
        return {part: round(few[part] + steps * (more[part] - few[part])) for part in more}

    def _trace(self, ranks: Ranks, shape: tuple[int, int] | None, layers: int, *, training: bool) -> dict[str, int]:
        config = self._config.model_copy(update={"megatron_cfg": _without_stages(self._config.megatron_cfg)})
        hf = type(self._hf)(**{**self._hf.to_dict(), **_fewer(self._hf, layers)})
        family = family_of(hf, model_name=config.model_name)
        family = with_scalar_head(family) if config.head == "scalar" else family
        given = _microbatch(config, ranks, shape or (1, 1))
        head = OutputHead(config, ranks, vocab_size=self._hf.vocab_size)
        with FakeTensorMode(allow_non_fake_inputs=True), cpu_shim():
            [module] = build_chunks(hf, family, config, device=ranks.device.type).modules
            if (lora := config.megatron_cfg.lora) is not None:
                targets = adapted_layers(self._hf, lora, model_name=config.model_name)
                add_adapters([module], family, sizes_of(hf), targets, config, ranks)
                # torch's tracker registers hooks for the gradients of all parameters, also of frozen ones.
                for parameter in (each for each in module.parameters() if not each.requires_grad):
                    parameter.register_hook = lambda hook: RemovableHandle(OrderedDict())
                    parameter.register_post_accumulate_grad_hook = parameter.register_hook
            if shape is None:
                parameters = list(module.parameters())
                trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
                return {"weights": sum(parameter.numel() for parameter in parameters), "trained": trained}
            if self._is_mixture:
                return {"activations": 0, "logits and temporary tensors": 0}
            with MemTracker() as tracker:
                if training:
                    forward_backward([module], [given], lambda output, _: (head(output, given).sum(), None))
                else:
                    forward([module], [given], lambda output, _: head(output, given))
        [kinds] = (each for each in tracker.get_tracker_snapshot("peak").values() if each["Total"])
        sizes = {getattr(kind, "value", kind): size for kind, size in kinds.items()}
        return {"activations": sizes["Activation"], "logits and temporary tensors": sizes["Temp"]}


def _fewer(hf: Any, layers: int) -> dict[str, Any]:
    """The changes of a model's config for fewer layers."""
    depth = hf.num_hidden_layers
    lists = {key: value for key, value in hf.to_dict().items() if isinstance(value, list) and len(value) == depth}
    return {"num_hidden_layers": layers, **{key: (value * layers)[:layers] for key, value in lists.items()}}


def _without_stages(megatron: MegatronConfig) -> MegatronConfig:
    """The same parallelism in one stage; context-parallel ranks have equal shares, so they are like data-parallel ones."""
    stages = {
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "context_parallel_size": 1,
    }
    return megatron.model_copy(update=stages)


def _layers_of_stage(layers: int, megatron: MegatronConfig) -> int:
    """Number of layers of the stage with the most."""
    ends = [megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage]
    fixed = [each for each in ends if each is not None]
    between = megatron.pipeline_model_parallel_size - len(fixed)
    return max([*fixed, -(-(layers - sum(fixed)) // between) if between else 0])


def _microbatch(config: MegatronPolicyConfig, ranks: Ranks, shape: tuple[int, int]) -> ModelInput:
    rows, length = shape
    ids, ones = torch.zeros(shape, dtype=torch.int64), torch.ones(rows, dtype=torch.float32)
    batch: BatchedDataDict[Any] = BatchedDataDict(
        {"input_ids": ids, "input_lengths": torch.full((rows,), length), "token_mask": ids + 1, "sample_mask": ones}
    )
    return Layout(config, ranks).form(MicrobatchSplitter(config).read(batch, training=True))


@contextmanager
def _lone_rank(megatron: MegatronConfig, ranks: int) -> Iterator[Ranks]:
    """Rank 0 of a stage, in groups whose other ranks do not exist.

    Raises:
        UserError: this process already has a process group.
    """
    check_megatron()
    if dist.is_initialized():
        raise UserError("A Megatron policy can only be planned in a process without a torch.distributed group.")
    size = max(megatron.tensor_model_parallel_size, ranks // megatron.pipeline_model_parallel_size)
    with torch.random.fork_rng(devices=[]):
        dist.init_process_group("fake", rank=0, world_size=size)
        try:
            yield create_groups(_without_stages(megatron), rank=0, world_size=size, has_gloo=False)
        finally:
            leave()
