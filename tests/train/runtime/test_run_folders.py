"""The run folder and checkpoint that a start uses, and errors before anything is written."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from rl_core.config.policy_sections import PolicyConfig
from rl_core.errors import CheckpointError, UserError
from rl_train.checkpoints.store import CheckpointStore, lock_folder, read_identity
from rl_train.config.loader import load_config
from rl_train.run_folders.checkpoint_paths import CheckpointPaths, find_weights
from rl_train.run_folders.run_folder import choose_start, lock_run_folder

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"


@pytest.fixture
def config(tmp_path):
    """The config of a twenty-step run, with changes."""

    def load(*, epochs=None, **checkpointing):
        path = tmp_path / "config.yaml"
        sections = {
            "sft": {"max_num_steps": 20, "max_num_epochs": epochs, "global_batch_size": 2},
            "policy": {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16},
            "data": {"train": {"dataset_name": "arithmetic", "num_samples": 8, "with_response": True}},
            "logger": {"log_dir": str(tmp_path / "runs")},
            "checkpointing": checkpointing,
        }
        path.write_text(json.dumps(sections))
        return load_config(path).run

    return load


@pytest.fixture
def start(tmp_path):
    """Choose and claim a run folder as a start of `rlcore train` does, write checkpoints, and end."""

    def run(config, *, name="run", resume="auto", steps=()):
        with ExitStack() as exits:
            chosen = lock_run_folder(choose_start(config, name=name, resume=str(resume)), config.checkpointing, exits)
            elsewhere = config.checkpointing.checkpoint_dir
            store = CheckpointStore(Path(elsewhere) if elsewhere else chosen.folder / "checkpoints")
            for step in steps:
                written = {"sft": config.algorithm.model_dump(mode="json")}
                state = json.dumps({"step": step, "resumable": True, "parts": {}, "config": written})
                store.write(step, lambda folder, state=state: (folder / "state.json").write_text(state), {})
            return chosen

    return run


def test_auto_continues_the_newest_unfinished_run_and_never_starts_the_next(config, start, tmp_path):
    runs = tmp_path / "runs"
    assert start(config(), steps=[10]).folder == runs / "run"
    again = start(config())
    assert (again.folder, again.checkpoint) == (runs / "run", runs / "run" / "checkpoints" / "step_000010")
    assert start(config(), resume="never", steps=[20]).folder == runs / "run-2"
    finished = start(config())
    assert (finished.folder, finished.checkpoint) == (runs / "run-3", None)


def test_auto_continues_a_run_that_has_done_its_epochs_only_if_there_are_more(config, start, tmp_path):
    runs = tmp_path / "runs"
    first = start(config(epochs=1), steps=[4])
    assert start(config(epochs=1)).checkpoint is not None  # it was interrupted
    (first.folder / "status.json").write_text(json.dumps({"state": "finished", "steps": 4}))
    again = start(config(epochs=1))
    assert (again.folder, again.checkpoint) == (runs / "run-2", None)
    longer = start(config(epochs=2))
    assert (longer.folder, longer.checkpoint) == (runs / "run", runs / "run" / "checkpoints" / "step_000004")


@pytest.mark.parametrize("name", ["run[1]", "a*b", "what?", "[!x]", "deep/run[1]"])
def test_names_with_glob_characters_find_their_own_run(config, start, tmp_path, name):
    start(config(), name=name, steps=[10])
    again = start(config(), name=name)
    assert again.folder == tmp_path / "runs" / name
    assert again.checkpoint is not None
    new = start(config(), name=name, resume="never")
    assert new.folder == tmp_path / "runs" / f"{name}-2"


def test_a_run_name_that_looks_like_a_numbered_folder_of_another_run_is_distinguished(config, start, tmp_path):
    start(config(), name="run-2", steps=[10])
    first = start(config(), name="run", steps=[20])
    assert (first.folder, first.checkpoint) == (tmp_path / "runs" / "run", None)
    # Folder run-2 is taken, by a run that is not the second of `run`.
    assert start(config(), name="run", resume="never").folder == tmp_path / "runs" / "run-3"
    assert start(config(), name="run-2").checkpoint is not None


def test_without_checkpointing_auto_starts_a_new_run_and_a_path_is_refused(config, start, tmp_path):
    old = start(config(), steps=[10])
    new = start(config(enabled=False))
    assert (new.folder, new.checkpoint) == (tmp_path / "runs" / "run-2", None)
    for path in (old.folder, old.folder / "checkpoints" / "step_000010"):
        with pytest.raises(CheckpointError, match=r"checkpointing\.enabled is false. Set it to true"):
            start(config(enabled=False), resume=path)


def test_a_second_run_does_not_share_the_checkpoint_folder_of_the_first(config, start, tmp_path):
    shared = config(checkpoint_dir=str(tmp_path / "shared"))
    first = start(shared, steps=[10, 20])
    with pytest.raises(CheckpointError, match=rf"{tmp_path / 'shared'} belongs to the run {first.folder} \(steps 10 to 20\)"):
        start(shared)
    with pytest.raises(CheckpointError, match="belongs to the run"):
        start(shared, name="other")
    with pytest.raises(CheckpointError, match="belongs to the run"):
        start(shared, resume="never")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"], "a refused start leaves no folder"
    assert CheckpointStore(tmp_path / "shared").steps() == [10, 20]


@pytest.mark.parametrize("by", ["auto", "run folder", "step folder"])
def test_a_run_with_its_checkpoints_elsewhere_continues_in_its_own_folder(config, start, tmp_path, by):
    own = config(checkpoint_dir=str(tmp_path / "elsewhere" / "checkpoints"))
    first = start(own, steps=[10])
    (first.folder / "config.yaml").write_text(
        json.dumps({"checkpointing": {"checkpoint_dir": own.checkpointing.checkpoint_dir}})
    )
    step = tmp_path / "elsewhere" / "checkpoints" / "step_000010"
    again = start(own, resume={"auto": "auto", "run folder": first.folder, "step folder": step}[by])
    assert (again.folder, again.checkpoint) == (first.folder, step)
    assert again.identity == first.identity


def test_checkpoints_written_before_the_checkpoint_folder_changed_are_found(config, start, tmp_path):
    start(config(), steps=[10])
    moved = config(checkpoint_dir=str(tmp_path / "elsewhere"))
    assert start(moved).checkpoint == tmp_path / "runs" / "run" / "checkpoints" / "step_000010"
    start(moved, steps=[15])
    assert start(moved).checkpoint == tmp_path / "elsewhere" / "step_000015"


@pytest.mark.parametrize("by", ["auto", "step folder"])
def test_a_checkpoint_folder_that_outlives_its_run_folder_is_continued(config, start, tmp_path, by):
    own = config(checkpoint_dir=str(tmp_path / "disk"))
    first = start(own, steps=[10])
    shutil.rmtree(tmp_path / "runs")
    again = start(own, resume={"auto": "auto", "step folder": tmp_path / "disk" / "step_000010"}[by])
    assert (again.folder, again.checkpoint) == (first.folder, tmp_path / "disk" / "step_000010")
    assert again.identity.run_id == first.identity.run_id
    with pytest.raises(CheckpointError, match="belongs to the run"):
        start(own, name="other")


def test_a_run_folder_that_was_moved_is_still_the_same_run(config, start, tmp_path):
    first = start(config(), steps=[10])
    moved = tmp_path / "archive" / "run"
    shutil.move(first.folder, moved)
    again = start(config(), resume=moved / "checkpoints" / "step_000010")
    assert (again.folder, again.identity.run_id) == (moved, first.identity.run_id)
    assert read_identity(moved / "checkpoints").folder == str(moved)


def test_two_processes_do_not_write_to_one_run(config, tmp_path):
    section = config().checkpointing
    first = choose_start(config(), name="run", resume="auto")
    with ExitStack() as exits:
        lock_run_folder(first, section, exits)
        with pytest.raises(UserError, match=r"runs/run is in use by process \d+ on host"), ExitStack() as others:
            lock_run_folder(first, section, others)
        with pytest.raises(UserError, match="runs/run is in use"), ExitStack() as others:
            # Without checkpoints, too.
            lock_run_folder(first, config(enabled=False).checkpointing, others)
        assert choose_start(config(), name="run", resume="auto").folder == tmp_path / "runs" / "run-2"


def test_a_folder_with_another_name_than_the_run_has_a_reason(config, start, tmp_path):
    with ExitStack() as exits:
        first = lock_run_folder(choose_start(config(), name="run", resume="auto"), config().checkpointing, exits)
        assert first.name_note == ""
        second = choose_start(config(), name="run", resume="auto")
        assert second.folder.name == "run-2"
        assert second.name_note.startswith(f", because {tmp_path / 'runs' / 'run'} belongs to a run in progress; ")
    (first.folder / "status.json").write_text('{"state": "finished"}')
    assert "run exists (finished); logger.run_name=NAME" in choose_start(config(), name="run", resume="auto").name_note
    assert start(config(), name="other", steps=[10]).name_note == ""
    assert choose_start(config(), name="other", resume="auto").name_note == ""


def test_an_interrupted_replacement_is_completed_and_resumed_from(config, start, tmp_path):
    first = start(config(), steps=[5, 10])
    checkpoints = first.folder / "checkpoints"
    (checkpoints / "step_000010").rename(checkpoints / "step_000010.complete")
    (checkpoints / "step_000015.partial").mkdir()
    again = start(config())
    assert again.checkpoint == checkpoints / "step_000010"
    assert again.checkpoint.is_dir()
    assert not (checkpoints / "step_000015.partial").exists()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("no manifest", "manifest.json: missing; the folder contains: state.json"),
        ("manifest is a folder", "manifest.json: not a file"),
        ("empty", "manifest.json: missing; the folder contains: nothing"),
        ("file", "step_000010: a file, not a folder"),
        ("loop", "step_000010: a symbolic link to step_000010, which is not a folder"),
        ("interrupted replacement", "manifest.json: missing; the folder contains: state.json"),
    ],
)
@pytest.mark.parametrize("older", [True, False])
def test_a_newest_checkpoint_that_lost_its_manifest_is_refused_and_not_replaced_by_an_older_one(
    config, start, damage, problem, older
):
    first = start(config(), steps=[5, 10] if older else [10])
    checkpoints = first.folder / "checkpoints"
    damaged = checkpoints / "step_000010"
    if damage == "interrupted replacement":
        damaged = damaged.rename(checkpoints / "step_000010.complete")
    if damage in ("no manifest", "manifest is a folder", "interrupted replacement"):
        (damaged / "manifest.json").unlink()
    else:
        shutil.rmtree(damaged)
    if damage == "manifest is a folder":
        (damaged / "manifest.json").mkdir()
    elif damage == "empty":
        damaged.mkdir()
    elif damage == "file":
        damaged.write_text("")
    elif damage == "loop":
        damaged.symlink_to(damaged.name)
    way_out = f"--resume {checkpoints / 'step_000005'}" if older else "--resume never"
    for resume in ("auto", first.folder):
        with pytest.raises(CheckpointError) as refused:
            start(config(), resume=resume)
        assert f"{damaged} is damaged" in str(refused.value)
        assert problem in str(refused.value)
        assert way_out in str(refused.value)
    with pytest.raises(CheckpointError, match="is damaged"):
        find_weights(first.folder)
    if older:
        assert start(config(), resume=checkpoints / "step_000005").checkpoint == checkpoints / "step_000005"
        aside = CheckpointStore(checkpoints).set_aside(after=5)
        assert [path.name for path in aside.iterdir()] == ["step_000010"]
        assert start(config()).checkpoint == checkpoints / "step_000005"
    else:
        assert start(config(), resume="never").folder.name == "run-2"


def test_a_damaged_checkpoint_is_not_left_out_of_the_ranking_of_the_best(config, start):
    first = start(config(), steps=[5, 10])
    (first.folder / "checkpoints" / "step_000005" / "manifest.json").unlink()
    newest = first.folder / "checkpoints" / "step_000010"
    assert find_weights(first.folder).path == newest
    state = json.loads((newest / "state.json").read_text())
    state["config"]["checkpointing"] = {"metric_name": "m", "higher_is_better": True}
    (newest / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"step_000005 is not a checkpoint: it has no manifest\.json"):
        find_weights(first.folder, best=True)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"validation/accuracy": 0.5}, "(checkpointing.metric_name). Did you mean 'validation/accuracy'? Remove --best"),
        ({"loss": 0.5}, "(checkpointing.metric_name). Validation did not run at any of their steps. Remove --best"),
    ],
)
def test_a_ranking_by_a_metric_that_no_checkpoint_has_says_why(config, start, metrics, words):
    folder = start(config()).folder
    state = {"step": 5, "config": {"checkpointing": {"metric_name": "validation/acuracy", "higher_is_better": True}}}
    store = CheckpointStore(folder / "checkpoints")
    state |= {"resumable": True, "parts": {}}

    def fill(into):
        (into / "policy" / "weights").mkdir(parents=True)
        (into / "state.json").write_text(json.dumps(state))

    store.write(5, fill, metrics)
    with pytest.raises(CheckpointError) as refused:
        find_weights(folder, best=True)
    assert words in str(refused.value)


def test_what_a_run_killed_in_its_first_checkpoint_left_is_deleted_by_the_next_start(config, start, tmp_path):
    for name in ("run", "other"):
        first = start(config(), name=name)
        (first.folder / "metrics.jsonl").write_text("")
        (first.folder / "checkpoints" / "step_000010.partial" / "policy").mkdir(parents=True)
    with ExitStack() as exits:
        lock_folder(tmp_path / "runs" / "run" / "checkpoints", exits, setting="")
        start(config())
        assert (tmp_path / "runs" / "run" / "checkpoints" / "step_000010.partial").is_dir(), "its process is alive"
    assert start(config()).folder == tmp_path / "runs" / "run-3"
    left = [str(path.relative_to(tmp_path / "runs")) for path in (tmp_path / "runs").glob("*/checkpoints/step_*")]
    assert left == ["other/checkpoints/step_000010.partial"]


def test_a_start_takes_over_the_checkpoint_folder_of_a_run_that_was_killed_before_its_first_checkpoint(config, start, tmp_path):
    shared = config(checkpoint_dir=str(tmp_path / "shared"))
    first = start(shared)
    (first.folder / "metrics.jsonl").write_text("")
    (tmp_path / "shared" / "step_000010.partial").mkdir()
    again = start(shared)
    assert (again.folder, again.checkpoint) == (tmp_path / "runs" / "run-2", None)
    assert read_identity(tmp_path / "shared") == again.identity
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == [".lock", "run.json"]
    with ExitStack() as exits:
        lock_folder(tmp_path / "shared", exits, setting="")
        with pytest.raises(UserError, match="shared is in use by process"):
            start(shared, name="third")
    assert not (tmp_path / "runs" / "third").exists()


def test_a_checkpoint_with_all_weights_replaces_the_gguf_file_that_its_run_started_from(tmp_path):
    weights = tmp_path / "step_000001" / "policy" / "weights"
    weights.mkdir(parents=True)
    policy = PolicyConfig(backend="hf", model_name="model.gguf", max_total_sequence_length=8)
    checkpoint = CheckpointPaths(path=tmp_path / "step_000001", step=1, run_folder=None)
    (weights / "config.json").touch()
    assert checkpoint.policy_to_load(policy).model_name == str(weights)
    folder = policy.model_copy(update={"model_name": "folder"})
    assert checkpoint.policy_to_load(folder) is folder
