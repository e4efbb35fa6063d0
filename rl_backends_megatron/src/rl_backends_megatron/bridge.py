"""Converts weights between a Hugging Face checkpoint and this rank's model chunks, using the tables in `families`.

Loading reads only what this rank needs. Exporting streams (name, full tensor) to every rank, one Megatron parameter at a time:
gathered over tensor-parallel ranks, split, broadcast over pipeline stages, and for experts gathered over expert-parallel ranks.
A round trip is exact to the bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rl_backends_megatron.families import Family, Sizes, Source, Weight
from rl_backends_megatron.parallel import Ranks
from rl_core.errors import CheckpointError, NotSupportedError

SetWeight = Callable[[torch.nn.Parameter, torch.Tensor], object]
"""Sets a weight to the values of a tensor of the same shape, of any float dtype and on any device."""

_PLACEHOLDER = re.compile(r"\\\{(layer|expert)\\\}")


@dataclass(frozen=True, kw_only=True)
class Export:
    """The tensors that one Megatron parameter is exported as.

    Attributes:
        names: the Hugging Face tensors; one tuple per expert-parallel rank for an expert's parameter, else one.
        shapes: shapes of one tuple's tensors.
        is_expert: whether the parameter belongs to an expert.
    """

    names: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    is_expert: bool


@dataclass(frozen=True)
class LocalParameter:
    """A parameter, or a shard of one, on this rank."""

    parameter: torch.nn.Parameter
    weight: Weight
    names: tuple[str, ...]


class Bridge:
    """Maps one model's weights between Megatron and Hugging Face. Its construction is collective.

    Args:
        chunks: this rank's model chunks without data-parallel wrapper.
        family: the model's tables.
        sizes: of the model.
        ranks: the process groups.
        tied: whether the output layer shares the embedding's weights.
        num_experts: number of experts, for a mixture.
    """

    def __init__(
        self, chunks: Sequence[Any], family: Family, sizes: Sizes, ranks: Ranks, *, tied: bool, num_experts: int | None
    ) -> None:
        self._ranks, self._sizes, self._tied = ranks, sizes, tied
        self._experts_here = (num_experts or 0) // ranks.expert.size()
        self._patterns = [(_pattern(name), weight) for weight in family.weights for name in weight.megatron]
        self._local = [entry for chunk in chunks for entry in self._parameters_of(chunk)]
        self._exported = [entry for entry in self._local if not self._is_copy(entry)]
        self._exports = self._collect_exports()

    @torch.no_grad()
    def load(self, source: Source, into: SetWeight = torch.Tensor.copy_, *, names: Container[str] | None = None) -> None:
        """Load this rank's weights from `source`.

        Args:
            source: the checkpoint.
            into: sets a weight to values of the checkpoint's dtype.
            names: load only weights whose first tensor is one of these; all by default.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """
        for entry in self._local:
            if names is not None and entry.names[0] not in names:
                continue
            group = self._tensor_group(entry.weight)
            shard = entry.weight.layout.load(
                source, entry.names, group.rank(), group.size(), entry.parameter.shape, self._sizes
            )
            if shard.shape != entry.parameter.shape:
                raise CheckpointError(
                    f"{', '.join(entry.names)} have shape {tuple(shard.shape)} on this rank, but the model needs "
                    f"{tuple(entry.parameter.shape)}: the weights do not match config.json."
                )
            into(entry.parameter, shard)

    @property
    def manifest(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of every tensor of the full model, in the order of `export`."""
        shapes: dict[str, tuple[int, ...]] = {}
        for stage in self._exports:
            for export in stage:
                for names in export.names:
                    shapes.update(zip(names, export.shapes, strict=True))
        return shapes

    @torch.no_grad()
    def export(
        self,
        names: Sequence[str] | None = None,
        *,
        value: Callable[[torch.nn.Parameter], torch.Tensor] = lambda parameter: parameter.data,
        dtype: torch.dtype | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor) on every rank; collective.

        Args:
            names: these, in the manifest's order; all by default.
            value: returns the tensor to export for each parameter.
            dtype: dtype of what `value` returns; that of the weights by default.
        """
        dtype = dtype or self._local[0].parameter.dtype
        wanted = None if names is None else set(names)
        for stage, exports in enumerate(self._exports):
            for index, export in enumerate(exports):
                chosen = [n for n in range(len(export.shapes)) if wanted is None or any(e[n] in wanted for e in export.names)]
                if not chosen:
                    continue
                entry = self._exported[index] if stage == self._ranks.pipeline.rank() else None
                gathered = self._gather(entry, export, stage, chosen, value, dtype)
                for name, tensor in _named(export, chosen, gathered):
                    if wanted is None or name in wanted:
                        yield name, tensor

    def _gather(
        self,
        entry: LocalParameter | None,
        export: Export,
        stage: int,
        chosen: Sequence[int],
        value: Callable[..., torch.Tensor],
        dtype: torch.dtype,
    ) -> Iterator[list[torch.Tensor]]:
        """For each chosen tensor: those of all expert-parallel ranks, or the single one."""
        device = self._local[0].parameter.device
        tensors: list[torch.Tensor] = []
        if entry is not None:
            shard = value(entry.parameter)
            tensors = entry.weight.layout.split(self._join_shards(shard, entry.weight), self._sizes)
        for number in chosen:
            if entry is None:
                tensor = torch.empty(export.shapes[number], dtype=dtype, device=device)
            else:
                tensor = tensors[number].contiguous()
            if self._ranks.pipeline.size() > 1:
                source = dist.get_global_rank(self._ranks.pipeline, stage)
                dist.broadcast(tensor, src=source, group=self._ranks.pipeline)
            if len(export.names) == 1:
                yield [tensor]
                continue
            per_rank = [torch.empty_like(tensor) for _ in export.names]
            dist.all_gather(per_rank, tensor, group=self._ranks.expert)
            yield per_rank

    def _join_shards(self, shard: torch.Tensor, weight: Weight) -> torch.Tensor:
        group = self._tensor_group(weight)
        if weight.layout.dim is None or group.size() == 1:
            return shard
        shards = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(shards, shard.contiguous(), group=group)
        return weight.layout.join(shards)

    def _tensor_group(self, weight: Weight) -> Any:
        return self._ranks.expert_tensor if weight.is_expert else self._ranks.tensor

    def _parameters_of(self, chunk: Any) -> Iterator[LocalParameter]:
        for name, parameter in chunk.named_parameters():
            # The index in the name counts from the chunk's first layer; `layer_number` counts from the model's.
            local = re.match(r"decoder\.layers\.(\d+)\.", name)
            layer = chunk.decoder.layers[int(local[1])].layer_number - 1 if local else None
            yield self._match(name, parameter, layer)

    def _match(self, name: str, parameter: torch.nn.Parameter, layer: int | None) -> LocalParameter:
        for pattern, weight in self._patterns:
            match = pattern.fullmatch(name)
            if not match:
                continue
            numbers: dict[str, int] = {}
            if layer is not None:
                numbers["layer"] = layer
            if weight.is_expert:
                numbers["expert"] = int(match["expert"]) + self._ranks.expert.rank() * self._experts_here
            names = tuple(hf.format(**numbers) for hf in weight.hf)
            if self._tied and names == ("lm_head.weight",):
                names = ("model.embed_tokens.weight",)
            return LocalParameter(parameter, weight, names)
        raise NotSupportedError(
            f"Megatron-Core created a parameter {name}, which is missing in the model's table in rl_backends_megatron.families."
        )

    def _collect_exports(self) -> list[list[Export]]:
        """Exports of every pipeline stage."""
        own = [self._export_of(entry) for entry in self._exported]
        if self._ranks.expert.size() > 1:
            of_experts: list[Any] = [None] * self._ranks.expert.size()
            dist.all_gather_object(of_experts, own, group=self._ranks.expert)
            own = [_merge_experts(same) for same in zip(*of_experts, strict=True)]
        stages: list[Any] = [None] * self._ranks.pipeline.size()
        dist.all_gather_object(stages, own, group=self._ranks.pipeline)
        return stages

    def _export_of(self, entry: LocalParameter) -> Export:
        shape = list(entry.parameter.shape)
        dim = entry.weight.layout.dim
        if dim is not None:
            shape[dim] *= self._tensor_group(entry.weight).size()
        tensors = entry.weight.layout.split(torch.empty(shape, device="meta"), self._sizes)
        return Export(
            names=(entry.names,), shapes=tuple(tuple(tensor.shape) for tensor in tensors), is_expert=entry.weight.is_expert
        )

    def _is_copy(self, entry: LocalParameter) -> bool:
        """Whether it is the last stage's copy of the embedding, which the first stage exports."""
        return self._tied and entry.weight.hf == ("lm_head.weight",)


def _named(export: Export, chosen: Sequence[int], gathered: Iterator[list[torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor in the manifest's order: of several experts, all tensors of the first one come first."""
    if len(export.names) == 1:  # not collected, so that only one tensor is in memory
        for number, [tensor] in zip(chosen, gathered, strict=True):
            yield export.names[0][number], tensor
        return
    for names, tensors in zip(export.names, zip(*gathered, strict=True), strict=True):
        yield from ((names[number], tensor) for number, tensor in zip(chosen, tensors, strict=True))


def _merge_experts(same: Sequence[Export]) -> Export:
    if not same[0].is_expert:
        return same[0]
    return Export(names=tuple(each.names[0] for each in same), shapes=same[0].shapes, is_expert=True)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(_PLACEHOLDER.sub(lambda found: rf"(?P<{found[1]}>\d+)", re.escape(name)))
