"""Promises of engines with the capability `lora_adapters`; they are part of `GenerationConformance`.

Adapters have the rank of the model's hidden size, so that a transposed A has a right shape in some layers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import WeightSyncError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.testing.promises import Found, declares, errors_of_workers, must_raise, promise
from rl_core.testing.reference import MAX_LENGTH
from rl_core.weights.adapters import LORA_A, LORA_B, LORA_SCALE, adapters_in

RANK = 64
_COMPUTED = "test_adapters_are_added_to_their_layers"
_ALONE = "test_a_later_refit_brings_adapters_alone"
_DECLARED = declares("lora_adapters")


class _AdaptedPolicy(PolicyConfig):
    @property
    def lora_rank(self) -> int:
        return RANK


def for_adapted_policy(section: GenerationConfig) -> GenerationConfig:
    """The section of an engine in a run that sends adapters, whose policy has the model of the kit."""
    policy = _AdaptedPolicy(backend="kit", model_name=str(section.model_name), max_total_sequence_length=MAX_LENGTH)
    return section.model_copy(update={"lora": "adapter"}).for_policy(policy)


@promise(
    "With adapters, it computes W x + s B A x in each adapted layer.",
    applies=_DECLARED,
    after="test_a_refit_brings_the_trained_weights",
)
def test_adapters_are_added_to_their_layers(self: Any) -> str:
    """The promise of the first refit with adapters."""
    self.subject().sender.adapt(self.model.adapted, rank=RANK)
    self._refitted(seed=31)
    return f"{len(self.model.adapted)} layers; {self._compared(self._generate(self._rows(seed=31)))}"


@promise("A later refit brings adapters alone, with another scale.", applies=_DECLARED, after=_COMPUTED)
def test_a_later_refit_brings_adapters_alone(self: Any) -> str:
    """The promise of later refits, in complete batches and in streamed rows."""
    for seed in (32, 33):
        subject = self._refitted(seed=seed)
    expected, found = subject.sender.fingerprint(subject.engine), subject.engine.weight_fingerprint()
    if found != expected:
        raise Found(f"the fingerprint is {found}, and that of the sent adapters {expected}.")
    if subject.engine.weight_version != subject.sender.get_weight_version():
        raise Found(f"the weight version is {subject.engine.weight_version} after a refit of adapters alone.")
    rows = self._rows(seed=32)
    if "async_rows" in self.capabilities():
        self._compared(asyncio.run(_streamed(subject.engine, rows)), when="in rows that are streamed")
    return str(self._compared(self._generate(rows)))


@promise("Adapters are still there when it was finished and is prepared again.", applies=_DECLARED, after=_ALONE)
def test_adapters_outlast_a_pause(self: Any) -> str:
    """The promise of an engine that sleeps."""
    engine = self.subject().engine
    engine.finish_generation()
    engine.prepare_for_generation()
    if engine.weight_version < 0:
        return "it discards its weights, so a refit sends all of them"
    return str(self._compared(self._generate(self._rows(seed=33))))


@promise("Adapters that fit no layer are refused before anything is loaded.", applies=_DECLARED, after=_COMPUTED)
def test_adapters_that_fit_no_layer_are_refused(self: Any) -> None:
    """The promise of a manifest with wrong adapters."""
    sender, engine = self.subject().sender, self.subject().engine
    adapters = adapters_in(sender.weight_manifest())
    layer = self.model.adapted[0].removesuffix(".weight")
    (rank, size), dtype = adapters[layer + LORA_A]
    own = {"no.such.layer" + suffix: adapters[layer + suffix] for suffix in (LORA_A, LORA_B, LORA_SCALE)}
    try:
        for wrong, what in (
            ({**adapters, **own}, "an adapter of a layer that does not exist is accepted."),
            ({**adapters, layer + LORA_A: ((rank, size + 1), dtype)}, f"A of {layer} is accepted with a column too many."),
            ({name: form for name, form in adapters.items() if name != layer + LORA_B}, f"{layer} is accepted without B."),
        ):
            with must_raise(WeightSyncError, otherwise=what), errors_of_workers():
                engine.prepare_refit_info(wrong)
    finally:
        self._refitted(seed=34)


async def _streamed(engine: GenerationInterface, rows: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    outputs = {row: output async for row, output in engine.generate_async(rows)}
    return BatchedDataDict.from_batches([outputs[row] for row in range(rows.size)])
