"""A custom loss and algorithm by import path: the examples learn, and invalid configs are explained."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from rl_core.config.diagnostics import InvalidConfigError
from rl_train.config.loader import load_config
from rl_train.launch.train import train
from rlcore_cli.main import app

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LOSS = ROOT / "examples" / "custom_loss"
ALGORITHM = ROOT / "examples" / "custom_algorithm"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Puts the working directory on the import path, as `rlcore` does."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def run(config, folder, *overrides):
    here = [f"logger.log_dir={folder}", "logger.run_name=run", "cluster.backend=in_process", "checkpointing.enabled=false"]
    train(config, [*here, *overrides], resume="never", console=False)
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


FULL = pytest.mark.full("in CI both examples train a few steps; e2e/test_algorithms.py has runs that learn")


@pytest.mark.parametrize(("steps", "gain"), [(2, None), pytest.param(40, 0.1, marks=FULL)])
def test_the_example_of_a_loss_trains(tmp_path, steps, gain):
    rows = run(
        LOSS / "train.yaml", tmp_path, f"sft.max_num_steps={steps}", f"sft.val_period={steps}", "sft.max_val_samples=256"
    )
    accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    assert len(accuracy) == 2
    assert gain is None or accuracy[-1] > accuracy[0] + gain, accuracy
    # The sum of nll / length ** 0.5 is between the mean over tokens and the sum over answers, which are both reported.
    last = rows[-1]
    assert last["loss/nll_of_tokens"] < last["loss"] < last["loss/nll_of_answers"]


@pytest.mark.parametrize(("steps", "gain"), [(2, None), pytest.param(25, 0.08, marks=FULL)])
def test_the_example_of_an_algorithm_trains(tmp_path, steps, gain):
    changes = ("num_prompts_per_step=32", f"max_num_steps={steps}", "val_period=0", "max_val_samples=256")
    rows = run(ALGORITHM / "train.yaml", tmp_path, *(f"best_of_n.{change}" for change in changes))
    accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    assert len(accuracy) == 2
    assert gain is None or accuracy[-1] > accuracy[0] + gain, accuracy
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert all(0.0 < row["best_of_n/kept_frac"] <= 1.0 for row in rows[1:])
    rollouts = (tmp_path / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    assert len(rollouts) == 32 * 8


def test_the_best_of_a_group_is_kept_and_groups_without_a_good_one_are_not():
    from examples.custom_algorithm.best_of_n import best_rows

    batch = {
        "group_ids": torch.tensor([0, 1, 0, 1, 2, 2]),
        "rewards": torch.tensor([0.0, 0.5, 1.0, 0.25, 0.0, -1.0]),
        "sample_mask": torch.ones(6),
    }
    assert best_rows(batch, min_reward=0.0) == [2, 1]
    assert best_rows(batch, min_reward=0.5) == [2]
    assert best_rows({**batch, "sample_mask": torch.zeros(6)}, min_reward=0.0) == []


@pytest.mark.parametrize(
    ("exponent", "expected"), [(0.0, (3.0 + 2.0) / 2), (1.0, (1.0 + 2.0) / 2), (0.5, (3.0**0.5 + 2.0) / 2)]
)
def test_the_loss_of_the_example_equals_its_formula(exponent, expected):
    from examples.custom_loss.length_normalised import LengthNormalisedLoss

    from rl_train.config.schema import OpenLossConfig

    logprobs = torch.tensor([[0.0, -1.0, -1.0, -1.0], [0.0, -9.0, -2.0, 0.0]])
    data = {"token_mask": torch.tensor([[0.0, 1, 1, 1], [0, 0, 1, 0]]), "sample_mask": torch.ones(2)}
    loss, _ = LengthNormalisedLoss(OpenLossConfig(exponent=exponent))(logprobs, data, torch.tensor(2.0), torch.tensor(4.0))
    # Up to float32's rounding of one root and two divisions.
    assert float(loss) == pytest.approx(expected, rel=1e-6)


def test_a_resolved_config_of_an_algorithm_by_its_paths_is_the_same_run(tmp_path):
    loaded = load_config(ALGORITHM / "train.yaml", ["best_of_n.min_reward=0.5"])
    assert loaded.run.algorithm_name == "best_of_n"
    assert (loaded.run.algorithm.min_reward, loaded.run.loss_fn.name) == (0.5, "nll")
    assert str(loaded.source["algorithm.train"]).startswith(f"{ALGORITHM / 'train.yaml'}:6:")
    (tmp_path / "again.yaml").write_text(loaded.to_yaml())
    assert load_config(tmp_path / "again.yaml").resolved == loaded.resolved


def test_validate_finds_modules_in_the_working_directory():
    for config in (LOSS, ALGORITHM):
        result = CliRunner().invoke(app, ["validate", str(config / "train.yaml")])
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"best_of_n": None}, "algorithm: requires a section with its settings"),
        ({"second": {}}, "has best_of_n and second: remove all but one"),
        ({"algorithm": {"config": None}}, "algorithm.config: must be"),
        ({"algorithm": {"train": "best_of_n"}}, "must be a dotted path"),
        ({"algorithm": {"train": "nowhere_at_all.train"}}, "there is no package 'nowhere_at_all'"),
        ({"algorithm": {"config": "examples.custom_algorithm.settings.Gone"}}, "has no 'Gone'"),
        ({"algorithm": {"config": "rl_train.config.schema.LossConfig"}}, "is not a subclass of"),
        ({"algorithm": {"config": "rl_train.config.schema.AlgorithmConfig"}}, "loss_fn.name is required"),
        ({"algorithm": {"steps": 3}}, "algorithm has no key 'steps'"),
        ({"algorithm": "examples.custom_algorithm.best_of_n.train"}, "must be a section with keys below it"),
        ({"best_of_n": {"num_generations_per_prompt": 1}}, "a whole number, 2 or more"),
        ({"best_of_n": {"min_rewards": 1}}, "Did you mean 'min_reward'?"),
        ({"algorithm": None}, "There is no section 'best_of_n'"),
        ({"best_of_n": None, "Best of N": {}}, "A component cannot be named 'Best of N'"),
        ({"best_of_n": None, "grpo": {}}, "grpo: is the name of an algorithm from a plugin"),
    ],
)
def test_an_invalid_algorithm_is_an_error_with_its_reason(tmp_path, change, says):
    config = yaml.safe_load((ALGORITHM / "train.yaml").read_text())
    for key, value in change.items():
        if value is None:
            del config[key]
        else:
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    config["policy"]["model_name"] = str(ROOT / "examples" / "addition" / "model")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(InvalidConfigError) as caught:
        load_config(tmp_path / "config.yaml")
    assert says in str(caught.value)


def test_a_section_with_a_dotted_name_explains_how_to_set_a_custom_algorithm(tmp_path):
    (tmp_path / "config.yaml").write_text("my_package.best_of_n.train: {}\n")
    with pytest.raises(InvalidConfigError, match=r"set `algorithm: \{train: \.\.\., config: \.\.\.\}`"):
        load_config(tmp_path / "config.yaml")


def test_the_page_shows_the_current_files():
    page = (ROOT / "docs" / "custom_losses_and_algorithms.md").read_text()
    for file in (LOSS / "length_normalised.py", ALGORITHM / "settings.py", ALGORITHM / "best_of_n.py"):
        assert f"```python\n{file.read_text()}```" in page, file
