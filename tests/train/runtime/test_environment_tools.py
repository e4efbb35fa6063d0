"""Environments without a model: the checks find typical mistakes, rollouts are played, and stored rollouts are scored again."""

import json
import random
import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import yaml

from rl_core.config.schema import EnvironmentConfig
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_envs.arithmetic import ArithmeticDataset
from rl_train.assembly.workers import Builder
from rl_train.config.schema import RunConfig
from rl_train.diagnostics import DiagnosisStatus
from rl_train.pools.elsewhere import environment_elsewhere
from rl_train.workbench.check import check_environment
from rl_train.workbench.play import open_trial, play, random_player, repeated_answers, scripted_player
from rl_train.workbench.rescore import rescore

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"


class Lengths(EnvironmentInterface):
    """Rewards long answers; subclasses make one mistake each."""

    def rewards(self, texts):
        return [float(len(text)) for text in texts]

    def step(self, message_log_batch, metadata):
        texts = [log[-1]["content"] for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * len(texts),
            metadata=[{**info, "seen": True} for info in metadata],
            next_stop_strings=[None] * len(texts),
            rewards=torch.tensor(self.rewards(texts)),
            terminateds=torch.ones(len(texts)),
        )


class Changes(Lengths):
    def step(self, message_log_batch, metadata):
        for info in metadata:
            info["turn"] = info.get("turn", 0) + 1
        return super().step(message_log_batch, metadata)


class Draws(Lengths):
    def rewards(self, texts):
        return [random.random() for _ in texts]


class Remembers(Lengths):
    def __init__(self, config):
        self.start = random.random()

    def rewards(self, texts):
        return [self.start for _ in texts]


class Compares(Lengths):
    def rewards(self, texts):
        longest = max(len(text) for text in texts)
        return [float(len(text) == longest) for text in texts]


class Wrong(Lengths):
    def rewards(self, texts):
        return [0.0]


class Holds(Lengths):
    def step(self, message_log_batch, metadata):
        made = super().step(message_log_batch, metadata)
        return made._replace(metadata=[{"key": lambda: 0} for _ in metadata])


class ReadsTokens(Lengths):
    reads_token_ids = True


MISTAKES = {
    "Changes": ("metadata and messages", "changed the metadata"),
    "Draws": ("determinism", "two equal calls had different results"),
    "Remembers": ("determinism", "a new instance returned different results"),
    "Compares": ("independence of rows", "in a batch and"),
    "Wrong": ("step", "was called with 3 rows but returned 1"),
    "Holds": ("pickling", "cannot be pickled"),
}


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"{n}+1=", "expected_answer": f"{n + 1}", "n": n}) + "\n" for n in range(3))
    )
    return path


def checked(name, rows, *settings):
    """Status and detail of each check."""
    trial = open_trial(name, settings, rows=rows)
    return {result.name: (result.status, result.found) for result in check_environment(trial)}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_typical_mistake_is_found_by_its_check(name, rows, monkeypatch):
    check, says = MISTAKES[name]
    found = checked(f"{__name__}.{name}", rows)
    assert next(each for each, (status, _) in found.items() if status is DiagnosisStatus.FAILED) == check
    assert says in found[check][1]


@pytest.mark.parametrize(("name", "reads"), [("Lengths", False), ("ReadsTokens", True)])
def test_a_class_decides_whether_a_run_gives_it_token_ids(name, reads):
    run = RunConfig.model_construct(env={"lengths": EnvironmentConfig(env_cls=f"{__name__}.{name}")})
    with ExitStack() as exits:
        builder = Builder(run=run, registry=Registry(discover()), exits=exits, cluster=None)
        assert builder.environments()["lengths"].reads_token_ids is reads


@pytest.mark.parametrize(
    ("section", "reads"), [({"name": "function", "reward_fn": "json.dumps"}, True), ({"name": "guess"}, False)]
)
def test_the_class_decides_in_another_interpreter_too(section, reads):
    registry = Registry(discover())
    model = registry.find("environment", section["name"]).load_config()
    facts = environment_elsewhere("task", model(python=sys.executable, **section), registry)
    assert facts.reads_token_ids is reads


