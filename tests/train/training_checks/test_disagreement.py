"""Of engine, scoring pass and training pass, the one that differs from the other two is blamed."""

import pytest
import torch
from policy_cases import make_rows

from rl_train.rollouts.schedule import trained_tokens
from rl_train.training_checks.agreement import EXACT_MEAN, EXACT_ROW, Numbers, disagreement
from rl_train.training_checks.checked_loss import COMPARISON, WITH_ENGINE, Limits

LIMITS = Limits(mean=EXACT_MEAN, mean_tokens=1, row=EXACT_ROW, row_tokens=1)
ENGINE, SCORING, TRAINING = (
    "`generate` of ENGINE must",
    "so `get_logprobs` of POLICY is wrong",
    "so the training pass of POLICY is",
)
NOBODY = "No two of the log-probabilities"


def blamed(engine, scores, training, *, one_row=False):
    """The error for three values of each token, which differ in all rows or in the first one only."""
    rows = make_rows(8)
    rows["sample_mask"][:] = 1.0
    rows[COMPARISON] = torch.full_like(rows["token_mask"], WITH_ENGINE)
    trained = trained_tokens(rows)
    chosen = trained & (torch.arange(8) < (1 if one_row else 8)).unsqueeze(1)
    rows["generation_logprobs"], rows["prev_logprobs"] = -1.0 - engine * chosen, -1.0 - scores * chosen

    def numbers(difference):
        mean = abs(difference) * float(chosen.sum() / trained.sum())
        refused = mean > LIMITS.mean or abs(difference) > LIMITS.row
        worst, tokens = abs(difference), int(trained.sum())
        return Numbers(tokens=tokens, mean=mean, worst_row=worst, row=int(refused), invalid=0, refused=refused, doubtful=False)

    error = disagreement(
        rows=rows,
        engine=numbers(training - engine),
        scores=numbers(training - scores),
        limits=LIMITS,
        step=2,
        version=1,
        labels=("POLICY", "ENGINE"),
        ending="",
    )
    return str(error)


@pytest.mark.parametrize("one_row", [False, True])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        pytest.param((0.5, 0.0, 0.0), ENGINE, id="engine"),
        pytest.param((0.0, 0.5, 0.0), SCORING, id="scoring"),
        pytest.param((0.0, 0.0, 0.5), TRAINING, id="training"),
        pytest.param((0.0, 0.5, 1.2), NOBODY, id="all three"),
    ],
)
def test_two_that_agree_accuse_the_third(values, words, one_row):
    text = blamed(*values, one_row=one_row)
    assert words in text
    assert [other for other in (ENGINE, SCORING, TRAINING, NOBODY) if other in text] == [words]


def test_the_closest_pair_decides_if_a_difference_is_near_its_limit():
    # The engine is 0.00099 nats from the scoring pass, within the limit, and 0.00101 from the training pass, beyond it.
    assert ENGINE in blamed(0.00101, 0.00002, 0.0)
    assert TRAINING in blamed(0.0, 0.00002, 0.00101)
