"""Runs all diagnoses of a config's policy, engine and model before a run. Does not train."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.dispatch.worker_facade import WorkerFacade
from rl_core.errors import NotSupportedError, WeightSyncError
from rl_train.assembly.policy_and_engine import PolicyAndEngine, PolicyAndEnginePlan
from rl_train.diagnostics.by_model_name import USUAL_ERROR
from rl_train.diagnostics.chat_template import check_chat_template
from rl_train.diagnostics.decode_prefill import check_decode_against_prefill, check_engine_against_policy
from rl_train.diagnostics.diagnosis import Diagnosis, DiagnosisStatus
from rl_train.diagnostics.embedding_weights import read_embeddings
from rl_train.diagnostics.embeddings import check_tied_embeddings, check_token_rows, check_untrained_embeddings
from rl_train.diagnostics.length_limit import check_length_limit
from rl_train.diagnostics.model_files import ModelFiles, read_model_files
from rl_train.logprob_agreement import LogProbabilityAgreement, compare_log_probabilities


def measure_agreement(pair: PolicyAndEngine, plan: PolicyAndEnginePlan) -> LogProbabilityAgreement:
    """Log-probability agreement of engine and policy on samples from the plan's prompts."""
    return compare_log_probabilities(pair.policy, pair.generation, plan.prompts.batch)


def usual_error(pair: PolicyAndEngine) -> float:
    """Largest usual exp(mean |d|) for the dtypes of policy and engine."""
    types = {pair.config.policy.dtype_name, *pair.engine_precision().split(", ")}
    return max(USUAL_ERROR.get(name, USUAL_ERROR["bfloat16"]) for name in types)


def diagnose(plan: PolicyAndEnginePlan) -> Iterator[Diagnosis]:
    """Yields each diagnosis when it is done; those without a worker process come first.

    Raises:
        RLCoreError: a backend failed, so no diagnosis is possible.
    """
    files = read_model_files(plan.config.policy.model_name, plan.tokenizer)
    section = plan.config.policy.generation
    assert section is not None
    yield from check_chat_template(
        plan.tokenizer,
        plan.prompts.questions[0],
        stop_ids=files.end_ids | set(section.stop_token_ids or ()),
        stop_strings=section.stop_strings or (),
    )
    with plan.started() as pair:
        yield from _check_embeddings(pair, plan, files)
        threshold = usual_error(pair)
        yield check_length_limit(pair.generation, plan.prompts.token_ids(), limit=_limit(pair))
        yield check_decode_against_prefill(pair.generation, plan.prompts.batch, threshold=threshold)
        yield check_engine_against_policy(pair.policy, pair.generation, plan.prompts.batch, threshold=threshold)


def _check_embeddings(pair: PolicyAndEngine, plan: PolicyAndEnginePlan, files: ModelFiles) -> Iterator[Diagnosis]:
    try:
        weights = read_embeddings(pair.policy, by_reference=pair.by_reference)
    except (NotSupportedError, WeightSyncError) as error:
        yield Diagnosis(
            name="embeddings",
            status=DiagnosisStatus.WARNING,
            found=f"the policy's embeddings could not be read: {error}",
            why="Whether their rows were trained, and whether they are tied, is unknown.",
            remedy="Diagnose on the node where the policy's rank 0 runs, or with another policy backend.",
        )
        return
    used = {int(token) for row in plan.prompts.token_ids() for token in row}
    yield check_token_rows(weights.input, tokenizer=plan.tokenizer, used_ids=used)
    yield check_untrained_embeddings(weights.input, tokenizer=plan.tokenizer, used_ids=used)
    yield check_tied_embeddings(weights, declared=files.tie_word_embeddings)


def _limit(pair: PolicyAndEngine) -> int:
    """The length limit of the config: the smaller of the limits of policy and engine."""
    limit = pair.config.policy.max_total_sequence_length
    facts = pair.generation.facts if isinstance(pair.generation, WorkerFacade) else {}
    return min(limit, int(facts.get("max_model_len", limit)))