@pytest.mark.slow
def test_an_environment_without_mistakes_passes_and_its_right_answers_are_compared(rows):
    found = checked("math", rows)
    assert {status for status, _ in found.values()} == {DiagnosisStatus.OK, DiagnosisStatus.NOTE}
    assert "as '\\\\boxed{ANSWER}', 3 of 3 expected answers" in found["correct answers"][1]
    assert "accuracy 0" in found["metrics"][1]


@pytest.mark.slow
def test_an_environment_with_tools_is_checked_without_a_model(rows):
    found = checked("tools", rows)
    assert {status for status, _ in found.values()} == {DiagnosisStatus.OK, DiagnosisStatus.NOTE}
    assert "there is no tool 'no_such_tool'. Available tools: calculator." in found["tool calls"][1]
    assert "3 of 3 expected answers" in found["correct answers"][1]


def test_right_answers_without_a_higher_reward_and_a_failed_constructor_are_reported(rows):
    found = checked("rl_envs.arithmetic.ArithmeticEnvironment", rows, "format_reward=-1")
    assert list(found) == ["construction"]
    assert found["construction"][0] is DiagnosisStatus.FAILED
    (rows.parent / "constant_reward.py").write_text("def nothing(completion, expected_answer):\n    return 0.0\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(rows.parent))
        found = checked("constant_reward.nothing", rows)
    assert found["correct answers"][0] is DiagnosisStatus.FAILED
    assert "no form of the expected answer" in found["correct answers"][1]


def test_rows_come_from_a_file_a_config_or_the_dataset_of_the_same_name(rows):
    trial = open_trial("math", rows=rows, limit=2)
    assert [row.metadata for row in trial.rows] == [{"expected_answer": "1", "n": 0}, {"expected_answer": "2", "n": 1}]
    assert trial.rows[0].messages == [{"role": "user", "content": "0+1="}]
    trial = open_trial("sliding_puzzle", ["max_moves=3", "data.size=2"], limit=2)
    assert (trial.max_turns, len(trial.rows), len(trial.rows[0].metadata["board"])) == (3, 2, 2)
    for name, settings, says in (
        ("math", (), "There are no rows for 'math'"),
        ("sliding_puzzle", ("max_move=3",), "Did you mean 'max_moves'"),
        ("sliding_puzzle", ("data.sizes=3",), "Did you mean 'size'"),
        ("sliding_puzzle", ("max_moves",), "write key=value"),
    ):
        with pytest.raises(ConfigError, match=says):
            open_trial(name, settings)
    rows.write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:1: the row has \['text'\]"):
        open_trial("math", rows=rows)


def test_a_rollout_is_played_turn_by_turn_until_the_script_or_the_game_ends():
    trial = open_trial("guess", ["data.lowest=5", "data.highest=5"], limit=1)
    turns = list(play(trial.make(), "guess", trial.rows[0], scripted_player(["1", "9", "5", "5"]), max_turns=7))
    assert [turn.answer for turn in turns] == ["1", "9", "5"]
    assert [turn.rewards["reward"] for turn in turns] == [0.0, 0.0, 1.0]
    assert [message["content"] for turn in turns for message in turn.replies] == ["higher", "lower"]
    assert turns[-1].ended
    assert len(list(play(trial.make(), "guess", trial.rows[0], scripted_player(["1"]), max_turns=7))) == 1
    assert trial.rows[0].metadata["guesses"] == 0


class Unscored(Lengths):
    """Ends after the second turn; the first answer "bad" cannot be scored."""

    def step(self, message_log_batch, metadata):
        made = super().step(message_log_batch, metadata)
        turns = torch.tensor([len(log) // 2 for log in message_log_batch])
        scored = [log[-1]["content"] != "bad" or len(log) > 2 for log in message_log_batch]
        return made._replace(terminateds=turns >= 2, scored=scored)


def test_a_player_reads_the_replies_and_rewards_of_equal_answers_are_summed_over_scored_turns(rows):
    trial = open_trial(f"{__name__}.Unscored", rows=rows)
    logs = []

    def player(log):
        logs.append([message["role"] for message in log])
        return "abc"

    assert len(list(play(trial.make(), "x", trial.rows[0], player, max_turns=5))) == 2
    assert logs == [["user"], ["user", "assistant", "environment"]]
    assert repeated_answers(trial.make(), trial, trial.rows[:2], ["abc", "bad"]) == [6.0, None]


def test_a_random_player_answers_with_a_piece_of_the_conversation_by_its_seed():
    log = [{"role": "user", "content": "up 12 down"}, {"role": "assistant", "content": "never"}]
    said = [random_player(seed)(log) for seed in range(20)]
    assert set(said) == {"up", "12", "down"}
    assert said == [random_player(seed)(log) for seed in range(20)]
    assert random_player(0)([]) == ""


class Counts(Lengths):
    """Keeps the number of steps of each session, and opens with a message."""

    def __init__(self, config):
        self.steps = {}

    def reset(self, metadata):
        self.steps[metadata["session_id"]] = 0
        return {"role": "environment", "content": "start"}

    def close(self, session):
        self.steps.pop(session, None)

    def step(self, message_log_batch, metadata):
        assert all(log[1]["content"] == "start" for log in message_log_batch)
        for info in metadata:
            self.steps[info["session_id"]] += 1
        counts = torch.tensor([float(self.steps[info["session_id"]]) for info in metadata])
        made = super().step(message_log_batch, metadata)
        return made._replace(rewards=counts, terminateds=counts >= 2)


def test_sessions_are_opened_and_closed(rows):
    found = checked(f"{__name__}.Counts", rows, "max_rollout_turns=3")
    assert [name for name, (status, _) in found.items() if status is DiagnosisStatus.FAILED] == []
    trial = open_trial(f"{__name__}.Counts", ["max_rollout_turns=3"], rows=rows)
    environment, opened = trial.make(), []
    turns = list(play(environment, "x", trial.rows[0], random_player(0), max_turns=trial.max_turns, on_open=opened.extend))
    assert [turn.rewards["reward"] for turn in turns] == [1.0, 2.0]
    assert opened == [{"role": "environment", "content": "start"}]
    assert environment.steps == {}


class Continues(Counts):
    def reset(self, metadata):
        opened = self.steps.get(metadata["session_id"])
        super().reset(metadata)
        return {"role": "environment", "content": "start" if opened is None else "once more"}

    def close(self, session):
        pass

    def step(self, message_log_batch, metadata):
        return super().step([[log[0], {"content": "start"}, *log[2:]] for log in message_log_batch], metadata)


class ClosesOnlyOpened(Counts):
    def close(self, session):
        del self.steps[session]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Continues", "the first session began with .*'start'.*the second with .*'once more'"),
        ("ClosesOnlyOpened", "KeyError: 'never-opened'"),
    ],
)
def test_sessions_that_are_not_ended_or_not_opened_are_found(name, says, rows):
    status, found = checked(f"{__name__}.{name}", rows, "max_rollout_turns=3")["sessions"]
    assert status is DiagnosisStatus.FAILED
    assert re.search(says, found)


REWARDS = """
def named(completion, expected_answer):
    return {"right": float(completion == expected_answer), "long": None if len(completion) < 5 else -1.0}

def short(completion):
    return -float(len(completion))

def any_number(completion, expected_answer):
    return float(completion.strip().isdigit())

def near(completion, expected_answer):
    return float(completion.split(" or ")[0].strip("-") == expected_answer)
"""


@pytest.fixture
def functions(rows, monkeypatch):
    (rows.parent / "reward_functions_to_check.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(rows.parent))
    return "reward_functions_to_check"


def test_a_reward_that_a_function_leaves_out_counts_as_0_and_is_not_a_mistake(rows, functions):
    found = checked(f"{functions}.named", rows)
    assert [name for name, (status, _) in found.items() if status is DiagnosisStatus.FAILED] == []
    assert "their mean reward is 1" in found["correct answers"][1]
    assert "mean reward is 0.25" in checked(f"{functions}.named", rows, "reward_weights.right=0.25")["correct answers"][1]


def test_an_environment_that_does_not_read_the_expected_answer_need_not_reward_it(rows, functions):
    for name in (f"{functions}.short", f"{__name__}.Lengths"):
        found = checked(name, rows)
        assert DiagnosisStatus.FAILED not in {status for status, _ in found.values()}
        status, detail = found["correct answers"]
        assert status is DiagnosisStatus.NOTE
        assert "does not read the metadata" in detail


class NeverRight(Lengths):
    def step(self, message_log_batch, metadata):
        made = super().step(message_log_batch, metadata)
        right = [
            log[-1]["content"] == int(row["expected_answer"]) for log, row in zip(message_log_batch, metadata, strict=True)
        ]
        return made._replace(rewards=torch.tensor(right, dtype=torch.float32))


def test_an_environment_that_reads_the_expected_answer_and_never_rewards_it_fails(rows):
    status, detail = checked(f"{__name__}.NeverRight", rows)["correct answers"]
    assert (status, "no form of the expected answer" in detail) == (DiagnosisStatus.FAILED, True)


@pytest.mark.slow
def test_a_constant_answer_that_is_rewarded_on_most_problems_fails_and_near_misses_are_noted(rows, functions):
    found = checked(f"{functions}.any_number", rows)
    assert found["constant answers"][0] is DiagnosisStatus.FAILED
    assert "the answer '0' is rewarded like the expected one on 3 of 3 problems" in found["constant answers"][1]
    assert found["near misses"][0] is DiagnosisStatus.NOTE
    assert "'ANSWER plus 1' 3 of 3" in found["near misses"][1]
    found = checked(f"{functions}.near", rows)
    assert found["constant answers"][0] is not DiagnosisStatus.FAILED
    assert "'ANSWER or OTHER' 3 of 3, 'OTHER, ANSWER' 0 of 3, 'not ANSWER' 0 of 3, '-ANSWER' 3 of 3" in found["near misses"][1]
    found = checked("math", rows)
    assert (found["constant answers"][0], found["near misses"][0]) == (DiagnosisStatus.OK, DiagnosisStatus.OK)


def a_digit_in_common(completion, expected_answer):
    return 1.0 if completion == expected_answer else 0.2 * any(digit in completion for digit in expected_answer)


def test_a_reward_for_what_answers_have_in_common_by_chance_is_noted_with_an_example(tmp_path):
    sums = [{"question": f"{a}+{a}=", "expected_answer": str(2 * a)} for a in (11, 12, 19)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    status, detail = checked(f"{__name__}.a_digit_in_common", tmp_path / "rows.jsonl")["answers of other rows"]
    assert status is DiagnosisStatus.NOTE
    assert detail.startswith("their mean reward is 0.0667, the highest is 0.2, of '22' instead of '24'. ")
    status, detail = checked("math", tmp_path / "rows.jsonl")["answers of other rows"]
    assert (status, detail) == (DiagnosisStatus.OK, "their mean reward is 0, the highest is 0")


def test_junk_that_follows_an_instruction_is_shown(rows):
    instruction = {"num_words": 50, "relation": "at least"}
    row = {"prompt": "Why?", "instruction_id_list": ["length_constraints:number_words"], "kwargs": [instruction]}
    rows.write_text(json.dumps(row) + "\n")
    status, detail = checked("instruction_following", rows)["constant answers"]
    assert status is DiagnosisStatus.NOTE
    assert "'a a a a a a a a a a a a a a a ...' has the highest mean reward, 1." in detail


class Lake(EnvironmentInterface):
    """A walk of four steps to the right; the turn is in the metadata, and no number of turns is declared."""

    def step(self, message_log_batch, metadata):
        at = [info.get("at", 0) + 1 for info in metadata]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"You are at {each}."} for each in at],
            metadata=[{**info, "at": each} for info, each in zip(metadata, at, strict=True)],
            next_stop_strings=[None] * len(at),
            rewards=torch.tensor([float(each == 4) for each in at]),
            terminateds=torch.tensor([each == 4 for each in at]),
        )


