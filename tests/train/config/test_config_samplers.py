"""The section `data.sampler`: what is refused, where, and before anything is loaded."""

import json
from pathlib import Path

import pytest

from rl_core.config.diagnostics import InvalidConfigError
from rl_core.errors import UserError
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.preparation import Preparation
from rl_train.config.data_sections import DataConfig, SamplerConfig
from rl_train.config.loader import load_config
from rl_train.config.rules.rule import Stage
from rl_train.data.prompt_sampler import SampledPrompts

EXAMPLES = Path(__file__).parents[3] / "examples"
ASYNC = ["++rollout.max_staleness=2", "++cluster.backend=ray", "++loss_fn.ratio_to=sampler"]


@pytest.fixture(scope="module")
def registry():
    return Registry(discover())


def problems(registry, sampler, *overrides, example="grpo_addition"):
    section = f"++data.sampler={json.dumps(sampler)}"
    try:
        load_config(EXAMPLES / f"{example}.yaml", [section, *overrides], registry=registry, stages=(Stage.STATIC,))
    except InvalidConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize(
    "sampler",
    [
        {"name": "pass_rate_band", "low": 0.1, "exploration": 0.0},
        {"name": "task_mix", "task_temperature": 0.5, "delay": 3},
        {"name": "stages", "bounds": [2, 4], "at_steps": [10, 20]},
        {"name": "stages", "key": "level", "bounds": [2], "at_reward": 0.7, "window": 16},
        {"name": "acme_sampler.LowestFirst", "kwargs": {"initial": 0.2}},
        {"name": "acme_sampler:LowestFirst"},
    ],
)
def test_valid_samplers_are_accepted_and_read_back_from_all_of_their_values(registry, sampler):
    assert problems(registry, sampler) == []
    assert SamplerConfig(**SamplerConfig(**sampler).model_dump()) == SamplerConfig(**sampler)


@pytest.mark.parametrize(
    ("sampler", "reason"),
    [
        (
            {"name": "pass_rate_bend"},
            "unknown prompt sampler 'pass_rate_bend': use pass_rate_band, task_mix, stages or a dotted",
        ),
        ({"name": "pass_rate_band", "low": 0.8}, "the band from low (0.8) to high (0.8) is empty: low must be below high"),
        ({"name": "pass_rate_band", "exploration": 1.5}, "at most 1.0; found 1.5"),
        (
            {"name": "pass_rate_band", "task_temperature": 2.0},
            "sampler 'pass_rate_band' does not use task_temperature: remove it",
        ),
        ({"name": "task_mix", "window": 3}, "sampler 'task_mix' does not use window"),
        ({"name": "task_mix", "kwargs": {"a": 1}}, "sampler 'task_mix' does not use kwargs"),
        ({"name": "task_mix", "hight": 1.0}, "hight"),
        ({"name": "acme_sampler.LowestFirst", "low": 0.1}, "does not use low"),
        ({"name": "acme_sampler.HighestFirst"}, "data.sampler.name: cannot import 'acme_sampler.HighestFirst'"),
        ({"name": "stages", "at_steps": [2]}, "stages needs bounds"),
        ({"name": "stages", "bounds": [4, 2], "at_steps": [2, 3]}, "each must be larger than the one before"),
        ({"name": "stages", "bounds": [2]}, "stages end at_steps or at_reward: set one of them"),
        ({"name": "stages", "bounds": [2], "at_steps": [5], "at_reward": 0.5}, "set one of them"),
        ({"name": "stages", "bounds": [2, 4], "at_steps": [5]}, "at_steps has 1 steps, but there are 2 bounds"),
        ({"name": "stages", "bounds": [2], "at_steps": [1]}, "they must be above 1"),
        ({"name": "stages", "bounds": [2], "at_steps": [5], "window": 8}, "window has no effect with at_steps"),
    ],
)
def test_a_section_that_is_impossible_or_without_effect_is_one_error(registry, sampler, reason):
    [problem] = problems(registry, sampler)
    assert ": data.sampler" in problem or problem.startswith("data.sampler")
    assert reason in problem


BAND = {"name": "pass_rate_band"}


@pytest.mark.parametrize("example", ["sft_addition", "dpo_addition", "rm_addition"])
def test_an_algorithm_that_does_not_sample_prompts_has_no_sampler(registry, example):
    [problem] = problems(registry, BAND, example=example)
    assert f"data.sampler: {example.partition('_')[0]} does not sample prompts, so the section has no effect" in problem


def test_a_sampler_that_needs_rewards_is_refused_if_nothing_scores(registry):
    unscored = ["env=null", "data.validation=null", "++distillation.val_period=0", "++distillation.val_at_start=false"]
    unscored += ["++distillation.val_at_end=false", "++checkpointing.metric_name=null", "++checkpointing.keep_top_k=null"]
    found = problems(registry, BAND, *unscored, example="distillation_addition")
    assert any(
        "data.sampler.name: pass_rate_band chooses prompts by their rewards, but nothing scores" in each for each in found
    )
    by_steps = {"name": "stages", "bounds": [2], "at_steps": [5]}
    assert not any("sampler" in each for each in problems(registry, by_steps, *unscored, example="distillation_addition"))


def test_rewards_cannot_be_seen_before_the_staleness_allows(registry):
    [problem] = problems(registry, BAND | {"delay": 1}, *ASYNC)
    assert "data.sampler.delay: is 1, but rewards may be known rollout.max_staleness (2) steps later" in problem
    assert problems(registry, BAND | {"delay": 2}, *ASYNC) == problems(registry, BAND, *ASYNC) == []


@pytest.mark.parametrize("name", ["task_mix", "stages"])
def test_weights_of_datasets_that_the_sampler_does_not_read_are_an_error(name):
    rest = {"bounds": [2], "at_steps": [5]} if name == "stages" else {}
    mix = {part: {"dataset_name": "arithmetic", "weight": 2.0} for part in ("a", "b")}
    with pytest.raises(ValueError, match=f"weight has no effect: the sampler {name} decides how rows are mixed"):
        DataConfig(mix=mix, sampler={"name": name, **rest})
    DataConfig(mix=mix, sampler=BAND)


def loaders_of(registry, sampler, *overrides):
    section = f"++data.sampler={json.dumps(sampler)}"
    run = load_config(
        EXAMPLES / "grpo_addition.yaml", [section, "data.train.num_samples=100", *overrides], registry=registry
    ).run
    return Preparation(run, registry).loaders


def test_what_only_the_data_shows_is_an_error_before_a_model_is_loaded(registry):
    stages = {"name": "stages", "key": "digits", "bounds": [2], "at_steps": [5]}
    with pytest.raises(UserError, match=r"record 0: 'digits' is not in its metadata \(expected_answer, in_box\)") as raised:
        loaders_of(registry, stages)
    assert raised.value.key.startswith("data.sampler")
    with pytest.raises(UserError, match="all rows have the task 'arithmetic'"):
        loaders_of(registry, {"name": "task_mix"})
    with pytest.raises(UserError, match="unexpected keyword argument 'wrong'") as raised:
        loaders_of(registry, {"name": "acme_sampler.LowestFirst", "kwargs": {"wrong": 2}})
    assert raised.value.key == "data.sampler.name"


def test_an_epoch_of_a_sampler_is_as_many_prompts_as_there_are_rows(registry, caplog):
    loaders = loaders_of(registry, BAND)
    assert isinstance(loaders.sampled, SampledPrompts)
    assert loaders.prompts.draws(3) == -(-3 * 100 // 64)
    assert "leaves out" not in caplog.text
