"""`--show-samples`: which prompt and samples are shown, and how."""

from rl_train.metrics.samples import MAX_CHARACTERS, SamplePrinter, samples_text


def record(group, reward, completion="text", **more):
    return {
        "group": group,
        "task": "mine",
        "prompt": f"prompt {group}",
        "completion": completion,
        "expected_answer": None,
        "reward": reward,
        "reward_parts": {"right": reward, "short": 0.0},
        "scored": True,
        "truncated": False,
        **more,
    }


def test_the_first_prompt_with_different_rewards_is_shown_with_its_best_and_worst_sample():
    rows = [record(0, 1.0), record(0, 1.0), record(1, 0.0, "bad"), record(1, 1.0, "good"), record(1, 0.5, "fair")]
    text = samples_text(rows, 20)
    assert text.splitlines() == [
        "--- step 20: a prompt of task mine, 3 samples, mean reward 0.500",
        "prompt 1",
        "--- best: reward 1.000 (right 1.000, short 0.000)",
        "good",
        "--- worst: reward 0.000 (right 0.000, short 0.000)",
        "bad",
        "---",
    ]


def test_equal_rewards_and_rows_that_were_not_scored_are_reported():
    assert "all samples have this reward" in samples_text([record(0, 1.0), record(0, 1.0)], 1)
    rows = [record(0, 0.0, "unscored", scored=False), record(0, 1.0, "a"), record(0, 2.0, "b")]
    assert "unscored" not in samples_text(rows, 1)
    assert samples_text([record(0, 0.0, scored=False)], 3) == "step 3: no sample was scored"


def test_control_characters_are_escaped_and_long_texts_cut_in_the_middle():
    text = samples_text([record(0, 1.0, "\x1b[2J\rnew\nline\t" + "x" * 5000 + "end")], 1)
    assert "\\x1b[2J\\rnew\nline\t" in text
    assert "characters ...]" in text
    assert "end" in text
    assert len(text) < MAX_CHARACTERS + 300


def test_the_first_step_and_every_nth_are_shown_but_not_the_validation_before():
    shown = []
    show = SamplePrinter(3, lambda text: shown.append(text.split(":")[0]))
    for step in range(8):
        show([record(0, 1.0)], step)
    show([], 9)
    assert shown == ["--- step 1", "--- step 3", "--- step 6"]
