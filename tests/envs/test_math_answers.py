"""Extraction and comparison of final answers: the environment on a labeled corpus and on single cases."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from rl_core.errors import ConfigError, DataError
from rl_envs.math.answers import last_box, unboxed_answer
from rl_envs.math.environment import MathEnvironment

from .conftest import answered

CORPUS = Path(__file__).parent / "math_corpus"


def rows_of(name):
    return [json.loads(line) for line in (CORPUS / name).read_text(encoding="utf-8").splitlines()]


def confusion(rows, graded, *, label="label"):
    """Counts of (labeled correct, graded correct), and the completions graded differently from their label."""
    pairs = [(row[label] == "right", reward == 1.0) for row, reward in zip(rows, graded.rewards.tolist(), strict=True)]
    others = [
        (row["expected"], row["completion"])
        for row, (is_right, is_paid) in zip(rows, pairs, strict=True)
        if is_right != is_paid
    ]
    return Counter(pairs), others


WRITTEN_FALSE_NEGATIVES = [
    (r"1 \text{ m}", r"\boxed{100 \text{ cm}}"),  # units are compared, not converted
]


def test_the_default_rule_rewards_no_wrong_answer_of_the_written_corpus(grader):
    rows = rows_of("written.jsonl")
    matrix, others = confusion(rows, grader.grade(*[(row["expected"], row["completion"]) for row in rows]))
    assert others == WRITTEN_FALSE_NEGATIVES
    assert matrix == {(True, True): 131, (True, False): 1, (False, False): 85}


def test_the_default_rule_agrees_with_every_label_of_the_sampled_corpus(grader):
    rows = rows_of("model_outputs.jsonl")
    matrix, others = confusion(rows, grader.grade(*[(row["expected"], row["completion"]) for row in rows]))
    assert others == []
    assert matrix == {(True, True): 16, (False, False): 154}


UNPAID_OF_ANSWER_TYPES = {
    "open": [
        (r"\frac{3}{4}", r"\boxed{3 \text{ quarters}}"),  # fractions in words are not read
        ("BCA", r"\boxed{B, C, A}"),  # a list is not a word
        (r"\frac{1}{2}", r"\boxed{\text{one half}}"),
    ],
    "frozen": [],
}


@pytest.mark.parametrize(
    ("split", "matrix"),
    [
        ("open", {(True, True): 63, (True, False): 3, (False, False): 180}),
        ("frozen", {(True, True): 73, (False, False): 191}),
    ],
)
def test_the_default_rule_rewards_no_wrong_answer_of_24_answer_types(grader, split, matrix):
    rows = [row for row in rows_of("answer_types.jsonl") if row["split"] == split]
    graded = grader.environment.step(
        [answered(row["completion"], row["question"]) for row in rows], [{"expected_answer": row["expected"]} for row in rows]
    )
    found, others = confusion(rows, graded)
    assert others == UNPAID_OF_ANSWER_TYPES[split]
    assert found == matrix


@pytest.mark.parametrize(
    ("file", "disagreements", "matrix"),
    [
        ("independent.jsonl", [], {(True, True): 58, (False, False): 136}),
        (
            "second_independent.jsonl",
            [(r"\text{composite}", r"\boxed{\text{composite number}}")],  # words are compared as a whole
            {(True, True): 73, (True, False): 1, (False, False): 114},
        ),
        (
            "third_independent.jsonl",
            [
                (  # a multiple of a name may be a given of the question
                    r"\begin{pmatrix} 3 & 6 \\ 0 & 3 \end{pmatrix}",
                    r"\boxed{3A = \begin{pmatrix} 3 & 6 \\ 0 & 3 \end{pmatrix}}",
                ),
            ],
            {(True, True): 143, (True, False): 1, (False, False): 361},
        ),
        (
            "fourth_independent.jsonl",
            [
                (r"15 \text{ m}", r"\boxed{1500 \text{ cm}}"),  # units are compared, not converted
                (r"27 \text{ cm}^3", r"\boxed{27 \text{ mL}}"),
                (  # a fraction that is a whole number is a calculation
                    r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}",
                    r"\boxed{\begin{pmatrix} 1 & \frac{6}{2} \\ 2 & 4 \end{pmatrix}}",
                ),
                (r"\$50", r"\boxed{5000 \text{ cents}}"),
                (r"3\frac{2}{5}", r"\boxed{3 + \frac{2}{5}}"),  # so is a sum of two rational numbers
                (r"6\sqrt{2}", r"\boxed{\sqrt{72}}"),  # the question asks to simplify
                (r"180^\circ", r"\boxed{\pi}"),
            ],
            {(True, True): 150, (True, False): 7, (False, False): 354},
        ),
        (
            "fifth_independent.jsonl",
            [(r"y = Ce^{2x}", r"\boxed{y = Ae^{2x}}")],  # constants of integration are C or K
            {(True, True): 96, (True, False): 1, (False, False): 199},
        ),
        (
            "sixth_independent.jsonl",
            [
                ("32.80", r"$\boxed{32.80 \text{ dollars per person}}$"),
                (r"36\pi \text{ cm}^3", r"$\boxed{36\pi \text{ cm}^3 \approx 113.10 \text{ cm}^3}$"),
                ("11:20", r"$\boxed{11:20 \text{ PM}}$"),  # rewarded: the question decides between am and pm
                ("113_6", r"$\boxed{45_{10} = 113_6}$"),
                ("36", r"Possible answers: $\boxed{216}$, $\boxed{72}$, $\boxed{36}$."),  # rewarded: the last box counts
            ],
            {(True, True): 142, (True, False): 3, (False, True): 2, (False, False): 332},
        ),
        ("seventh_open.jsonl", [], {(True, True): 121, (False, False): 173}),
        (  # graded once, after the grader was finished with the other half
            "seventh_frozen.jsonl",
            [
                (
                    r"4.2\times 10^{-4}",
                    "**Solution.** Move the point four places.\n\n**Final answer:** $\\boxed{4.2 \\times {10}^{-4}}$",
                ),
                (
                    "1",
                    "**Solution.** $7\\equiv 2\\pmod 5$ and $2^4\\equiv 1$, so $7^{100}\\equiv (2^4)^{25}\\equiv 1$.\n\n"
                    "**Final answer:** $\\boxed{\\text{remainder } 1}$",
                ),
            ],
            {(True, True): 121, (True, False): 2, (False, False): 172},
        ),
        ("asked_forms.jsonl", [], {(True, True): 48, (False, False): 61}),
        ("forms.jsonl", [], {(True, True): 83, (False, False): 193}),
    ],
)
def test_the_default_rule_disagrees_with_few_labels_of_the_other_corpora(grader, file, disagreements, matrix):
    rows = rows_of(file)
    graded = grader.environment.step(
        [answered(row["completion"], row["question"]) for row in rows], [{"expected_answer": row["expected"]} for row in rows]
    )
    found, others = confusion(rows, graded)
    assert others == disagreements
    assert found == matrix


GRADED_OTHERWISE_WITHOUT_BOX = {  # the ends of the completions
    "which is the sum of 3 and 9.",  # the last number is an operand again
    "If Ana has 3 + ",  # a second sum was cut off
    "there are 18 eggs in a pack.",  # an empty box comes before the number
    "So, the result is \\boxed{}\\boxed{}",
    "So, the final answer to this problem is ",  # cut off before the answer
    "10, 20, 24, 30, etc. 20 is",  # the false positive: cut off at a number that happens to be the answer
}


def test_without_require_box_the_sampled_corpus_has_one_false_positive():
    rows = rows_of("model_outputs.jsonl")
    environment = MathEnvironment({"require_box": False})
    graded = environment.step(
        [[{"role": "assistant", "content": row["completion"]}] for row in rows],
        [{"expected_answer": row["expected"]} for row in rows],
    )
    environment.shutdown()
    matrix, others = confusion(rows, graded, label="label_without_box")
    assert matrix == {(True, True): 31, (True, False): 5, (False, True): 1, (False, False): 133}
    ends = {end for end in GRADED_OTHERWISE_WITHOUT_BOX for _, completion in others if completion.endswith(end)}
    assert ends == GRADED_OTHERWISE_WITHOUT_BOX
    assert len(others) == len(ends)


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
    started = time.thread_time()
    assert last_box(hostile) == "1"
    assert time.thread_time() - started < 5.0  # 0.3 s; a quadratic search takes minutes


def test_answers_and_outcomes_are_returned(grader):
    graded = grader.grade(("4", r"\boxed{4}"), ("4", r"\boxed{5}"), ("4", "hm"), ("4", r"\boxed{}"))
    assert graded.answers == ["4", "5", None, None]
    assert [row["grading"] for row in graded.metadata] == ["right", "wrong", "no_answer", "no_answer"]
    assert [row["expected_answer"] for row in graded.metadata] == ["4"] * 4
    assert graded.terminateds.tolist() == [1.0] * 4
    assert str(graded.rewards.dtype) == "torch.float32"


def test_only_the_last_message_is_graded(grader):
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


def test_a_row_without_an_expected_answer_is_an_error(grader):
    with pytest.raises(DataError, match=r"Row 1 has no expected answer: its metadata has \['solution'\]"):
        grader.environment.step([[{"role": "assistant", "content": "1"}]] * 2, [{"expected_answer": "1"}, {"solution": "1"}])


def test_an_unknown_config_key_is_an_error():
    with pytest.raises(ConfigError, match="timeout"):
        MathEnvironment({"timeout": 3})


def paid(expected, completion, **config):
    environment = MathEnvironment(config)
    graded = environment.step([[{"role": "assistant", "content": completion}]], [{"expected_answer": expected}])
    environment.shutdown()
    return graded.rewards.tolist() == [1.0]


def test_only_boxed_answers_are_graded_by_default(grader):
    graded = grader.grade(("4", "4"), ("4", r"\boxed{4}"), ("4", "The answer is 4."))
    assert graded.rewards.tolist() == [0.0, 1.0, 0.0]
    assert graded.answers == [None, "4", None]
    assert [row["boxed"] for row in graded.metadata] == [False, True, False]


@pytest.mark.parametrize(
    ("completion", "grading"),
    [
        (r"<think>\boxed{4}</think> I do not know.", "no_answer"),
        (r"\boxed{4}</think> I do not know.", "no_answer"),
        (r"<think>\boxed{4}", "no_answer"),
        (r"<think>so \boxed{5}</think>\boxed{4}", "right"),
        (r"\boxed{5}</think>\boxed{4}", "right"),
        (r"<think>a</think>\boxed{5}<think>b</think>\boxed{4}", "right"),
        (r"<think>a</think>\boxed{4}<think>b</think>It is 5.", "no_answer"),
        (r"<think>a</think>\boxed{4}<think>no", "no_answer"),
    ],
)
def test_only_what_follows_the_last_thinking_is_the_answer(grader, completion, grading):
    assert grader.grade(("4", completion)).metadata[0]["grading"] == grading


def test_an_unreduced_fraction_is_unevaluated_if_the_question_asks_for_lowest_terms(grader):
    questions = ["What is the chance of heads?", "Write 2/4 in simplest form.", "What is 2/4?"]
    result = grader.environment.step(
        [[{"role": "user", "content": question}, {"role": "assistant", "content": r"\boxed{2/4}"}] for question in questions],
        [{"expected_answer": "1/2"}] * 3,
    )
    assert [info["grading"] for info in result.metadata] == ["right", "unevaluated", "unevaluated"]


@pytest.mark.parametrize(
    ("expected", "answer", "grading"),
    [
        ("5", "3+2", "unevaluated"),
        ("5", "10/2", "unevaluated"),
        (r"\frac{1}{2}", r"\frac{2}{4}", "right"),
        ("2", "3*x**2 + 2", "wrong"),
        ("x**2 + 3*x - 1", "x**2 + 4*x - 1", "wrong"),
        ("x**2 + 3*x - 1", "x**2 + 3*x - 1", "right"),
        ("lcm(12, 18)", "gcd(12, 18)", "unevaluated"),
        ("2516_7", "2516_8", "wrong"),
        ("6", "about 6", "unreadable"),
    ],
)
def test_a_boxed_answer_is_compared_as_a_whole(grader, expected, answer, grading):
    graded = grader.grade((expected, rf"\boxed{{{answer}}}"))
    assert (graded.metadata[0]["grading"], graded.answers) == (grading, [answer])


@pytest.mark.slow
def test_unevaluated_answers_are_accepted_on_request():
    assert paid("5", r"\boxed{3+2}", allow_unevaluated=True)
    assert paid("1/2", r"\boxed{\frac{2}{4}}", allow_unevaluated=True)
    assert not paid("5", r"\boxed{3+3}", allow_unevaluated=True)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("Ana has 3 + 2 appliances.", "3 + 2"),
        ("2. Rewrite the equation", None),
        ("46.", "46"),
        ("The sum is\n46.\n", "46"),
        ("1.\nAdd both.\n2.\nWrite the sum", None),
        ("1. Add.\n2) Rewrite the", None),
        ("Step 2: compute", None),
        ("so 3 + 9 = 12", "3 + 9 = 12"),
        (r"Hence $x = \frac14$.", r"x = \frac14"),
        ("The answer is 13. To calculate 6 + 3, we add.", "13"),
        ("5 apples and 7 pears", "7"),
        ("They pay 1,234.50 dollars.", "1,234.50"),
        ("48 / 2 = 24\n#### 24", "24"),
        ("I do not know", None),
        ("The answer is 5 or 6.", "5 or 6"),
        ("The answer is 5, 6", "5, 6"),
        ("The answer is 5, or 6.", "5, or 6"),
        ("The answer is 5 or maybe 6.", "5 or maybe 6"),
        ("The answer is 5 and 6.", "5 and 6"),
        ("The answer is 5 apples or 6 apples.", "5 apples or 6"),
        ("It is 5, or 6", "5, or 6"),
        ("The answer is 5, because 2 + 3 = 5.", "5"),
        ("The answer is 5 apples and 6 pears are left.", "5"),
        ("The answer is not 5.", None),
        ("It isn't 5", None),
        (r"x \neq 5", None),
        ("The answer is not 4 but 5.", "5"),
        ("The answer is clearly not 4 but 5.", "5"),
        ("6 multiplied by 20 = 120uggs. So, the answer is 120glbs", "120glbs"),
        ("6 times 20. The answer is 120lbs.", "120lbs"),
        ("The answer is 120glbs, because 6 * 20 = 120.", "120glbs, because 6 * 20 = 120"),
        (r"2 squared is 4. The answer is \sqrt{2}.", r"\sqrt{2}"),
        ("We have 20. The answer is as follows:\n5 + 15 = 20", "5 + 15 = 20"),
        ("6 multiplied by 20 = 120uggs.", None),
        ("120 is the 2nd result", "120"),
    ],
)
def test_without_a_box_the_last_statement_is_the_answer(completion, answer):
    assert unboxed_answer(completion, words=False) == answer


def test_without_require_box_unboxed_answers_follow_the_same_rule():
    environment = MathEnvironment({"require_box": False})
    cases = [
        ("5", "Ana has 3 + 2 appliances."),
        ("2", "2. Rewrite the equation"),
        ("12", "so 3 + 9 = 12"),
        ("12", "so 4 + 9 = 12"),
    ]
    cases += [("5", "The answer is 5 or 6."), ("6", "The answer is 5, 6"), ("5", "The answer is not 5.")]
    cases += [(expected, "6 times 20 is 120uggs, so the answer is 120glbs") for expected in ("20", "120")]
    cases += [
        ("120", "6 times 20. The answer is 120lbs."),
        ("Rome", "The answer is Rome."),
        ("Rome", "Rome"),
        ("4", r"The answer is 4, or \boxed{5}"),
    ]
    graded = environment.step(
        [[{"role": "assistant", "content": completion}] for _, completion in cases],
        [{"expected_answer": expected} for expected, _ in cases],
    )
    environment.shutdown()
    gradings = [row["grading"] for row in graded.metadata]
    assert gradings[:4] == ["unevaluated", "no_answer", "right", "wrong"]
    assert gradings[4:7] == ["wrong", "wrong", "no_answer"]
    assert gradings[7:10] == ["unreadable", "unreadable", "right"]
    assert gradings[10:] == ["right", "no_answer", "wrong"]


@pytest.mark.parametrize(
    ("prompt", "num_warnings"), [("What is 2 + 2?", 1), (r"What is 2 + 2? Put the final answer in \boxed{}.", 0)]
)
def test_prompts_that_never_ask_for_a_box_are_reported_once(caplog, prompt, num_warnings):
    environment = MathEnvironment()
    for _ in range(3):
        rows = [[{"role": "user", "content": prompt}, {"role": "assistant", "content": "4"}]] * 16
        environment.step(rows, [{"expected_answer": "4"}] * 16)
    environment.shutdown()
    warnings = [record.getMessage() for record in caplog.records if "none of 16 answers" in record.getMessage()]
    assert len(warnings) == num_warnings
    assert all("require_box: false" in warning for warning in warnings)


def test_an_empty_batch_starts_no_process():
    environment = MathEnvironment()
    assert environment.step([], []).rewards.tolist() == []
    assert environment.process_ids() == []


@pytest.mark.slow
def test_metrics_are_the_fractions_of_each_outcome():
    from rl_core.data.batched_data_dict import BatchedDataDict

    environment = MathEnvironment({"timeout_s": 1.5, "allow_unevaluated": True})
    strict = MathEnvironment()
    completions = [r"\boxed{4}", r"\boxed{5}", "hm", r"\boxed{10000000!}", r"\boxed{}", r"\boxed{about 4}"]
    conversations = [[{"role": "assistant", "content": completion}] for completion in completions]
    found = []
    for one in (environment, strict):
        graded = one.step(conversations, [{"expected_answer": "4"}] * 6)
        batch = BatchedDataDict({"rewards": graded.rewards, "extra_env_info": graded.metadata})
        _, metrics = one.global_post_process_and_metrics(batch)
        found.append({name: round(value * 6) if name.endswith("frac") else value for name, value in metrics.items()})
        one.shutdown()
    counts = {"boxed_frac": 4, "answered_frac": 4, "wrong_frac": 1, "unreadable_frac": 1, "failures": 0}
    assert found[1] == {**counts, "boxed_frac": 5, "accuracy": pytest.approx(1 / 6), "unevaluated_frac": 1, "timeouts": 0}
    assert found[0] == {**counts, "accuracy": pytest.approx(1 / 6), "unevaluated_frac": 0, "timeouts": 1}
