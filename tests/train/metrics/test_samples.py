"""`--show-samples`: which prompt and samples are shown, and how."""

from rl_train.metrics.console import MAX_CHARACTERS, SamplePrinter, samples_text


def record(group, reward, completion="text", **more):
    return {
        "group": group,
        "task": "mine",
        "prompt": f"prompt {group}",
        "messages": [{"role": "user", "content": f"prompt {group}"}, {"role": "assistant", "content": completion}],
        "turn_texts": None,
        "segments": None,
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


def test_each_turn_is_shown_on_its_own_line_with_the_messages_between():
    messages = [
        {"role": "user", "content": "an example"},
        {"role": "assistant", "content": "its answer"},
        {"role": "user", "content": "prompt 0"},
        {"role": "assistant", "content": "", "tool_calls": [{}]},
        {"role": "tool", "content": "72"},
        {"role": "assistant", "content": "It is 72."},
    ]
    turns = {"turn_texts": ["<call>8*9</call>", "It is 72."], "messages": messages}
    rows = [record(0, 1.0, "<call>8*9</call>It is 72.", **turns), record(0, 0.0, "71")]
    lines = samples_text(rows, 1).splitlines()
    assert lines[1:4] == ["[user] an example", "[assistant] its answer", "[user] prompt 0"]
    assert lines[5:8] == ["[turn 1] <call>8*9</call>", "[tool] 72", "[turn 2] It is 72."]
    assert lines[9:] == ["71", "---"]


def test_the_messages_of_a_prompt_are_shown_with_their_roles_if_there_are_several():
    messages = [
        {"role": "system", "content": "You do sums."},
        {"role": "user", "content": "2+5="},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "Right."},
    ]
    rows = [record(0, 1.0, "3", messages=messages), record(0, 0.0, "4", messages=messages)]
    assert samples_text(rows, 1).splitlines()[1:5] == ["[system] You do sums.", "[user] 2+5=", "[assistant] 7", "[user] 1+2="]
    alone = record(0, 1.0, "3", messages=messages[3:])
    assert samples_text([alone], 1).splitlines()[1] == "prompt 0"


def test_turns_of_separate_conversations_are_shown_without_messages_between():
    messages = [{"role": "user", "content": "2+1="}, {"role": "assistant", "content": "3"}]
    row = record(0, 1.0, "33", turn_texts=["3", "3"], messages=messages, segments=[{}, {}])
    assert samples_text([row], 1).splitlines()[3:5] == ["[turn 1] 3", "[turn 2] 3"]


def test_the_only_sample_of_a_prompt_is_not_called_the_best():
    text = samples_text([record(0, 1.0, "a"), record(1, 0.0, "b")], 2)
    assert text.splitlines() == [
        "--- step 2: a prompt of task mine, 1 sample, reward 1.000 (right 1.000, short 0.000)",
        "prompt 0",
        "--- completion",
        "a",
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
