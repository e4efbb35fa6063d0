"""Tests of a model by its name: one policy and one engine in this process, built by their plugins.

They raise if the model fails, so that a test can call them; pytest does not collect them.
"""

# ruff: noqa: PT028 - these are functions with defaults for callers, whatever they are called

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.tokenizer import load_tokenizer
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.diagnostics.decode_prefill import check_decode_against_prefill, check_engine_against_policy
from rl_train.diagnostics.diagnosis import Diagnosis, DiagnosisStatus
from rl_train.diagnostics.length_limit import check_length_limit

if TYPE_CHECKING:
    from rl_core.cluster.virtual_cluster import RayVirtualCluster

Precision = Literal["float32", "bfloat16"]

USUAL_ERROR: dict[str, float] = {"float32": 1.001, "bfloat16": 1.05}
"""Typical maximum of exp(mean |d|) if both sides compute in that data type."""
_TEXTS = ("12+34=", "1, 2, 3, 4, 5, 6, 7,", "The answer is", "Once upon a time,")


def test_max_model_len_respected(
    model_name: str,
    *,
    max_model_len: int = 64,
    backend: str = "hf",
    precision: Precision = "float32",
    cluster: RayVirtualCluster | None = None,
) -> Diagnosis:
    """Test that an engine with this model produces no row longer than `max_model_len`; see `check_length_limit`.

    Args:
        model_name: name, folder or GGUF file.
        max_model_len: maximum number of tokens of prompt and completion.
        backend: name of the generation backend.
        precision: data type of the engine.
        cluster: the cluster that the engine runs on; this process by default.

    Returns:
        The diagnosis, `ok` or `warning`.

    Raises:
        AssertionError: a row is longer than the limit, or a prompt that leaves no space for a completion was accepted.
    """
    with _engine(model_name, backend, precision, cluster, total=max_model_len, new=max_model_len - 1) as generation:
        return _passed(check_length_limit(generation, _prompts(model_name), limit=max_model_len))


def test_generation_consistency(
    model_name: str,
    *,
    max_new_tokens: int = 128,
    backend: str = "hf",
    policy_backend: str = "hf",
    precision: Precision = "float32",
    threshold: float | None = None,
    cluster: RayVirtualCluster | None = None,
) -> list[Diagnosis]:
    """Test that decoding reports the same log-probabilities as the engine's own prefill and as the policy.

    Both load the model from its files; no weights are transferred.

    Args:
        model_name: name, folder or GGUF file.
        max_new_tokens: length of the completions; errors that grow with the position only show in long ones.
        backend: name of the generation backend.
        policy_backend: name of the policy backend.
        precision: data type of both.
        threshold: maximum exp(mean |d|); `USUAL_ERROR` of the precision by default.
        cluster: the cluster that both run on; this process by default.

    Returns:
        Both diagnoses, each `ok` or `warning`.

    Raises:
        AssertionError: the log-probabilities differ by more than the threshold.
    """
    allowed = threshold if threshold is not None else USUAL_ERROR[precision]
    total = 2 * max_new_tokens
    rows = _prompts(model_name)
    prompts: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            "input_lengths": torch.tensor([len(row) for row in rows]),
            "sample_seeds": torch.arange(len(rows)),
        }
    )
    with (
        _engine(model_name, backend, precision, cluster, total=total, new=max_new_tokens) as generation,
        _policy(model_name, policy_backend, precision, cluster, total=total) as policy,
    ):
        return [
            _passed(check_decode_against_prefill(generation, prompts, threshold=allowed)),
            _passed(check_engine_against_policy(policy, generation, prompts, threshold=allowed)),
        ]


test_max_model_len_respected.__test__ = False  # type: ignore[attr-defined]
test_generation_consistency.__test__ = False  # type: ignore[attr-defined]


def _passed(diagnosis: Diagnosis) -> Diagnosis:
    if diagnosis.status is DiagnosisStatus.FAILED:
        raise AssertionError(str(diagnosis))
    return diagnosis


def _prompts(model_name: str) -> list[torch.Tensor]:
    tokenizer = load_tokenizer(model_name)
    return [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in _TEXTS]


@contextmanager
def _engine(
    model_name: str, backend: str, precision: Precision, cluster: RayVirtualCluster | None, *, total: int, new: int
) -> Iterator[GenerationInterface]:
    component = Registry(discover()).find("generation", backend)
    model = component.load_config() or GenerationConfig
    asked = PolicyConfig(backend=backend, model_name=model_name, precision=precision, max_total_sequence_length=total)
    section = model(backend=backend, max_new_tokens=new).for_policy(asked)
    generation: GenerationInterface = component.load()(config=section, cluster=cluster, deadlines=None)
    try:
        yield generation
    finally:
        generation.shutdown()


@contextmanager
def _policy(
    model_name: str, backend: str, precision: Precision, cluster: RayVirtualCluster | None, *, total: int
) -> Iterator[ColocatablePolicyInterface]:
    component = Registry(discover()).find("policy", backend)
    model = component.load_config() or PolicyConfig
    section = model(backend=backend, model_name=model_name, precision=precision, max_total_sequence_length=total)
    policy: ColocatablePolicyInterface = component.load()(config=section, cluster=cluster, deadlines=None)
    try:
        yield policy
    finally:
        policy.shutdown()
