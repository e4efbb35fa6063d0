"""Chooses the transport that sends weights: one that both backends support."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rl_core.errors import MissingCapabilityError
from rl_core.interfaces.weights import WeightTransport


def choose_transport(
    transports: Sequence[type[WeightTransport]],
    *,
    policy_supports: Collection[str],
    generation_supports: Collection[str],
    name: str | None = None,
) -> type[WeightTransport]:
    """The named transport, or the first that both sides support.

    Raises:
        MissingCapabilityError: there is none; lists what each side supports.
    """
    candidates = [transport for transport in transports if name is None or transport.name == name]
    for transport in candidates:
        if transport.name in policy_supports and transport.name in generation_supports:
            return transport
    names = [transport.name for transport in transports]
    supported = (
        f"Registered transports: {_listed(names)}. The policy backend supports "
        f"{_listed([n for n in names if n in policy_supports])}, the generation backend "
        f"{_listed([n for n in names if n in generation_supports])}."
    )
    if name is not None:
        raise MissingCapabilityError(
            f"The weight transport {name!r} (policy.generation.refit_transport) cannot be used. {supported}"
        )
    raise MissingCapabilityError(f"Policy and generation backend have no weight transport in common. {supported}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
