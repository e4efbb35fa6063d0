"""Rewards for sums: plain functions of a completion and the fields of its row."""


def exact(completion: str, expected_answer: str) -> float:
    """1.0 for the correct number and nothing else."""
    return float(completion.strip() == expected_answer)


def digits(completion: str, expected_answer: str) -> float | None:
    """The fraction of correct digits, counted from the right; does not apply to a completion that is not a number."""
    answer = completion.strip()
    if not answer.isdecimal():
        return None
    correct = sum(a == b for a, b in zip(reversed(answer), reversed(expected_answer), strict=False))
    return correct / max(len(answer), len(expected_answer))
