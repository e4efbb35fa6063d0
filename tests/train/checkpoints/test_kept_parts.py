"""The state of algorithm components is saved in every checkpoint and restored by a resume."""

import pytest

from rl_train.checkpoints.inputs import ComparedConfig
from rl_train.checkpoints.state import Checkpoints
from rl_train.checkpoints.store import CheckpointStore


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Rollouts(Counter):
    """A part with files, and with what was reported when they were loaded."""

    def save_files(self, folder):
        folder.mkdir()
        (folder / "rows.txt").write_text(str(self.count))

    def load_files(self, folder, *, config_changed=False):
        self.loaded = int((folder / "rows.txt").read_text()), config_changed


@pytest.fixture
def checkpoints(tmp_path):
    def make(part=None, **values):
        return Checkpoints(
            store=CheckpointStore(tmp_path),
            models={},
            parts={"rollouts": part or Counter()},
            config=ComparedConfig(values={"mine": {"max_num_steps": 3, **values}}, algorithm="mine"),
            save_optimizer=True,
            tokenizer=None,
        )

    return make


def test_saved_components_continue_from_their_checkpointed_state(checkpoints):
    first, part = checkpoints(), Counter()
    first.keep("weight", part)
    assert part.count == 0
    part.count = 7
    written = first.save(2, {})
    again, resumed = checkpoints(), Counter()
    assert again.restore(written) == 2
    # The page of the algorithm, which makes its parts, runs after the restore.
    again.keep("weight", resumed)
    assert resumed.count == 7
    resumed.count = 9
    third, last = checkpoints(), Counter()
    third.restore(again.save(3, {}))
    third.keep("weight", last)
    assert last.count == 9


def test_components_missing_in_a_checkpoint_start_fresh_and_cannot_use_reserved_names(checkpoints):
    first, data = checkpoints(), Counter()
    data.count = 5
    first.keep("rollouts", data)
    written = first.save(1, {})
    again, part, own = checkpoints(), Counter(), Counter()
    again.restore(written)
    again.keep("another", part)
    again.keep("rollouts", own)
    assert (part.count, own.count, again.parts["rollouts"].count) == (0, 5, 0)


@pytest.mark.parametrize(
    ("now", "is_change"), [({"seed": 1}, False), ({"seed": 2}, True), ({"seed": 1, "max_num_steps": 4}, False)]
)
def test_loading_files_reports_whether_the_config_has_changed(checkpoints, now, is_change):
    part = Rollouts()
    written = checkpoints(part, seed=1).save(1, {})
    checkpoints(part, **now).restore(written, allow_config_change=True)
    assert part.loaded == (0, is_change)
