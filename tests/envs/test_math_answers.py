"""What counts as the final answer, and which answers are equal: real math-verify on typical pairs."""

from __future__ import annotations

import time

import pytest

from rl_core.errors import ConfigError, DataError
from rl_envs.config import MathEnvironmentConfig
from rl_envs.math.answers import last_box
from rl_envs.math.environment import MathEnvironment

RIGHT = [
    ("4", r"\boxed{4}"),
    (r"\boxed{4}", "The answer is 4."),
    ("12", "so 3 + 9 = 12"),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    ("1/2", r"\boxed{\frac{2}{4}}"),
    ("0.25", r"Hence $x = \frac14$."),
    ("1,234", r"\boxed{1234}"),
    ("1234", r"\boxed{1{,}234}"),
    ("-3", r"\boxed{-3}"),
    ("3.14", r"\boxed{3.14}"),
    (r"50\%", r"\boxed{50\%}"),
    ("10", r"\boxed{10\text{ cm}}"),
    ("5", r"\boxed{x = 5}"),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}"),
    ("$x^2 + 2x + 1$", r"\boxed{(x+1)^2}"),
    (r"\{1, 2\}", r"\boxed{\{2, 1\}}"),
    ("(1, 2)", r"\boxed{(1,2)}"),
    (r"[0, \infty)", r"\boxed{[0,\infty)}"),
    ("1<x<2", r"\boxed{(1,2)}"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}"),
    (r"\frac{\pi}{4}", r"\boxed{\pi/4}"),
    ("2^{10}", r"\boxed{1024}"),
    ("A", r"\boxed{A}"),
    (r"\text{Evelyn}", r"\boxed{Evelyn}"),
    ("Evelyn", r"\boxed{\text{evelyn}}"),
    ("New York", r"\boxed{\text{New  York}}"),
    ("7", r"First \boxed{6}, but I made a mistake: \boxed{7}"),
    ("5", r"\boxed{x = \boxed{5}}"),
    ("8", r"\boxed{8} and the next step was cut off: \boxed{9"),
]

WRONG = [
    ("4", r"\boxed{5}"),
    ("7", r"\boxed{7} or rather \boxed{6}"),
    (r"\frac{1}{2}", r"\boxed{0.51}"),
    ("Rome", r"\boxed{More}"),
    ("(1,2)", r"\boxed{1<x<3}"),
    ("2", r"\boxed{1} \boxed{2} \boxed{1, 2}"),
    ("5", "5 apples and 7 pears"),
    ("(2, 1)", r"\boxed{(1,2)}"),
    ("A", r"\boxed{B}"),
    ("4", "I do not know"),
]


def test_equal_answers_are_right_however_they_are_written(grader):
    graded = grader.grade(*RIGHT)
    assert [pair for pair, reward in zip(RIGHT, graded.rewards, strict=True) if reward != 1.0] == []


def test_other_answers_are_wrong(grader):
    graded = grader.grade(*WRONG)
    assert [pair for pair, reward in zip(WRONG, graded.rewards, strict=True) if reward != 0.0] == []


@pytest.mark.parametrize(
    ("completion", "content"),
    [
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\fbox {4}", "4"),
        (r"} \boxed{5}", "5"),
        (r"\boxed{}", ""),
        ("no box", None),
    ],
)
def test_the_last_closed_box_counts(completion, content):
    assert last_box(completion) == content


def test_finding_the_box_takes_linear_time():
    hostile = "{" * 50_000 + r"\boxed{1}" * 50_000 + r"\boxed{" * 50_000
    started = time.process_time()
    assert last_box(hostile) == "1"
    assert time.process_time() - started < 5.0  # 0.3 s; a quadratic search takes minutes


def test_what_was_read_and_how_it_ended_come_back(grader):
    graded = grader.grade(("4", r"\boxed{4}"), ("4", r"\boxed{5}"), ("4", "hm"), ("4", r"\boxed{}"))
    assert graded.answers == ["4", "5", None, None]
    assert [row["grading"] for row in graded.metadata] == ["right", "wrong", "no_answer", "no_answer"]
    assert [row["expected_answer"] for row in graded.metadata] == ["4"] * 4
    assert graded.terminateds.tolist() == [1.0] * 4
    assert str(graded.rewards.dtype) == "torch.float32"


def test_the_models_last_message_alone_is_read(grader):
    examples = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": r"\boxed{2}"},
        {"role": "user", "content": "one more?"},
        {"role": "assistant", "content": "no idea"},
    ]
    graded = grader.environment.step([examples], [{"expected_answer": "2"}])
    assert graded.rewards.tolist() == [0.0]


def test_ground_truth_and_numbers_are_accepted_as_expected_answers(grader):
    conversation = [{"role": "assistant", "content": r"\boxed{0.5}"}]
    graded = grader.environment.step(
        [conversation] * 3, [{"ground_truth": "1/2"}, {"expected_answer": 0.5}, {"expected_answer": 1}]
    )
    assert graded.rewards.tolist() == [1.0, 1.0, 0.0]


def test_a_row_without_an_expected_answer_is_named(grader):
    with pytest.raises(DataError, match=r"Row 1 has no expected answer: its metadata holds \['solution'\]"):
        grader.environment.step([[{"role": "assistant", "content": "1"}]] * 2, [{"expected_answer": "1"}, {"solution": "1"}])


def test_an_unknown_key_of_the_config_is_named():
    with pytest.raises(ConfigError, match="timeout"):
        MathEnvironment({"timeout": 3})


def test_require_box_reads_nothing_else():
    environment = MathEnvironment(MathEnvironmentConfig(require_box=True))
    graded = environment.step(
        [[{"role": "assistant", "content": text}] for text in ("4", r"\boxed{4}")], [{"expected_answer": "4"}] * 2
    )
    environment.shutdown()
    assert graded.rewards.tolist() == [0.0, 1.0]
    assert graded.answers == [None, "4"]


def test_an_empty_batch_is_answered_without_a_process():
    environment = MathEnvironment()
    assert environment.step([], []).rewards.tolist() == []
    assert environment.process_ids() == []


def test_metrics_count_what_was_right_answered_and_timed_out(grader):
    from rl_core.data.batched_data_dict import BatchedDataDict

    graded = grader.grade(("4", r"\boxed{4}"), ("4", r"\boxed{5}"), ("4", "hm"), ("1", r"\boxed{10000000!}"))
    batch = BatchedDataDict({"rewards": graded.rewards, "extra_env_info": graded.metadata})
    _, metrics = grader.environment.global_post_process_and_metrics(batch)
    assert metrics == {"accuracy": 0.25, "answered_frac": 0.75, "timeouts": 1, "failures": 0}
