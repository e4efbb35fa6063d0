"""Names the components of rlcore's optional distributions, so that errors can say how to install them."""

from __future__ import annotations

from rl_core.plugins import Kind, KnownComponent, hookimpl

_COMPONENTS = {
    "rl-backends-hf": ((Kind.POLICY, "hf"), (Kind.GENERATION, "hf")),
    "rl-backends-megatron": ((Kind.POLICY, "megatron"),),
    "rl-backends-vllm": ((Kind.GENERATION, "vllm"),),
    "rl-backends-openai": ((Kind.GENERATION, "openai"),),
    "rl-sandbox": ((Kind.SANDBOX, "local"),),
    "rl-envs": (
        *((Kind.ENVIRONMENT, name) for name in ("math", "code", "arithmetic", "guess", "reward_model", "weather", "tools")),
        *((Kind.ENVIRONMENT, name) for name in ("judge", "instruction_following", "sliding_puzzle", "reasoning_gym")),
        *((Kind.DATASET, name) for name in ("arithmetic", "guess", "sliding_puzzle", "reasoning_gym")),
    ),
    "rl-serve": ((Kind.COMMAND, "serve"), (Kind.COMMAND, "chat"), (Kind.MODEL_SERVER, "agent_endpoint")),
}


@hookimpl
def rlcore_known_components() -> list[KnownComponent]:
    """The backends, environments and commands of the distributions that the extras of `rlcore` install."""
    return [
        KnownComponent(kind=kind, name=name, distribution=distribution, install=_how_to_install(distribution))
        for distribution, components in _COMPONENTS.items()
        for kind, name in components
    ]


def _how_to_install(distribution: str) -> str:
    # None of the distributions is published on a package index.
    return f"{distribution} is not published; in a checkout of the repository, pip install ./{distribution.replace('-', '_')}"
