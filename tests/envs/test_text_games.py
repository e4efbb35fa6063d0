"""Adapters of text games: real games of Gymnasium, TextArena and SkyRL Gym, one per session."""

import random

import gymnasium
import nltk
import pytest
import textarena
from environment_steps import step_checked

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError, DataError
from rl_envs.text_games.gymnasium import GymnasiumEnvironment
from rl_envs.text_games.session import TextGameDataset
from rl_envs.text_games.skyrl_gym import SkyRLGymEnvironment
from rl_envs.text_games.textarena import TextArenaEnvironment

LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "actions": {"left": 0, "down": 1, "right": 2, "up": 3}}


def begin(environment, info, session="a"):
    info = {**info, "session_id": session}
    return info, environment.reset(info)


def play(environment, info, *messages):
    """Each turn's return value, until the game ends."""
    turns = []
    for message in messages:
        turns.append(step_checked(environment, "game", [[{"role": "assistant", "content": message}]], [info]))
        info = turns[-1].metadata[0]
        if turns[-1].terminateds[0]:
            break
    return turns


def rewards(turns, name="game"):
    values = [turn.rewards[name] if isinstance(turn.rewards, dict) else turn.rewards for turn in turns]
    return [round(float(value[0]), 4) for value in values]


def test_a_gymnasium_game_is_won_by_naming_actions_and_shows_the_position_in_brackets():
    environment = GymnasiumEnvironment(LAKE)
    info, opening = begin(environment, {"seed": 0})
    assert opening["content"] == "[S]FFF\nFHFH\nFFFH\nHFFG"
    path = ["down", "I go <action> Down </action>", "right", "right", "down", "right"]
    turns = play(environment, info, *path)
    assert rewards(turns) == [0, 0, 0, 0, 0, 1]
    assert [bool(turn.terminateds[0]) for turn in turns] == [False] * 5 + [True]
    assert turns[1].observations[0]["content"].splitlines()[1:] == ["SFFF", "FHFH", "[F]FFH", "HFFG"]
    assert turns[-1].metadata[0]["total_reward"] == 1.0


def test_a_message_without_an_action_costs_the_penalty_and_does_not_change_the_game():
    environment = GymnasiumEnvironment({**LAKE, "illegal_action_penalty": 0.25, "max_moves": 3})
    info, _ = begin(environment, {"seed": 0})
    turns = play(environment, info, "jump", "down", "<think>up</think>down")
    assert rewards(turns, "illegal_action") == [-0.25, 0, 0]
    assert turns[0].answers == [None]
    assert "left, down, right, up" in turns[0].observations[0]["content"]
    assert "[F]FFH" in turns[2].observations[0]["content"]  # two rows down: the thought and the unknown action moved nothing
    assert bool(turns[2].terminateds[0])  # max_moves


def test_rollouts_of_one_seed_are_one_game_and_other_sessions_do_not_change_it():
    slippery = {**LAKE, "kwargs": {"is_slippery": True}}
    for environment in (GymnasiumEnvironment(slippery), TextArenaEnvironment({"id": "FrozenLake-v0"})):
        moves = ["[right]", "[down]"] if isinstance(environment, TextArenaEnvironment) else ["right", "down", "right", "down"]
        alone, opening = begin(environment, {"seed": 5}, "alone")
        expected = [turn.observations[0] for turn in play(environment, alone, *moves)]
        first, first_opening = begin(environment, {"seed": 5}, "first")
        other, other_opening = begin(environment, {"seed": 6}, "other")
        assert first_opening == opening
        if isinstance(environment, TextArenaEnvironment):
            assert other_opening != opening
        seen = []
        for move in moves[: len(expected)]:
            play(environment, other, moves[0])
            (turn,) = play(environment, first, move)
            seen.append(turn.observations[0])
        assert seen == expected
        for session in ("alone", "first", "other"):
            environment.close(session)


def test_textarena_leaves_the_generator_of_python_as_it_was():
    environment = TextArenaEnvironment({"id": "GuessTheNumber-v0"})
    random.seed(3)
    before = random.getstate()
    info, _ = begin(environment, {"seed": 1})
    play(environment, info, "[4]")
    assert random.getstate() == before


def test_each_turn_of_textarena_shows_only_what_is_new():
    environment = TextArenaEnvironment({"id": "GuessTheNumber-v0"})
    info, opening = begin(environment, {"seed": 1})
    assert "between 1 and 20" in opening["content"]
    turns = play(environment, info, *[f"[{number}]" for number in range(1, 11)])
    assert all("between 1 and 20" not in turn.observations[0]["content"] for turn in turns)
    assert rewards(turns)[:-1] == [0.0] * (len(turns) - 1)


