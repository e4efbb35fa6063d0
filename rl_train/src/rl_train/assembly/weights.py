"""Builds the weight synchronization of a run: the transport that both sides support, its checks, and the canary."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface, WeightTransport
from rl_train.assembly.contracts import capabilities_of
from rl_train.assembly.placement import transports_between
from rl_train.assembly.workers import Builder
from rl_train.config.rules.rollouts import (
    IN_PROCESS_TRANSPORTS,
    digests_are_held,
    missing_canary,
    why_merged,
    with_transports_of_plugins,
)
from rl_train.config.schema import RunConfig, uses_canary
from rl_train.weight_sync.canary import (
    FIRST_TOLERANCE,
    Canary,
    CanaryCalibration,
    RefitCanary,
    TemperatureCorrection,
    make_canary,
    rows_of_two_microbatches,
)
from rl_train.weight_sync.device_memory import DeviceMemory
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer, wait_together
from rl_train.weight_sync.transports import usable_transports

_log = logging.getLogger("rlcore")


def make_weights(
    builder: Builder,
    policy: ColocatablePolicyInterface,
    generation: GenerationInterface,
    tokenizer: Any = None,
    *,
    memory: DeviceMemory | None = None,
) -> WeightSynchronizer:
    """The weight synchronizer of a run, which uses the first transport that both backends support.

    Args:
        builder: has the config, and closes the synchronizer.
        policy: the sender.
        generation: the receiver.
        tokenizer: its vocabulary is used for canary prompts; None disables the canary.
        memory: see `WeightSynchronizer`.

    Raises:
        ConfigError: no check would cover the tensors that this engine computes with, or it has its own weights.
    """
    section = builder.run.policy.generation
    assert section is not None
    if generation.has_own_weights:
        raise ConfigError(
            f"`policy.generation.backend: {section.backend}`: this engine has its own weights, so it cannot receive the "
            "policy's. Choose another generation backend, or evaluate the engine with `rlcore eval`."
        )
    transports = _transports(builder, section.refit_transport)
    engine_capabilities = capabilities_of(builder.registry.find("generation", section.backend))
    if section.lora is not None:
        reason = why_merged(builder.run.policy, section, engine_capabilities)
        _log.info("policy.generation.lora: %s%s", section.lora, "" if reason is None else f", because {reason}")
    calibration = CanaryCalibration()
    if tokenizer is not None and (problem := missing_canary(section, engine_capabilities)) is not None:
        raise ConfigError(str(problem))  # `rlcore serve` does not import an engine given by its path before
    first, *others = usable_transports(
        transports,
        policy_supports=capabilities_of(builder.registry.find("policy", builder.run.policy.backend)),
        generation_supports=engine_capabilities,
        name=transports[0].name if section.refit_transport is not None else None,
    )
    sender = WeightSender(
        policy,
        first,
        others=others,
        buffer_bytes=section.refit_buffer_mib * 2**20,
        deadline_s=builder.run.cluster.deadlines.refit_s,
        folder=Path(section.refit_folder).expanduser() if section.refit_folder is not None else None,
        digests_are_held=digests_are_held(engine_capabilities),
        num_receivers=generation.num_workers,
        wait=wait_together,
        rendezvous=builder.cluster.get_master_address_and_port if builder.cluster else None,
    )
    canary = None
    if tokenizer is not None and uses_canary(section):
        canary = RefitCanary(lambda: _canary(builder, policy, generation, tokenizer, calibration), calibration)
    synchronizer = WeightSynchronizer(policy, generation, sender, memory=memory, canary=canary)
    builder.exits.callback(synchronizer.close)
    return synchronizer


def _canary(
    builder: Builder,
    policy: ColocatablePolicyInterface,
    generation: GenerationInterface,
    tokenizer: Any,
    calibration: CanaryCalibration,
) -> Canary:
    model, section, facts = builder.run.policy, builder.run.policy.generation, getattr(generation, "facts", {})
    assert section is not None
    sides, exact = arithmetic(builder.run, generation)
    tolerance = section.canary_tolerance
    if tolerance is None and section.lora == "merged" and not exact:
        tolerance = FIRST_TOLERANCE  # B is 0 at the first sync, so its error does not show how merged sums are rounded
    factor = builder.temperature / section.temperature
    reader = vars(tokenizer).get("image_reader")
    return make_canary(
        sorted(set(range(min(len(tokenizer), facts.get("vocab_size", len(tokenizer))))) - set(tokenizer.all_special_ids)),
        num_receivers=generation.num_workers,
        max_length=model.max_total_sequence_length,
        exact=exact,
        tolerance=tolerance,
        greedy=bool(section.sampling_filters()),
        calibration=calibration,
        sides=sides,
        scored_rows=rows_of_two_microbatches(model) * getattr(policy, "data_ranks", 1),
        temperature_correction=TemperatureCorrection(factor=factor, vocab_size=getattr(policy, "facts", {})["vocab_size"])
        if factor != 1.0
        else None,
        pictures=reader.random_pictures(2, tokenizer) if reader is not None else (),
    )


def arithmetic(run: RunConfig, generation: GenerationInterface) -> tuple[str, bool]:
    """The arithmetic of policy and engine in words, and whether both compute in float32."""
    model, section, facts = run.policy, run.policy.generation, getattr(generation, "facts", {})
    assert section is not None
    engine_precision = facts.get("precision", model.dtype_name)
    sides = (
        f"policy {model.backend} {model.dtype_name}, engine {section.backend} {engine_precision} on "
        f"{facts.get('device', 'an unknown device')}, temperature {section.temperature:g}"
    )
    return sides, {model.dtype_name, engine_precision} == {"float32"}


def _transports(builder: Builder, configured: str | None) -> list[type[WeightTransport]]:
    """Transports to try, the cheapest first."""
    cluster, engine_cluster = builder.cluster, builder.engine_cluster
    if configured is not None:
        names: tuple[str, ...] = (configured,)
    elif cluster is None or engine_cluster is None:
        names = with_transports_of_plugins(IN_PROCESS_TRANSPORTS, builder.registry)
    else:
        names = with_transports_of_plugins(transports_between(cluster, engine_cluster), builder.registry)
    return [builder.registry.find("weight_transport", name).load() for name in names]
