"""`rlcore train` stops when its engine or its policy confuses the pictures of rows, and the error names it."""

from pathlib import Path

import pytest
from wrong_plugins import picture_models
from wrong_plugins.picture_models import PictureEngineOf
from wrong_plugins.registry import PICTURES

MODEL = Path(__file__).parents[2] / "examples" / "pictures" / "model"
FIRST = ("ShowsThePictureOfAnotherRow", "SendsItsFirstTower")
"""Those that are tried in every run of the tests."""
RUN = {
    "policy": {
        "model_name": str(MODEL),
        "max_total_sequence_length": 64,
        "train_micro_batch_size": 8,  # the samples of two prompts
        "generation": {"max_new_tokens": 3},
    },
    "data": {"train": {"dataset_name": "wrong_plugins.picture_models.TwoPictures", "size": 32}},
    "env": {"arithmetic": {"reward_fns": {"correct": "pictures.shapes.correct"}}},
}


@pytest.fixture
def train_on_pictures(train):
    """`train` with rows of two pictures, and the policy or the engine of a name."""

    def run(name):
        path = f"wrong_plugins.picture_models.{name}"
        is_engine = issubclass(getattr(picture_models, name), PictureEngineOf)
        return train(RUN, {"policy": {"generation": {"backend": path}} if is_engine else {"backend": path}})

    return run


@pytest.mark.parametrize("name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in PICTURES])
def test_confused_pictures_stop_the_run_within_three_steps(train_on_pictures, name):
    code, output, steps = train_on_pictures(name)
    assert code == 1, output
    assert len(steps) < 3
    assert "Traceback" not in output
    assert name in output
    assert [words for words in PICTURES[name].words if words not in output] == [], output


def test_right_pictures_train_far_below_the_limits(train_on_pictures):
    code, output, steps = train_on_pictures("RightWithPictures")
    assert (code, len(steps)) == (0, 3), output
    assert max(step["agreement/mean"] for step in steps) < 1e-4