def test_a_won_game_of_textarena_has_its_reward():
    environment = TextArenaEnvironment({"id": "TowerOfHanoi-v0"})
    info, _ = begin(environment, {"seed": 0})
    turns = play(environment, info, "[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]")
    assert rewards(turns)[-1] == 1.0
    batch = BatchedDataDict({"extra_env_info": [turns[-1].metadata[0], {**info, "moves": 1, "total_reward": 0.5}]})
    assert environment.global_post_process_and_metrics(batch)[1] == {"accuracy": 0.5, "mean_moves": 4.0}


def test_skyrl_gym_reads_the_row_and_pays_by_turn():
    environment = SkyRLGymEnvironment({"id": "gsm8k_multi_turn"})
    info, opening = begin(environment, {"reward_spec": {"ground_truth": "4"}, "extra_info": {"max_turns": 4}})
    assert opening is None
    turns = play(environment, info, "no number", "#### 5", "#### 4")
    assert rewards(turns) == [0.0, 0.05, 1.0]
    assert "#### ANSWER" in turns[0].observations[0][0]["content"]


class Broken(textarena.Env):
    """A game that fails when the model writes a certain word."""

    def reset(self, num_players, seed=None):
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed)
        self.state.reset(game_state={}, player_prompt_function=lambda **_: "Say anything.")

    def step(self, action):
        if "crash" in action:
            raise IndexError("list index out of range")
        return self.state.step()


class WithoutData(textarena.Env):
    def __init__(self):
        nltk.data.find("corpora/words_of_a_test")

    def reset(self, num_players, seed=None): ...

    def step(self, action): ...


@pytest.fixture
def own_games():
    """Games that are registered for one test."""
    textarena.register("Broken-v0", Broken)
    textarena.register("WithoutData-v0", WithoutData)
    yield
    for name in ("Broken-v0", "WithoutData-v0"):
        del textarena.envs.registration.ENV_REGISTRY[name]


def test_an_exception_of_the_library_fails_only_its_row(own_games):
    environment = TextArenaEnvironment({"id": "Broken-v0"})
    rows = [begin(environment, {"seed": row}, f"session {row}")[0] for row in range(3)]
    logs = [[{"role": "assistant", "content": text}] for text in ("fine", "crash", "fine")]
    result = step_checked(environment, "game", logs, rows)
    assert result.failures == [None, "the game Broken-v0 raised IndexError: list index out of range", None]


def test_missing_data_of_a_library_are_named_with_the_command_that_downloads_them(own_games):
    with pytest.raises(ConfigError, match=r"needs the NLTK data 'words_of_a_test'.*python -m nltk.downloader words_of_a_test"):
        TextArenaEnvironment({"id": "WithoutData-v0"})


@pytest.mark.parametrize(
    ("environment", "config", "message"),
    [
        (GymnasiumEnvironment, {"id": "Nope-v1"}, "Nope"),
        (GymnasiumEnvironment, {"id": "FrozenLake-v1", "kwargs": {"depth": 3}}, "depth"),
        (GymnasiumEnvironment, {"id": "CartPole-v1"}, "Set observation: value"),
        (GymnasiumEnvironment, {"id": "FrozenLake-v1", "actions": {"jump": 7}}, "jump is not an action of FrozenLake-v1"),
        (GymnasiumEnvironment, {"id": "Pendulum-v1", "observation": "value"}, "name its actions"),
        (TextArenaEnvironment, {"id": "Nope-v0"}, "Nope-v0"),
        (TextArenaEnvironment, {"id": "TicTacToe-v0"}, "for one player"),
        (SkyRLGymEnvironment, {"id": "nope"}, "gsm8k"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused_before_a_run(environment, config, message):
    with pytest.raises(ConfigError, match=message):
        environment(config)


def test_rows_without_what_a_game_needs_are_refused_by_name():
    with pytest.raises(DataError, match="`seed`"):
        GymnasiumEnvironment(LAKE).reset({"session_id": "a"})
    with pytest.raises(DataError, match="reward_spec"):
        SkyRLGymEnvironment({"id": "gsm8k"}).reset({"session_id": "a"})


def test_a_closed_session_releases_its_game(monkeypatch):
    environment = GymnasiumEnvironment(LAKE)
    closed = []
    monkeypatch.setattr(gymnasium.Wrapper, "close", lambda self: closed.append(type(self)))
    begin(environment, {"seed": 0})
    environment.close("a")
    environment.close("a")  # of a rollout that never began
    assert len(closed) == 1


def test_seeds_depend_only_on_the_settings_and_no_seed_is_in_both_splits():
    seeds = {
        split: [
            record["extra_env_info"]["seed"]
            for record in TextGameDataset({"question": "Play.", "num_samples": 200, "split": split})
        ]
        for split in ("train", "validation")
    }
    assert not set(seeds["train"]) & set(seeds["validation"])
    assert seeds["train"] == [
        TextGameDataset({"question": "Play.", "num_samples": 200})[index]["extra_env_info"]["seed"] for index in range(200)
    ]
    assert TextGameDataset({"question": "Play.", "seed": 1})[0] != TextGameDataset({"question": "Play."})[0]
