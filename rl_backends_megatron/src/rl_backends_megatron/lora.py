"""Low-rank adapters (LoRA) of the linear layers of a parallel model, which are those of the Hugging Face model.

An adapted layer computes W x + s B A x, with W frozen, A [rank, in] and B [out, rank] trained, and s = alpha / rank (alpha /
sqrt(rank) with rsLoRA). Hu et al. 2021, https://arxiv.org/abs/2106.09685. Megatron-Core fuses q_proj, k_proj and v_proj into
one layer, and gate_proj and up_proj into another; each of them keeps its own A and B, as with peft.

A rank with a shard of the outputs of a layer has all of A, and its own rows of B. One with a shard of the inputs has its own
columns of A, and all of B. Ranks exchange only A x, which has `rank` numbers per token. With sequence parallelism, the factor
that is not divided is multiplied with the tokens of its rank only, so its gradient is summed over the ranks.

Adapters are float32 whatever the data type of the base, so they need no master weights.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear

from rl_backends_base.adapter_folder import ADAPTER_CONFIG, AdapterFolder, check_same_adapter, check_same_tensors
from rl_backends_megatron.bridge import Bridge, LocalParameter, SetWeight
from rl_backends_megatron.config import MegatronLoRAConfig, MegatronPolicyConfig
from rl_backends_megatron.families import Family, QueryKeyValue, Replicated, Sharded, Sizes, Weight
from rl_backends_megatron.lora_targets import LORA, adapted_layers
from rl_backends_megatron.model import sizes_of
from rl_backends_megatron.parallel import Ranks
from rl_backends_megatron.scalar_head import HEAD
from rl_core.backend import LORA_A, LORA_B, LORA_SCALE, RefitManifest
from rl_core.data.hub import model_source
from rl_core.data.model_digests import ADAPTER_WEIGHTS, BASE_WEIGHTS, weights_digest
from rl_core.errors import CheckpointError, NotSupportedError, UserError

_IN_FILE: Final = "base_model.model."
"""Beginning of the names of tensors in files of peft."""


class LayerAdapters(nn.Module):
    """The adapters of one linear layer of Megatron, one for each Hugging Face layer that it fuses and that is adapted.

    They are added to the layer's output by a hook. The layer is not part of this module.

    Args:
        layer: its weight [out, in] is this rank's shard.
        names: the Hugging Face layers that it fuses, in the order of its rows.
        targets: names of all adapted layers.
        groups: number of groups of rows; each has rows of every fused layer.
        sizes: number of rows of each fused layer in a group.
        config: `policy.megatron_cfg.lora`.
        ranks: the process groups.

    Attributes:
        enabled: whether the adapters are added.
    """

    def __init__(
        self,
        layer: Any,
        names: Sequence[str],
        targets: set[str],
        *,
        groups: int,
        sizes: Sequence[int],
        config: MegatronLoRAConfig,
        ranks: Ranks,
    ) -> None:
        super().__init__()
        self.enabled = True
        self._rank, self._scale = config.rank, config.scale
        self._groups, self._sizes = groups, tuple(sizes)
        self._group, self._in_sequence = ranks.tensor, bool(layer.sequence_parallel)
        self._divides_inputs = isinstance(layer, RowParallelLinear)
        inputs = layer.weight.shape[1]
        self._layers = [name if name in targets else None for name in names]
        for number, size in self._adapted():
            a = torch.empty(config.rank, inputs, dtype=torch.float32, device=layer.weight.device)
            b = torch.empty(groups * size, config.rank, dtype=torch.float32, device=layer.weight.device)
            self.register_parameter(f"a{number}", nn.Parameter(a))
            self.register_parameter(f"b{number}", nn.Parameter(b))
            divided, whole = (self._a(number), self._b(number))[:: 1 if self._divides_inputs else -1]
            set_tensor_model_parallel_attributes(divided, True, int(self._divides_inputs), 1)
            whole.sequence_parallel = self._in_sequence  # type: ignore[attr-defined]
        layer.register_forward_hook(self._add)

    def _adapted(self) -> Iterator[tuple[int, int]]:
        """Number of each adapted layer among the fused ones, and its rows in a group."""
        return ((n, size) for n, (name, size) in enumerate(zip(self._layers, self._sizes, strict=True)) if name is not None)

    def _a(self, number: int) -> nn.Parameter:
        parameter: nn.Parameter = getattr(self, f"a{number}")
        return parameter

    def _b(self, number: int) -> nn.Parameter:
        parameter: nn.Parameter = getattr(self, f"b{number}")
        return parameter

    def entries(self) -> Iterator[LocalParameter]:
        """Each parameter with its name in a refit, and how it is divided over the tensor-parallel ranks."""
        for number, _ in self._adapted():
            layouts = (Sharded(1), Replicated()) if self._divides_inputs else (Replicated(), Sharded(0))
            for parameter, end, layout in zip((self._a(number), self._b(number)), (LORA_A, LORA_B), layouts, strict=True):
                name = f"{self._layers[number]}{end}"
                yield LocalParameter(parameter, Weight((), (name,), layout), (name,))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Megatron's description of the parameters for its checkpoints, under their names in a refit."""
        entries = list(self.entries())
        axes = {entry.names[0]: entry.weight.layout.dim for entry in entries if entry.weight.layout.dim is not None}
        described: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {entry.names[0]: entry.parameter for entry in entries},
            "",
            axes,
            tp_group=self._group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return described

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """S B A x [s, b, out] float32 of the layer's input [s, b, in]; both are this rank's shards, as of the layer."""
        factors = torch.cat([self._a(number) for number, _ in self._adapted()])
        reduced = self._exchange(linear(x.to(torch.float32), factors))
        parts = iter(reduced.split(self._rank, dim=-1))
        return self._joined(lambda number: linear(next(parts), self._b(number)) * self._scale, reduced)

    def _exchange(self, reduced: torch.Tensor) -> torch.Tensor:
        """A x of the tokens that B is multiplied with, from what this rank has of it."""
        if self._divides_inputs:
            reduce = (
                reduce_scatter_to_sequence_parallel_region if self._in_sequence else reduce_from_tensor_model_parallel_region
            )
            exchanged: torch.Tensor = reduce(reduced, group=self._group)
        elif self._in_sequence:
            exchanged = gather_from_sequence_parallel_region(reduced, group=self._group)  # sums the gradients of the ranks
        else:
            exchanged = copy_to_tensor_model_parallel_region(reduced, group=self._group)
        return exchanged

    def _joined(self, product: Callable[[int], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """[..., out] in the order of the layer's rows, from the products of each adapted layer, [..., rows]."""
        adapted, parts = dict(self._adapted()), []
        for number, size in enumerate(self._sizes):
            if number in adapted:
                whole = product(number)
                parts.append(whole.unflatten(-1, (self._groups, size)))
            else:
                parts.append(like.new_zeros(*like.shape[:-1], self._groups, size))
        return torch.cat(parts, -1).flatten(-2)

    def _add(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, Any]) -> Any:
        if not self.enabled:
            return None
        return ((output[0] + self(inputs[0])).to(output[0].dtype), *output[1:])

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """W + s B A [out, in], this rank's shard: a new tensor, summed in float32 and rounded once."""
        update = self._joined(lambda number: ((self._b(number) @ self._a(number)) * self._scale).T, weight.T)
        return (update.T + weight).to(weight.dtype)


def add_adapters(
    chunks: Iterable[Any], family: Family, sizes: Sizes, targets: set[str], config: MegatronPolicyConfig, ranks: Ranks
) -> dict[int, LayerAdapters]:
    """Freeze the weights of this rank's chunks, and add adapters, by the identity of the adapted weight.

    A scalar head stays trainable, in float32.

    Args:
        chunks: without data-parallel wrapper.
        family: the model's tables.
        sizes: of the model.
        targets: result of `adapted_layers`.
        config: the section `policy`.
        ranks: the process groups.
    """
    lora = config.megatron_cfg.lora
    assert lora is not None
    weights = {name: weight for weight in family.weights for name in weight.megatron}
    added: dict[int, LayerAdapters] = {}
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.scalar and chunk.post_process:
            chunk.output_layer.float().requires_grad_(True)
        for block in chunk.decoder.layers:
            for name, layer in list(block.named_modules()):
                weight = weights.get(f"decoder.layers.{{layer}}.{name}.weight")
                if weight is None or not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                    continue
                names = [hf.removesuffix(".weight").format(layer=block.layer_number - 1) for hf in weight.hf]
                if not targets.intersection(names):
                    continue
                groups, rows = _rows_of(weight, layer, sizes, ranks)
                adapters = LayerAdapters(layer, names, targets, groups=groups, sizes=rows, config=lora, ranks=ranks)
                chunk.add_module(f"adapters{len(added)}", adapters)
                added[id(layer.weight)] = adapters
        if config.activation_checkpointing or config.megatron_cfg.recompute_granularity == "full":
            _require_input_gradients(chunk)
    return added


def _rows_of(weight: Weight, layer: Any, sizes: Sizes, ranks: Ranks) -> tuple[int, list[int]]:
    """How many groups the rows of a layer on this rank have, and the rows of each Hugging Face layer in one of them."""
    if not isinstance(weight.layout, QueryKeyValue):
        return 1, [layer.weight.shape[0] // len(weight.hf)] * len(weight.hf)
    if sizes.num_groups % ranks.tensor.size():
        raise NotSupportedError(
            f"`{LORA}`: {ranks.tensor.size()} tensor-parallel ranks share {sizes.num_groups} key-value heads, so a rank has "
            "parts of heads, and q_proj, k_proj and v_proj cannot be adapted. Lower `tensor_model_parallel_size` to a divisor "
            f"of {sizes.num_groups}, or set `{LORA}.exclude_modules: [q_proj, k_proj, v_proj]`.",
            key=LORA,
        )
    queries = sizes.num_heads // sizes.num_groups * sizes.head_dim
    return sizes.num_groups // ranks.tensor.size(), [queries, sizes.head_dim, sizes.head_dim]


def _require_input_gradients(chunk: Any) -> None:
    """Megatron's recomputation computes no gradients inside a layer whose input needs none, as that of frozen embeddings."""

    def require(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_(True)

    if chunk.pre_process:
        chunk.embedding.register_forward_hook(require)


class LoraAdapters:
    """The adapters of a model on all ranks, added when it is created. Methods that read or write tensors are collective.

    Args:
        chunks: this rank's chunks, without data-parallel wrapper; their weights are frozen.
        family: the model's tables.
        hf: its Hugging Face config.
        config: the section `policy`.
        ranks: the process groups.

    Raises:
        UserError: as `adapted_layers`; or no layer of this pipeline stage is adapted.
    """

    def __init__(self, chunks: Sequence[Any], family: Family, hf: Any, config: MegatronPolicyConfig, ranks: Ranks) -> None:
        lora = config.megatron_cfg.lora
        assert lora is not None
        targets = adapted_layers(hf, lora, model_name=config.model_name)
        layers = add_adapters(chunks, family, sizes_of(hf), targets, config, ranks)
        if not layers:
            raise UserError(
                f"`{LORA}.target_modules`: no layer of pipeline stage {ranks.pipeline.rank()} is adapted, but each stage needs "
                "weights that are trained. Adapt layers of all stages, or lower `pipeline_model_parallel_size`.",
                key=f"{LORA}.target_modules",
            )
        self._layers, self._config, self._ranks, self._lora = layers, config, ranks, lora
        by_name = isinstance(lora.target_modules, list)
        source, revision = model_source(config.model_name)
        base = Path(source).expanduser()
        self._settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if config.head == "tokens" else "SEQ_CLS",
            "base_model_name_or_path": str(base.resolve()) if base.exists() else source,
            "revision": revision,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": lora.target_modules if by_name else sorted(targets),
            "exclude_modules": lora.exclude_modules if by_name else None,
            "modules_to_save": None if config.head == "tokens" else [HEAD.removesuffix(".weight")],
            "use_rslora": lora.use_rslora,
            "use_dora": False,
            "inference_mode": True,
        }
        self._bridge = _AdapterBridge(chunks, family, sizes_of(hf), ranks, tied=False, num_experts=None)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of each trained tensor of the whole model: A and B of each layer, and a scalar head."""
        return self._bridge.manifest

    @property
    def manifest(self) -> RefitManifest:
        """Name to (shape, dtype) of unmerged adapters in a refit."""
        scales = {name.removesuffix(LORA_A) + LORA_SCALE: () for name in self.shapes if name.endswith(LORA_A)}
        return {name: (shape, "float32") for name, shape in {**self.shapes, **scales}.items()}

    def export(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of unmerged adapters on every rank, float32, in the order of the manifest; all by default."""
        yield from self._bridge.export(names)
        for name in self.manifest if names is None else names:
            if name.endswith(LORA_SCALE):
                yield name, torch.tensor(self._lora.scale, dtype=torch.float32, device=self._ranks.device)

    def merged(self, parameter: nn.Parameter) -> torch.Tensor:
        """This rank's shard of a base weight with its adapters, or the weight itself if it has none."""
        layer = self._layers.get(id(parameter))
        return parameter.detach().to(self._dtype) if layer is None else layer.merged(parameter.detach())

    @cached_property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self._config.dtype_name)  # type: ignore[no-any-return]

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute with the base model, without adapters, while the block runs."""
        for layer in self._layers.values():
            layer.enabled = False
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enabled = True

    def init(self, into: SetWeight) -> None:
        """Set A to random values, the same for any arrangement of ranks, and B to zeros; or both to those of `adapter_path`."""
        self._bridge.load(_Tensors(self._initial), into, names=self.shapes.keys() - {HEAD})
        if self._lora.adapter_path is None:
            return
        folder = AdapterFolder(self._lora.adapter_path)
        folder.check(self._lora.model_dump(), model_name=self._config.model_name, head=self._config.head, at=LORA)
        try:
            self.load(folder.path, into, head_is_optional=True)
        except CheckpointError as error:
            raise UserError(f"`{LORA}.adapter_path`: {error}", key=f"{LORA}.adapter_path") from error

    def _initial(self, name: str) -> torch.Tensor:
        tensor = torch.zeros(self.shapes[name])
        if not name.endswith(LORA_A):
            return tensor
        # As peft: uniform in +-1/sqrt(in) (He et al. 2015 with a slope of sqrt(5)).
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._lora.seed} {name}".encode()))
        return tensor.uniform_(-1.0, 1.0, generator=generator) / math.sqrt(tensor.shape[1])

    def save(self, folder: Path) -> None:
        """Write the adapters in peft's format, from rank 0: their config and one safetensors file."""
        tensors = {_IN_FILE + name: tensor.detach().cpu().contiguous().clone() for name, tensor in self._bridge.export()}
        if self._ranks.rank == 0:
            self.save_config(folder)
            digest = weights_digest(self._config.model_name)
            recorded = {} if digest is None else {BASE_WEIGHTS: digest}
            save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt", **recorded})

    def save_config(self, folder: Path) -> None:
        """Write the adapters' config."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ADAPTER_CONFIG).write_text(json.dumps(self._settings, indent=2) + "\n", encoding="utf-8")

    def load(self, folder: Path, into: SetWeight, *, head_is_optional: bool = False) -> None:
        """Load the adapters from `folder`; every rank reads it.

        Args:
            folder: as written by `save`, or by peft.
            into: sets one weight.
            head_is_optional: keep the scalar head if there is none in the folder.

        Raises:
            CheckpointError: the folder is missing, incomplete, or has another adapter; the adapters are unchanged.
        """
        check_same_adapter(folder, self._settings, at=LORA)
        here = {_IN_FILE + name: shape for name, shape in self.shapes.items()}
        try:
            with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
                saved = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
                if head_is_optional and _IN_FILE + HEAD not in saved:
                    here.pop(_IN_FILE + HEAD, None)
                check_same_tensors(folder, saved, here, at=LORA)
                names = {name.removeprefix(_IN_FILE) for name in here}
                self._bridge.load(_Tensors(lambda name: file.get_tensor(_IN_FILE + name)), into, names=names)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"Cannot read the adapter in {folder}: {type(error).__name__}: {error}") from error


class _AdapterBridge(Bridge):
    """Maps the trained parameters of a model with adapters to their names in a refit."""

    def _parameters_of(self, chunk: Any) -> Iterator[LocalParameter]:
        for layer in chunk.children():
            if isinstance(layer, LayerAdapters):
                yield from layer.entries()
        if chunk.scalar and chunk.post_process:
            yield LocalParameter(chunk.output_layer.weight, Weight((), (HEAD,), Replicated()), (HEAD,))


class _Tensors:
    """A tensor source; `whole` returns the full tensor with a name."""

    def __init__(self, whole: Callable[[str], torch.Tensor]) -> None:
        self.whole = whole

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Entries from `start` to `stop` along `dim`."""
        return self.whole(name).narrow(dim, start, stop - start)

    def size(self, name: str, dim: int) -> int:
        """The tensor's length along `dim`."""
        return self.whole(name).shape[dim]
