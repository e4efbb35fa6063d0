"""What `rollout.max_staleness` above 0 requires: each refusal names the key and the reason."""

from dataclasses import replace
from pathlib import Path

import pytest

from rl_core.config.diagnostics import InvalidConfigError
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.loader import load_config
from rl_train.config.rules.rule import Stage

EXAMPLES = Path(__file__).parents[3] / "examples"
ASYNC = ["++rollout.max_staleness=1", "++cluster.backend=ray", "++loss_fn.use_importance_sampling_correction=true"]


@pytest.fixture(scope="module")
def registry():
    return Registry(discover())


def problems(registry, *overrides, example="grpo_addition"):
    try:
        load_config(EXAMPLES / f"{example}.yaml", list(overrides), registry=registry, stages=(Stage.STATIC,))
    except InvalidConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_asynchronous_rollouts_are_accepted_with_a_correction_and_separate_processes(registry):
    assert problems(registry, *ASYNC) == []
    assert problems(registry, *ASYNC[:2], "++loss_fn.ratio_to=sampler") == []
    assert problems(registry, *ASYNC, "++grpo.use_dynamic_sampling=true") == []
    assert problems(registry, *ASYNC, example="ppo_addition") == []
    assert problems(registry, *ASYNC[:2], "++distillation.student_data_fraction=0.5", example="distillation_addition") == []


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([ASYNC[0], ASYNC[1]], "older samples would bias the gradient"),
        ([*ASYNC, "++cluster.backend=in_process"], "policy and engine compute in one thread"),
        ([*ASYNC[:2], "++loss_fn.topk=null", "++loss_fn.divergence=reverse_kl"], "for distillation loss_fn.topk"),
        ([*ASYNC, "++rollout.order=exact", "++grpo.use_dynamic_sampling=true"], "dynamic sampling replaces groups"),
        ([*ASYNC, "++rollout.order=exact", "++rollout.ahead=0"], "remove ahead"),
        (["++rollout.order=exact"], "order: exact has no effect with max_staleness 0"),
        ([*ASYNC, "++rollout.ahead=2"], "lower ahead or raise max_staleness"),
    ],
)
def test_what_cannot_work_with_older_rollouts_is_refused_with_the_reason(registry, overrides, reason):
    found = problems(registry, *overrides, example="distillation_addition" if "topk" in str(overrides) else "grpo_addition")
    assert any(reason in problem for problem in found), found


def test_an_engine_must_sample_single_rows_but_need_not_continue_them_over_refits(registry, monkeypatch):
    assert "refit_in_flight" not in registry.find("generation", "openai").capabilities
    server = ["base_url=http://127.0.0.1:1/v1", "model=m", "weight_updates=vllm"]
    section = ["backend=openai", "refit_folder=/tmp", *(f"openai_cfg.{setting}" for setting in server)]
    assert problems(registry, *ASYNC, *(f"++policy.generation.{setting}" for setting in section)) == []
    find = registry.find
    monkeypatch.setattr(registry, "find", lambda *args, **options: replace(find(*args, **options), capabilities=("disk",)))
    found = problems(registry, *ASYNC)
    assert any("does not have the capability 'async_rows'" in problem for problem in found), found


def test_an_algorithm_without_rollouts_is_refused(registry):
    found = problems(registry, "++rollout.max_staleness=1", "++cluster.backend=ray", example="dpo_addition")
    assert any("does not sample" in problem for problem in found), found
