"""Generated arithmetic: exact answers, records that depend only on their index, and disjoint splits."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError, DataError
from rl_envs.arithmetic import ArithmeticDataset, ArithmeticEnvironment, add_without_carrying, is_held_out, read_number
from rl_envs.config import ArithmeticDatasetConfig

ALL = {"operations": ["+", "-", "*"], "min_digits": 1, "max_digits": 2}


def score(environment, *completions, expected="46", in_box=False):
    conversations = [[{"role": "user", "content": "12+34="}, {"role": "assistant", "content": text}] for text in completions]
    return environment.step(conversations, [{"expected_answer": expected, "in_box": in_box}] * len(completions))


def test_every_answer_is_what_python_computes():
    dataset = ArithmeticDataset({**ALL, "num_samples": 5000})
    for record in map(dataset.__getitem__, range(len(dataset))):
        question = record["messages"][0]["content"]
        assert question.endswith("=")
        assert record["extra_env_info"]["expected_answer"] == str(eval(question[:-1], {}))


def test_a_record_is_a_function_of_seed_and_index():
    first, second = ArithmeticDataset(ALL), ArithmeticDataset({**ALL, "num_samples": 9})
    backwards = {i: second[i] for i in reversed(range(9))}
    assert [first[i] for i in range(9)] == [backwards[i] for i in range(9)]
    assert [pickle.loads(pickle.dumps(first))[i] for i in range(9)] == [first[i] for i in range(9)]
    assert [ArithmeticDataset({**ALL, "seed": 1})[i] for i in range(9)] != [first[i] for i in range(9)]


def test_these_are_the_first_records_on_every_machine():
    dataset = ArithmeticDataset({"min_digits": 2, "max_digits": 2})
    assert [dataset[i]["messages"][0]["content"] for i in range(4)] == PINNED


PINNED = ["38+72=", "35+89=", "58+27=", "15+35="]


@pytest.mark.parametrize("seed", [0, 7])
def test_no_validation_question_is_ever_in_training(seed):
    asked = {}
    for split in ("train", "validation"):
        dataset = ArithmeticDataset({**ALL, "split": split, "num_samples": 20_000, "seed": seed})
        asked[split] = {frozenset((p.left, p.right)) for p in map(dataset.problem, range(len(dataset)))}
    assert asked["train"] & asked["validation"] == set()
    assert all(asked.values())


def test_splits_are_disjoint_in_either_operand_order_and_one_pair_in_eight_is_held_out():
    pairs = list(itertools.combinations_with_replacement(range(10, 100), 2))
    held_out = [pair for pair in pairs if is_held_out(*pair)]
    assert all(is_held_out(left, right) == is_held_out(right, left) for left, right in pairs)
    assert len(held_out) / len(pairs) == pytest.approx(1 / 8, abs=0.02)  # 4095 pairs: 4 standard deviations


def test_operands_have_the_configured_digits_and_operations_are_equally_frequent():
    dataset = ArithmeticDataset({**ALL, "min_digits": 2, "max_digits": 3, "num_samples": 3000})
    problems = [dataset.problem(i) for i in range(3000)]
    assert {len(str(n)) for p in problems for n in (p.left, p.right)} == {2, 3}
    counts = {operation: sum(p.operation == operation for p in problems) for operation in ALL["operations"]}
    assert min(counts.values()) > 880  # 1000 each; 26 is a standard deviation


def test_the_response_is_scored_as_correct_in_both_styles():
    for style in ("plain", "chat"):
        dataset = ArithmeticDataset({**ALL, "style": style, "with_response": True, "num_samples": 200})
        records = [dataset[i] for i in range(200)]
        scored = ArithmeticEnvironment().step([r["messages"] for r in records], [r["extra_env_info"] for r in records])
        assert scored.rewards.tolist() == [1.0] * 200


def test_a_dropped_carry_gives_the_column_sum_brute_force():
    assert [add_without_carrying(*pair) for pair in ((38, 24), (58, 67), (12, 34), (9, 5), (95, 7))] == [52, 115, 46, 14, 92]
    for left, right in itertools.product(range(10, 100), repeat=2):
        tens, units = left // 10 + right // 10, (left % 10 + right % 10) % 10
        assert add_without_carrying(left, right) == int(f"{tens}{units}")


def test_the_configured_fraction_of_responses_drops_carries_and_expected_answers_stay_exact():
    dataset = ArithmeticDataset({"min_digits": 2, "with_response": True, "forgotten_carries": 0.6, "num_samples": 4000})
    right = [dataset[i]["messages"][1]["content"] == dataset[i]["extra_env_info"]["expected_answer"] for i in range(4000)]
    assert all(dataset[i]["extra_env_info"]["expected_answer"] == str(dataset.problem(i).answer) for i in range(4000))
    assert sum(right) / 4000 == pytest.approx(1 - 0.6 * 0.45, abs=0.03)  # 45 of 100 pairs of units carry; 4 standard deviations


def test_forgotten_carries_without_responses_to_sums_is_an_error():
    for config in ({"forgotten_carries": 0.5}, {"forgotten_carries": 0.5, "with_response": True, "operations": ["*"]}):
        with pytest.raises(ConfigError, match="forgotten_carries"):
            ArithmeticDataset(config)


def test_a_plain_prompt_is_the_bare_question_and_a_chat_prompt_asks_for_a_box():
    assert [m["role"] for m in ArithmeticDataset()[0]["messages"]] == ["user"]
    assert "\\boxed{}" in ArithmeticDataset({"style": "chat"})[0]["messages"][0]["content"]


def test_only_the_exact_number_is_correct_brute_force():
    environment = ArithmeticEnvironment()
    numbers = [str(n) for n in range(-60, 200)]
    for expected in ("46", "0", "-22", "123"):
        scored = score(environment, *numbers, expected=expected)
        assert [n for n, reward in zip(numbers, scored.rewards, strict=True) if reward == 1.0] == [expected]


@pytest.mark.parametrize(
    "text", ["46 or 47", "46.0", "046", "+46", "4 6", "=46", "46=", "", "٤٦", "forty-six", "4600", "46\n47", "--46"]
)
def test_anything_but_the_number_is_wrong(text):
    assert score(ArithmeticEnvironment(), text).rewards.tolist() == [0.0]


def test_white_space_around_the_number_is_allowed():
    assert score(ArithmeticEnvironment(), " 46", "46\n").rewards.tolist() == [1.0, 1.0]


def test_the_format_reward_is_added_for_any_whole_number():
    scored = score(ArithmeticEnvironment({"format_reward": 0.25}), "46", "47", "hm")
    assert scored.rewards.tolist() == [1.25, 0.25, 0.0]
    assert scored.answers == ["46", "47", None]


def test_metrics_distinguish_correct_from_well_formed_answers():
    environment = ArithmeticEnvironment({"format_reward": 2.0})
    scored = score(environment, "46", "47", "hm", "")
    batch = BatchedDataDict({"rewards": scored.rewards, "answers": scored.answers, "extra_env_info": scored.metadata})
    assert environment.global_post_process_and_metrics(batch)[1] == {"accuracy": 0.25, "number_frac": 0.5}


def test_the_last_box_counts_in_chat_style():
    scored = score(
        ArithmeticEnvironment(), r"\boxed{1} so \boxed{46}.", r"\boxed{46} no, \boxed{1}", "46", r"\boxed{46}", in_box=True
    )
    assert scored.rewards.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_a_last_box_that_holds_another_box_or_words_hides_no_earlier_number():
    scored = score(
        ArithmeticEnvironment(), r"\boxed{46} no, \boxed{\text{unknown}}", r"\boxed{46} or \boxed{\frac{1}{2}}", in_box=True
    )
    assert scored.answers == [None, None]
    assert scored.rewards.tolist() == [0.0, 0.0]


def test_a_huge_number_is_compared_as_text():
    digits = "9" * 100_000
    assert read_number(digits, in_box=False) == digits
    assert score(ArithmeticEnvironment(), digits).rewards.tolist() == [0.0]


def test_rows_of_one_call_do_not_affect_each_other():
    environment = ArithmeticEnvironment()
    texts = ["46", "hm", "47", "46"]
    together = score(environment, *texts).rewards
    alone = torch.cat([score(environment, text).rewards for text in texts])
    assert torch.equal(together, alone)


def test_digits_without_a_pair_in_the_split_are_an_error():
    with pytest.raises(ConfigError, match="min_digits"):
        ArithmeticDataset({"min_digits": 3, "max_digits": 2})
    with pytest.raises(IndexError):
        ArithmeticDataset({"num_samples": 3})[3]
    assert ArithmeticDataset(ArithmeticDatasetConfig(num_samples=3))[-1] == ArithmeticDataset()[2]


def test_one_digit_has_pairs_in_both_splits():
    for split in ("train", "validation"):
        assert ArithmeticDataset({"max_digits": 1, "split": split})[0]["messages"]


def test_metadata_without_an_expected_answer_is_an_error():
    with pytest.raises(DataError, match="expected_answer"):
        ArithmeticEnvironment().step([[{"role": "assistant", "content": "1"}]], [{}])