class BreaksLater(Lake):
    def step(self, message_log_batch, metadata):
        step_return = super().step(message_log_batch, metadata)
        message = {"role": "environment", "content": "."}
        return step_return._replace(observations=[None if info["at"] == 3 else message for info in step_return.metadata])


def test_a_class_named_by_its_path_is_played_and_checked_until_it_ends(rows):
    trial = open_trial(f"{__name__}.Lake", rows=rows)
    turns = list(play(trial.make(), "x", trial.rows[0], scripted_player(["right"] * 9), max_turns=trial.max_turns))
    assert [turn.ended for turn in turns] == [False, False, False, True]
    found = checked(f"{__name__}.Lake", rows)
    assert "3 of 3 rollouts ended, after at most 4 turns" in found["turns"][1]
    assert "a run needs `max_rollout_turns`" in found["turns"][1]
    assert "highest mean reward, 1." in found["constant answers"][1]
    status, detail = checked(f"{__name__}.BreaksLater", rows)["turns"]
    assert (status, "observation of row 0" in detail) == (DiagnosisStatus.FAILED, True)


@pytest.fixture
def run_folder(tmp_path):
    """A run folder with four stored rollouts of two prompts."""
    data = {"dataset_name": "arithmetic", "num_samples": 16, "min_digits": 2}
    config = {
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2},
        "policy": {
            "backend": "hf",
            "model_name": str(MODEL),
            "max_total_sequence_length": 16,
            "generation": {"backend": "hf", "max_new_tokens": 5},
        },
        "data": {"train": data},
        "env": {"sums": {"name": "arithmetic", "format_reward": 0.0}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    records = []
    for index in (3, 7):
        record = ArithmeticDataset({key: value for key, value in data.items() if key != "dataset_name"})[index]
        for sample, text in enumerate((str(record["extra_env_info"]["expected_answer"]), "-1")):
            messages = [*record["messages"], {"role": "assistant", "content": text}]
            records.append(
                {
                    "task": "sums",
                    "index": index,
                    "sample": sample,
                    "completion": text,
                    "messages": messages,
                    "turns": 1,
                    "reward": 1.0 - sample,
                    "reward_parts": {"reward": 1.0 - sample},
                    "scored": True,
                }
            )
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_stored_rollouts_have_the_same_rewards_again_and_others_after_a_change(run_folder):
    rows = list(rescore(run_folder))
    assert [(row.step, row.index, row.sample, row.differs) for row in rows] == [
        (1, 3, 0, False),
        (1, 3, 1, False),
        (1, 7, 0, False),
        (1, 7, 1, False),
    ]
    changed = list(rescore(run_folder, ["env.sums.format_reward=0.5"], steps=[1]))
    assert [row.differs for row in changed] == [True] * 4
    assert [row.after["reward"] for row in changed] == [1.5, 0.5, 1.5, 0.5]


def test_other_data_and_missing_steps_are_refused(run_folder):
    with pytest.raises(DataError, match="Row 3 of arithmetic is not the prompt of a rollout of step 1"):
        list(rescore(run_folder, ["data.train.seed=1"]))
    with pytest.raises(ConfigError, match="has no rollouts of step 2"):
        list(rescore(run_folder, steps=[2]))
    config = yaml.safe_load((run_folder / "config.yaml").read_text())
    config["env"] = {"other": config["env"]["sums"]}
    (run_folder / "other.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match="have the task 'sums', but `env` only has other"):
        list(rescore(run_folder, config=run_folder / "other.yaml"))
