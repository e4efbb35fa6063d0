"""The number game: binary search wins, and the state of a game is in the metadata of its row."""

from __future__ import annotations

import pickle

import pytest

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError, DataError
from rl_envs.guess import GuessNumberDataset, GuessNumberEnvironment


class HalvingPlayer:
    """Guesses the middle of the remaining range."""

    def __init__(self, lowest: int, highest: int) -> None:
        self.lowest, self.highest = lowest, highest

    def guess(self) -> int:
        return (self.lowest + self.highest) // 2

    def hear(self, hint: str) -> None:
        if hint == "higher":
            self.lowest = self.guess() + 1
        else:
            self.highest = self.guess() - 1


def play(environment, records):
    """Plays all games at once, each turn with another instance, like a pool; returns (rewards, metadata) at the end."""
    players = [HalvingPlayer(1, 100) for _ in records]
    logs = [list(record["messages"]) for record in records]
    metadata = [record["extra_env_info"] for record in records]
    rewards = [0.0] * len(records)
    active = list(range(len(records)))
    while active:
        environment = pickle.loads(pickle.dumps(environment))
        for row in active:
            logs[row].append({"role": "assistant", "content": str(players[row].guess())})
        answer = environment.step([logs[row] for row in active], [metadata[row] for row in active])
        for i, row in enumerate(active):
            rewards[row] += float(answer.rewards[i])
            metadata[row] = answer.metadata[i]
            logs[row].append(answer.observations[i])
            if not answer.terminateds[i]:
                players[row].hear(answer.observations[i]["content"])
        active = [row for i, row in enumerate(active) if not answer.terminateds[i]]
    return rewards, metadata


def test_binary_search_finds_every_number_up_to_a_hundred_in_seven_guesses():
    dataset = GuessNumberDataset({"num_samples": 300})
    rewards, metadata = play(GuessNumberEnvironment(), [dataset[i] for i in range(300)])
    assert rewards == [1.0] * 300
    assert max(info["guesses"] for info in metadata) == 7


def test_the_game_ends_after_the_last_guess():
    dataset = GuessNumberDataset({"num_samples": 300})
    rewards, metadata = play(GuessNumberEnvironment({"max_guesses": 3}), [dataset[i] for i in range(300)])
    assert max(info["guesses"] for info in metadata) == 3
    assert 0.0 < sum(rewards) / 300 < 0.2  # three guesses reach 7 of 100 numbers


def test_the_hints_are_correct():
    environment = GuessNumberEnvironment({"higher": "+", "lower": "-"})
    guesses = ["36", "37", "38", "no", "", "37.", "9" * 5000]
    answer = environment.step(
        [[{"role": "assistant", "content": text}] for text in guesses], [{"secret": 37, "guesses": 0}] * len(guesses)
    )
    unreadable = environment.config.unreadable
    assert [said["content"] for said in answer.observations] == ["+", "correct", "-", *[unreadable] * 4]
    assert answer.rewards.tolist() == answer.terminateds.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert answer.answers == ["36", "37", "38", None, None, None, None]


def test_the_input_metadata_is_not_changed():
    info = {"secret": 5, "guesses": 2}
    answer = GuessNumberEnvironment().step([[{"role": "assistant", "content": "1"}]], [info])
    assert (info["guesses"], answer.metadata[0]["guesses"]) == (2, 3)


def test_metrics_are_games_won_and_guesses_made():
    environment = GuessNumberEnvironment()
    answer = environment.step(
        [[{"role": "assistant", "content": text}] for text in ("5", "6")], [{"secret": 5, "guesses": 1}] * 2
    )
    batch = BatchedDataDict({"rewards": answer.rewards, "extra_env_info": answer.metadata})
    assert environment.global_post_process_and_metrics(batch)[1] == {"accuracy": 0.5, "mean_guesses": 2.0}


def test_secrets_are_in_the_range_and_depend_only_on_seed_and_index():
    config = {"lowest": 3, "highest": 9, "num_samples": 500, "question": "{lowest}-{highest}="}
    dataset = GuessNumberDataset(config)
    secrets = [dataset[i]["extra_env_info"]["secret"] for i in range(500)]
    assert set(secrets) == set(range(3, 10))
    assert secrets == [GuessNumberDataset(config)[i]["extra_env_info"]["secret"] for i in range(500)]
    assert dataset[0]["messages"] == [{"role": "user", "content": "3-9="}]


def test_invalid_configs_and_metadata_are_errors():
    with pytest.raises(ConfigError, match="the range is empty"):
        GuessNumberDataset({"lowest": 2, "highest": 1})
    with pytest.raises(DataError, match="secret"):
        GuessNumberEnvironment().step([[{"role": "assistant", "content": "1"}]], [{}])
