"""The metric that ranks checkpoints: which names a run accepts, warns about, or refuses with a suggestion."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from rl_core.config.diagnostics import InvalidConfigError
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.loader import load_config
from rl_train.config.rules.ranking import METRICS, VALIDATION, can_be_ranked, checkpoints_have_the_metric_that_ranks_them
from rl_train.config.rules.rule import CheckedConfig

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
RANKED = "checkpointing.metric_name="


@pytest.fixture(scope="module")
def registry():
    return Registry(discover())


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def load(registry, example, *overrides):
    return load_config(EXAMPLES / f"{example}.yaml", overrides, registry=registry)


def warnings(registry, example, *overrides):
    loaded = load(registry, example, *overrides)
    checked = CheckedConfig(run=loaded.run, registry=registry, layout=loaded.layout)
    return [problem.message for problem in checkpoints_have_the_metric_that_ranks_them.problems(checked)]


@pytest.mark.parametrize(
    ("example", "name", "says"),
    [
        ("grpo_addition", "validation/acuracy", "Did you mean 'validation/accuracy'?"),
        ("grpo_addition", "length/meen", "Did you mean 'length/mean'?"),
        ("grpo_addition", "validation/easy/accuracy", "no component of the run writes such a metric"),
        ("grpo_addition", "env/maths/accuracy", "no component of the run writes such a metric"),
        ("grpo_addition", "preference/accuracy", "no component of the run writes such a metric"),
        ("grpo_addition", "validation/pass@4", "no component of the run writes such a metric"),
        ("dpo_addition", "rollout/accuracy", "no component of the run writes such a metric"),
        ("sft_addition", "reward/mean", "no component of the run writes such a metric"),
        ("sft_addition", "validation/acuracy", "no component of the run writes such a metric"),
        ("dpo_addition", "validation/margins", "Did you mean 'validation/margin'?"),
        ("kto_addition", "validation/margins", "Did you mean 'validation/margin'?"),
        ("kto_addition", "preference/accuracy", "no component of the run writes such a metric"),
        ("ppo_addition", "value/explained_varience", "Did you mean 'value/explained_variance'?"),
    ],
)
def test_a_metric_that_the_run_cannot_write_is_an_error_with_a_suggestion(registry, example, name, says):
    with pytest.raises(InvalidConfigError) as refused:
        load(registry, example, RANKED + name)
    assert f"checkpointing.metric_name: {name}: " in str(refused.value)
    assert says in str(refused.value)


def test_metrics_of_a_prompt_sampler_are_those_of_the_chosen_one(registry):
    band, own = "++data.sampler.name=pass_rate_band", "++data.sampler.name=acme_sampler.LowestFirst"
    assert warnings(registry, "grpo_addition", RANKED + "data/sampler/in_band_frac", band) == []
    for name, *sampler in (("in_band_frac",), ("stage", band), ("in_bandfrac", band)):
        with pytest.raises(InvalidConfigError, match="no component of the run writes such a metric"):
            load(registry, "grpo_addition", f"{RANKED}data/sampler/{name}", *sampler)
    [warning] = warnings(registry, "grpo_addition", RANKED + "data/sampler/lowest", own)
    assert "data/sampler/lowest cannot be checked before the run" in warning


def test_without_validation_nothing_is_ranked_by_a_metric_of_validation(registry):
    off = ["grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false"]
    assert not can_be_ranked(load(registry, "grpo_addition", *off).run)
    assert warnings(registry, "grpo_addition", *off) == []


@pytest.mark.parametrize("threshold", ["null", "0.5"])
def test_an_accuracy_of_reward_functions_needs_a_threshold(registry, threshold):
    overrides = [
        "++env.arithmetic.reward_fn=examples.reward_functions.rewards.exact",
        f"++env.arithmetic.correct_above={threshold}",
    ]
    if threshold == "null":
        with pytest.raises(InvalidConfigError, match=r"set env\.<task>\.correct_above"):
            load(registry, "grpo_addition", *overrides)
    else:
        load(registry, "grpo_addition", *overrides)


def test_names_that_user_code_chooses_are_a_warning(registry):
    assert warnings(registry, "grpo_addition") == []
    several = ("grpo.val_num_generations_per_prompt=4", "policy.generation.val_temperature=1")
    assert warnings(registry, "grpo_addition", RANKED + "validation/pass@4", *several) == []
    [warning] = warnings(registry, "grpo_addition", RANKED + "env/arithmetic/digits")
    assert "env/arithmetic/digits cannot be checked before the run" in warning
    [warning] = warnings(registry, "custom_loss/train", RANKED + "my/loss")
    assert "All checkpoints are kept until the metric is written" in warning
    functions = ("reward_functions/train", "checkpointing.enabled=true")
    assert warnings(registry, *functions, RANKED + "reward/exact") == []
    assert "Did you mean 'reward/exact'?" in warnings(registry, *functions, RANKED + "reward/exakt")[0]


def test_validation_that_never_meets_a_checkpoint_is_a_warning(registry):
    length = ("grpo.max_num_steps=20", "grpo.val_at_end=false")
    periods = ("grpo.val_period=7", "checkpointing.save_period=11")
    assert not can_be_ranked(load(registry, "grpo_addition", *length, *periods).run)
    [warning] = warnings(registry, "grpo_addition", *length, *periods)
    assert "validation never runs at a step with a checkpoint" in warning
    assert warnings(registry, "grpo_addition", *length, "grpo.val_period=7", "checkpointing.save_period=2") == []
    assert warnings(registry, "grpo_addition", *length, "grpo.val_period=20", "checkpointing.save_period=11") == []


def test_the_page_of_metrics_and_the_names_that_configs_accept_are_the_same():
    known = {name for names in METRICS.values() for name in names.split()}
    known |= {f"validation/{name}" for names in VALIDATION.values() for name in names.split()}
    documented = set()
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if line.startswith("| `"):
            documented |= set(re.findall(r"`([\w/@<>]+)`", line.split(" | ")[0]))
    documented = {name.replace("<phase>", "*").replace("@k", "@*") for name in documented}
    expanded = {name for name in documented if "<" not in name and not name.startswith("env/")}
    listed = {name for name in known if any(name == one or fnmatchcase(one, name) for one in documented)}
    assert sorted(expanded - known) == []
    families = ("validation/score_", "validation/logprob_", "validation/kl_", "validation/topk_mass_")
    assert sorted(name for name in known - listed if not name.startswith(families)) == []
