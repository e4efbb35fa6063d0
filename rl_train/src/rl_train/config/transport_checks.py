"""Checks that weights can be transferred from the policy to the engine. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.diagnostics import comma_separated
from rl_core.config.source_tree import KeyPath
from rl_core.errors import PluginError
from rl_core.plugins.component import Kind, is_path
from rl_core.plugins.registry import Registry
from rl_train.config.schema import RunConfig

IN_PROCESS_TRANSPORTS = ("by_reference", "shared_memory")
ONE_NODE_TRANSPORTS = ("shared_memory", "collective")
MANY_NODES_TRANSPORTS = ("collective",)
"""Transports that are tried if `refit_transport` is not set, the cheapest first."""

_AT = ("policy", "generation", "refit_transport")


def transport_conflicts(run: RunConfig, registry: Registry) -> Iterator[tuple[KeyPath, str]]:
    """A weight transport that does not exist or is not supported by a backend, and backends without a common transport."""
    generation = run.policy.generation
    if generation is None:
        return
    if generation.refit_transport is None:
        if not generation.has_own_weights:
            yield from _no_common_transport(run, registry)
    else:
        yield from _not_supported(run, registry, generation.refit_transport)
    yield from _folder(generation.refit_transport, generation.refit_folder, num_nodes=run.cluster.num_nodes)


def _not_supported(run: RunConfig, registry: Registry, transport: str) -> Iterator[tuple[KeyPath, str]]:
    try:
        registry.find(Kind.WEIGHT_TRANSPORT, transport)
    except PluginError as error:
        yield _AT, str(error)
        return
    for kind, backend in _backends(run):
        supported = _capabilities(registry, kind, backend)
        if supported is not None and transport not in supported:
            known = [name for name in registry.names(Kind.WEIGHT_TRANSPORT) if name in supported]
            yield (
                _AT,
                f"the {kind.label} {backend!r} does not support {transport!r}. "
                f"It supports: {comma_separated(known) or 'none'}.",
            )


def _no_common_transport(run: RunConfig, registry: Registry) -> Iterator[tuple[KeyPath, str]]:
    """Backends without a common default transport. Backends given by a path are not checked: importing them would be needed."""
    if run.cluster.backend == "in_process":
        tried: tuple[str, ...] = IN_PROCESS_TRANSPORTS
    else:
        tried = ONE_NODE_TRANSPORTS if run.cluster.num_nodes == 1 else MANY_NODES_TRANSPORTS
    backends = dict(_backends(run))
    supported = {kind: _capabilities(registry, kind, backend) for kind, backend in backends.items()}
    policy, engine = supported[Kind.POLICY], supported[Kind.GENERATION]
    if policy is None or engine is None or {*tried} & {*policy} & {*engine}:
        return
    transports = registry.names(Kind.WEIGHT_TRANSPORT)
    by_kind = {kind: [name for name in transports if name in (found or ())] for kind, found in supported.items()}
    shared = [name for name in by_kind[Kind.POLICY] if name in by_kind[Kind.GENERATION]]
    where = "in one process" if run.cluster.backend == "in_process" else f"on {run.cluster.num_nodes} node(s)"
    yield (
        ("policy", "generation", "backend"),
        f"the engine {backends[Kind.GENERATION]!r} cannot receive the weights of the policy backend "
        f"{run.policy.backend!r} {where}: tried {comma_separated(tried)}; the policy backend supports "
        f"{comma_separated(by_kind[Kind.POLICY]) or 'none'}, the engine {comma_separated(by_kind[Kind.GENERATION]) or 'none'}. "
        + (
            f"Set refit_transport to {' or '.join(shared)}, or change a backend."
            if shared
            else "Choose another generation backend or policy backend."
        ),
    )


def _folder(transport: str | None, folder: str | None, *, num_nodes: int) -> Iterator[tuple[KeyPath, str]]:
    if transport == "disk" and folder is None and num_nodes > 1:
        yield (
            ("policy", "generation", "refit_folder"),
            f"is required with refit_transport: disk on {num_nodes} nodes: set a folder that all nodes can access.",
        )
    if transport != "disk" and folder is not None:
        yield (
            ("policy", "generation", "refit_folder"),
            f"is only used with refit_transport: disk, but refit_transport is {transport or 'not set'}. Remove refit_folder, "
            "or set refit_transport: disk.",
        )


def _backends(run: RunConfig) -> tuple[tuple[Kind, str], ...]:
    generation = run.policy.generation
    assert generation is not None
    return (Kind.POLICY, run.policy.backend), (Kind.GENERATION, generation.backend)


def _capabilities(registry: Registry, kind: Kind, backend: str) -> tuple[str, ...] | None:
    """Capabilities of a registered backend; None for a backend given by its path, because they are only known after import."""
    return None if is_path(backend) else registry.find(kind, backend).capabilities
