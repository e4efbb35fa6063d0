"""A config that allows fewer turns than an environment needs is refused, without importing the environment if possible."""

import sys

import pytest

from rl_train.config.rules.rollouts import rollouts_have_enough_turns_for_the_class
from rl_train.config.rules.rule import CheckedConfig
from rl_train.config.slots import static_attribute

GAME = """
from rl_core.interfaces import EnvironmentInterface

class Game(EnvironmentInterface):
    min_turns = 3

class LongerGame(Game):
    \"\"\"Inherits the number.\"\"\"

class Quiz(EnvironmentInterface):
    \"\"\"One turn is enough.\"\"\"
"""


@pytest.fixture
def game(tmp_path, monkeypatch):
    """A module on the path that no test has imported."""
    (tmp_path / "turned_game.py").write_text(GAME)
    monkeypatch.syspath_prepend(tmp_path)
    yield "turned_game"
    sys.modules.pop("turned_game", None)


@pytest.mark.parametrize(
    ("environment", "grpo", "where"),
    [
        ("{env_cls: turned_game.Game}", "", "config.yaml:12:9: env.game: rollouts of task 'game' have at most 1 turn"),
        (
            "{env_cls: turned_game.Game, max_rollout_turns: 2}",
            "",
            "env.game.max_rollout_turns: rollouts of task 'game' have at",
        ),
        (
            "{env_cls: turned_game.Game}",
            "max_rollout_turns: 2",
            "grpo.max_rollout_turns: rollouts of task 'game' have at most 2",
        ),
    ],
)
def test_too_few_turns_are_refused_at_the_key_that_limits_them(files, good, game, environment, grpo, where):
    text = good.replace("arithmetic: {}", f"game: {environment}")
    if grpo:
        text = text.replace("grpo:\n", f"grpo:\n  {grpo}\n")
    [error] = files.errors(text)
    assert where in error
    assert error.endswith(
        "but environment turned_game.Game needs 3 to give a reward. Set env.game.max_rollout_turns to 3 or more."
    )
    assert "turned_game" not in sys.modules


@pytest.mark.parametrize("environment", ["turned_game.Game, max_rollout_turns: 3", "turned_game.Quiz"])
def test_enough_turns_are_accepted(files, good, game, environment):
    run = files.load(good.replace("arithmetic: {}", f"game: {{env_cls: {environment}}}")).run
    assert not [*rollouts_have_enough_turns_for_the_class.problems(CheckedConfig(run=run, registry=files.registry))]


def test_inherited_needs_are_found_when_the_class_is_imported(files, good, game):
    run = files.load(good.replace("arithmetic: {}", "game: {env_cls: turned_game.LongerGame}")).run
    assert static_attribute("turned_game.LongerGame", "min_turns") is None
    [problem] = rollouts_have_enough_turns_for_the_class.problems(CheckedConfig(run=run, registry=files.registry))
    assert problem.path == ("env", "game")
    assert "turned_game.LongerGame needs 3" in problem.message


def test_needs_that_are_not_literals_are_not_read_from_source(game, tmp_path):
    (tmp_path / "turned_game.py").write_text("class Game:\n    min_turns = 1 + 2\n    min_turns: int\n")
    assert static_attribute("turned_game.Game", "min_turns") is None
