"""Recorded metrics: values with their reduction, phases, and files that survive a kill."""

import json
import math

import pytest

from rl_train.metrics.jsonl import JsonlLogger, read_jsonl
from rl_train.metrics.logger import Timeline
from rl_train.metrics.measured import Recorder


def test_a_name_recorded_twice_is_the_mean_and_phases_add_up():
    recorder = Recorder()
    recorder.add({"a": 1.0})
    recorder.add({"a": 3.0})
    for _ in range(2):
        with recorder.timed("train"):
            pass
    flushed = recorder.flush()
    assert flushed["a"] == 2.0
    assert set(flushed) == {"a", "time/train_s"}
    assert recorder.flush() == {}


def test_the_current_phase_is_recorded_and_kept_after_an_error():
    recorder = Recorder()
    assert recorder.phase is None
    with recorder.timed("rollout"):
        assert recorder.phase == "rollout"
    assert recorder.phase is None
    with pytest.raises(KeyError), recorder.timed("validate"), recorder.timed("generate"):
        raise KeyError
    assert recorder.phase == "generate"


def test_the_phases_of_a_step_are_recorded_with_start_and_end_until_it_is_logged():
    recorder = Recorder()
    for phase in ("rollout", "train"):
        with recorder.timed(phase):
            pass
    (first, began, waited), (second, started, ended) = recorder.spans
    assert (first, second) == ("rollout", "train")
    assert began <= waited <= started <= ended
    recorder.flush()
    assert recorder.spans == []


def test_a_resume_drops_the_metrics_of_steps_that_it_repeats(tmp_path):
    logger = JsonlLogger(tmp_path)
    for step in range(1, 6):
        logger.log_timeline(Timeline(seconds=2.0, phases=[("train", 0.5, 1.0004)], waiting={"engine": [0.123, 4.0]}), step)
        logger.log_metrics({"reward/mean": step / 10}, step)
        logger.log_rollouts([{"reward": step}], step)
    JsonlLogger(tmp_path, resume_from=3).log_metrics({"reward/mean": 9.0}, 4)
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [row["step"] for row in read_jsonl(tmp_path / "timeline.jsonl")] == [1, 2, 3]
    assert read_jsonl(tmp_path / "timeline.jsonl")[0] == {
        "step": 1,
        "seconds": 2.0,
        "phases": [["train", 0.5, 1.0]],
        "waiting": {"engine": [0.12, 4.0]},
    }
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [f"step_00000{n}.jsonl" for n in (1, 2, 3)]


def test_a_truncated_last_line_is_ignored(tmp_path):
    logger = JsonlLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "a"')
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1]
    JsonlLogger(tmp_path, resume_from=1).log_metrics({"a": 2.0}, 2)
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("resume_from", [1, None])
def test_a_line_that_a_full_disk_cut_within_a_character_does_not_corrupt_the_next_one(tmp_path, resume_from):
    texts = tmp_path / "rollouts" / "token_texts.jsonl"

    def logged(tokens, step):
        logger = JsonlLogger(tmp_path, resume_from=resume_from, token_text=lambda token: f"{token}\N{EURO SIGN}")
        logger.log_metrics({"a": 1.0}, step)
        logger.log_rollouts([{"tokens": tokens}], step)

    logged([7, 8], 1)
    texts.write_bytes(texts.read_bytes()[:-4])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write('{"step": 2, "\N{EURO SIGN}'.encode()[:-1])
    logged([7, 8, 9], 2)
    logged([8], 3)
    assert {row["id"]: row["text"] for row in read_jsonl(texts)} == {n: f"{n}\N{EURO SIGN}" for n in (7, 8, 9)}
    assert read_jsonl(tmp_path / "metrics.jsonl")[0] == {"step": 1, "a": 1.0}


def test_an_unpaired_surrogate_in_the_text_of_an_error_is_logged_and_read_back(tmp_path):
    rows = [{"failure": "ValueError: \ud83d is not a word", "completion": "\N{EURO SIGN}"}]
    JsonlLogger(tmp_path).log_rollouts(rows, 1)
    assert read_jsonl(tmp_path / "rollouts" / "step_000001.jsonl") == rows


def test_nan_and_infinity_become_null(tmp_path):
    JsonlLogger(tmp_path).log_metrics({"a": math.nan, "b": math.inf, "c": 1.0}, 1)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a": None, "b": None, "c": 1.0}
