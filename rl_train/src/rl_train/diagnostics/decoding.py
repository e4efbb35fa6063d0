"""Checks of an engine: decoded log-probabilities are those of a full forward pass, and rows respect the length limit.

There are two full passes: the engine's prefill (of the prompt and the beginning of its completion) and the policy's scoring
pass. A difference from the first means a broken cache or kernel of the engine; one from the second, any difference between
sampler and trainer, by range of positions. The functions `test_*` check a model by its name, in this process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import DeadlineExceededError, RLCoreError, WorkerDiedError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface, PolicyInterface
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_core.testing.outputs.models import generated
from rl_train.diagnostics.diagnosis import Diagnosis, DiagnosisStatus
from rl_train.logprob_agreement import TokenDifferences, compare_log_probabilities

if TYPE_CHECKING:
    from rl_core.cluster.virtual_cluster import RayVirtualCluster


Precision = Literal["float32", "bfloat16"]

USUAL_ERROR: dict[str, float] = {"float32": 1.001, "bfloat16": 1.05}
"""Typical maximum of exp(mean |d|) if both sides compute in that data type."""
_TEXTS = ("12+34=", "1, 2, 3, 4, 5, 6, 7,", "The answer is", "Once upon a time,")
DECODE = "decode_against_prefill"
POLICY = "engine_against_policy"
_WHY_EQUAL = (
    "A run trains on the log-probabilities that decoding reports. If they differ from those of a full pass, importance ratios "
    "and KL terms are wrong although all weights are correct, often more so in long completions."
)


def check_decode_against_prefill(
    generation: GenerationInterface, prompts: BatchedDataDict[Any], *, threshold: float
) -> Diagnosis:
    """Decode greedily, then sample single tokens again with the beginning of the completion as part of the prompt.

    The first token of such a request comes from a prefill. If two tokens are almost equally likely, the two passes may
    choose different ones; their log-probabilities are compared anyway, since each is the largest of its pass.

    Args:
        generation: the engine.
        prompts: see `GenerationDatumSpec`; the engine's own limit is the length of the completions.
        threshold: maximum exp(mean |d|) of the tokens that are sampled again.
    """
    generation.prepare_for_generation()
    try:
        decoded = generated(generation, prompts, greedy=True)
        places = _places(decoded)
        if not places:
            return Diagnosis(
                name=DECODE,
                status=DiagnosisStatus.WARNING,
                found=f"all {decoded.size} greedy completions have one token, so nothing was decoded after the prefill",
                why=_WHY_EQUAL,
                remedy="Use prompts with longer completions, or increase policy.generation.max_new_tokens.",
                details={"num_tokens": 0},
            )
        prefilled = generated(generation, _prefixes(decoded, places), greedy=True)
    finally:
        generation.finish_generation()
    rows, columns = torch.tensor(places).unbind(dim=1)
    first = prefilled["unpadded_sequence_lengths"] - prefilled["generation_lengths"]
    answers = torch.arange(len(places))
    token_ids = decoded["output_ids"][rows, columns]
    same = prefilled["output_ids"][answers, first] == token_ids
    differences = TokenDifferences(token_ids, prefilled["logprobs"][answers, first], decoded["logprobs"][rows, columns])
    starts = (decoded["unpadded_sequence_lengths"] - decoded["generation_lengths"])[rows]
    error = float(differences.sizes.mean().exp())
    [worst] = differences.worst()
    largest = float(differences.sizes[worst])
    details = {
        "multiplicative_error": _plain(error),
        "max_abs_difference": _plain(largest),
        "worst_position": int(columns[worst] - starts[worst]),
        "last_position": int((columns - starts).max()),
        "num_tokens": len(places),
        "same_token_frac": float(same.double().mean()),
        "threshold": threshold,
    }
    found = (
        f"exp(mean |d|) is {error:.6f} over {len(places)} tokens up to position {details['last_position']}; the largest |d| is "
        f"{largest:.2g} nats, at position {details['worst_position']}; {int(same.sum())} of {len(places)} "
        "tokens are the same"
    )
    is_small = error <= threshold
    return Diagnosis(
        name=DECODE,
        status=DiagnosisStatus.OK if is_small else DiagnosisStatus.FAILED,
        found=found if is_small else f"{found}; at most {threshold:.6g} is allowed",
        why=_WHY_EQUAL,
        remedy="Disable the engine's prefix cache, compiled graphs and attention kernel one after the other, and try float32. "
        "The change that removes the difference is the cause.",
        details=details,
    )


def check_engine_against_policy(
    policy: PolicyInterface, generation: GenerationInterface, prompts: BatchedDataDict[Any], *, threshold: float
) -> Diagnosis:
    """Sample, score the same tokens with the policy, and compare both by position in the completion.

    Args:
        policy: scores the sampled tokens.
        generation: samples; it has the policy's weights.
        prompts: see `GenerationDatumSpec`.
        threshold: maximum exp(mean |d|), over all tokens and over each range of positions with enough tokens.
    """
    agreement = compare_log_probabilities(policy, generation, prompts)
    failures = agreement.failures(threshold)
    first, last = agreement.by_position[0], agreement.by_position[-1]
    details = {
        "multiplicative_error": _plain(agreement.multiplicative_error),
        "max_abs_difference": _plain(agreement.max_abs_difference),
        "num_tokens": agreement.num_tokens,
        "by_position": {part.label: _plain(part.multiplicative_error) for part in agreement.by_position},
        "threshold": threshold,
    }
    return Diagnosis(
        name=POLICY,
        status=DiagnosisStatus.FAILED if failures else DiagnosisStatus.OK,
        found="; ".join(failures)
        or f"exp(mean |d|) is {agreement.multiplicative_error:.6f} over {agreement.num_tokens} tokens: "
        f"{first.multiplicative_error:.6f} at position {first.label} of the completion, "
        f"{last.multiplicative_error:.6f} at {last.label}",
        why=_WHY_EQUAL,
        remedy="Run `rlcore check logprobs` to see which tokens differ; docs/validation.md lists common causes.",
        details=details,
    )


def _places(decoded: BatchedDataDict[Any]) -> list[tuple[int, int]]:
    """(row, column) of decoded tokens: the second of a completion, the third, the fifth, the ninth and so on, and the last."""
    found = []
    for row, (end, sampled) in enumerate(
        zip(decoded["unpadded_sequence_lengths"].tolist(), decoded["generation_lengths"].tolist(), strict=True)
    ):
        start = end - sampled
        doubling = (1 << power for power in range(sampled.bit_length()))
        found += [(row, start + offset) for offset in sorted({*doubling, sampled - 1}) if 0 < offset < sampled]
    return found


def _prefixes(decoded: BatchedDataDict[Any], places: list[tuple[int, int]]) -> BatchedDataDict[Any]:
    rows = [decoded["output_ids"][row, :column] for row, column in places]
    return BatchedDataDict(
        {
            "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            "input_lengths": torch.tensor([len(row) for row in rows]),
            "max_new_tokens": torch.ones(len(rows), dtype=torch.int64),
        }
    )


def _plain(number: float) -> float | None:
    """JSON has no infinity and no NaN."""
    return number if math.isfinite(number) else None


NAME = "length_limit"
_ROOM = (1, 2, 4, 8)
"""Number of tokens left for the completion of each row."""
_WHY_LIMITED = (
    "Rows longer than the limit have positions beyond those the model was trained on, need more memory than planned, and "
    "cannot be scored by the policy."
)


def check_length_limit(generation: GenerationInterface, prompts: Sequence[torch.Tensor], *, limit: int) -> Diagnosis:
    """Check that rows that start a few tokens below `limit` do not exceed it, and that a prompt of `limit` tokens is refused.

    Args:
        generation: the engine.
        prompts: token ids [T] each; repeated until they are long enough.
        limit: maximum number of tokens of prompt and completion (`max_model_len`).
    """
    rooms = [room for room in _ROOM if room < limit]
    rows = [_of_length(prompts[number % len(prompts)], limit - room) for number, room in enumerate(rooms)]
    generation.prepare_for_generation()
    try:
        output = generation.generate(_batch(rows), greedy=False)
        accepts = _accepts(generation, _of_length(prompts[0], limit))
    finally:
        generation.finish_generation()
    problems = [problem for row in range(len(rows)) if (problem := _problem(output, row, rows[row], limit))]
    if accepts:
        problems.append(f"a prompt of {limit} tokens, which leaves no space for a completion, was accepted")
    longest = int(output["unpadded_sequence_lengths"].max())
    reached = int(((output["unpadded_sequence_lengths"] == limit) & output["truncated"]).sum())
    details = {"limit": limit, "longest_row": longest, "rows_cut_at_the_limit": reached, "problems": problems}
    status = DiagnosisStatus.FAILED if problems else DiagnosisStatus.OK if reached else DiagnosisStatus.WARNING
    found = f"{reached} of {len(rows)} rows were truncated at the limit of {limit} tokens, and none is longer; a prompt of "
    found += "that length is refused"
    remedy = "Repeat the check with other prompts (--num-prompts) or a higher temperature."
    if problems:
        found = f"the engine violates the limit of {limit} tokens: " + "; ".join(problems)
        remedy = "Set the limit in the engine's section (max_model_len), or lower policy.max_total_sequence_length."
    elif not reached:
        found = f"all {len(rows)} rows ended before the limit of {limit} tokens, so the limit was not tested"
    return Diagnosis(name=NAME, status=status, found=found, why=_WHY_LIMITED, remedy=remedy, details=details)


def _of_length(prompt: torch.Tensor, length: int) -> torch.Tensor:
    return prompt.repeat(-(-length // len(prompt)))[:length]


def _batch(rows: Sequence[torch.Tensor]) -> BatchedDataDict[Any]:
    return BatchedDataDict(
        {
            "input_ids": torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True),
            "input_lengths": torch.tensor([len(row) for row in rows]),
            "sample_seeds": torch.arange(len(rows)),
        }
    )


def _accepts(generation: GenerationInterface, prompt: torch.Tensor) -> bool:
    try:
        generation.generate(_batch([prompt]), greedy=False)
    except (WorkerDiedError, DeadlineExceededError):
        raise
    except (RLCoreError, ValueError):
        return False
    return True


def _problem(output: BatchedDataDict[Any], row: int, prompt: torch.Tensor, limit: int) -> str | None:
    length, sampled = int(output["unpadded_sequence_lengths"][row]), int(output["generation_lengths"][row])
    if length > limit:
        return f"a prompt of {len(prompt)} tokens became a row of {length}"
    if length - sampled != len(prompt) or not torch.equal(output["output_ids"][row, : len(prompt)], prompt):
        return f"a prompt of {len(prompt)} tokens was returned changed, with {length - sampled} tokens"
    if not sampled:
        return f"a prompt of {len(prompt)} tokens got no completion, although {limit - len(prompt)} tokens were left"
    return None


# ruff: noqa: PT028 - these are functions with defaults for callers, whatever they are called


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
    prompts = _batch(_prompts(model_name))
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


def _engine(
    model_name: str, backend: str, precision: Precision, cluster: RayVirtualCluster | None, *, total: int, new: int
) -> AbstractContextManager[GenerationInterface]:
    component = Registry(discover()).find("generation", backend)
    asked = PolicyConfig(backend=backend, model_name=model_name, precision=precision, max_total_sequence_length=total)
    section = (component.load_config() or GenerationConfig)(backend=backend, max_new_tokens=new).for_policy(asked)
    return _until_shutdown(component.load()(config=section, cluster=cluster, deadlines=None))


def _policy(
    model_name: str, backend: str, precision: Precision, cluster: RayVirtualCluster | None, *, total: int
) -> AbstractContextManager[ColocatablePolicyInterface]:
    component = Registry(discover()).find("policy", backend)
    model = component.load_config() or PolicyConfig
    section = model(backend=backend, model_name=model_name, precision=precision, max_total_sequence_length=total)
    return _until_shutdown(component.load()(config=section, cluster=cluster, deadlines=None))


@contextmanager
def _until_shutdown(component: Any) -> Iterator[Any]:
    try:
        yield component
    finally:
        component.shutdown()
