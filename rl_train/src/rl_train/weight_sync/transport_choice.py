"""Chooses the transport that sends weights: one that both backends support, and where its ends meet on one machine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rl_core.errors import MissingCapabilityError
from rl_core.interfaces.weights import WeightTransport
from rl_core.plugins.component import capability_problem
from rl_core.rendezvous.interfaces import free_port


def choose_transport(
    transports: Sequence[type[WeightTransport]],
    *,
    policy_supports: Collection[str],
    generation_supports: Collection[str],
    name: str | None = None,
) -> type[WeightTransport]:
    """The named transport, or the first whose requirements both sides have.

    Args:
        transports: the registered transports, in the order in which they are tried.
        policy_supports: capabilities of the policy backend.
        generation_supports: capabilities of the generation backend.
        name: the only one to try.

    Raises:
        MissingCapabilityError: there is none; lists what each side supports.
    """
    by_policy, by_generation = (_supported(transports, names) for names in (policy_supports, generation_supports))
    for transport in transports:
        if name in (None, transport.name) and transport.name in by_policy and transport.name in by_generation:
            return transport
    supported = (
        f"Registered transports: {_listed(transport.name for transport in transports)}. The policy backend supports "
        f"{_listed(by_policy)}, the generation backend {_listed(by_generation)}."
    )
    if name is not None:
        raise MissingCapabilityError(
            f"The weight transport {name!r} (policy.generation.refit_transport) cannot be used. {supported}"
        )
    raise MissingCapabilityError(f"Policy and generation backend have no weight transport in common. {supported}")


def _supported(transports: Sequence[type[WeightTransport]], capabilities: Collection[str]) -> list[str]:
    """The names of the transports whose requirements a backend with these capabilities has."""
    for transport in transports:
        if (problem := capability_problem(transport.requires)) is not None:
            raise MissingCapabilityError(f"The weight transport {transport.name!r} cannot be used: {problem}")
    return [transport.name for transport in transports if {*transport.requires} <= {*capabilities}]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def free_loopback_port() -> tuple[str, int]:
    """This machine's loopback address and a port that is free now and that this process has not used before."""
    return "127.0.0.1", free_port("127.0.0.1")
