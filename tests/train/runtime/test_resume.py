"""Resumed runs in this process: from which checkpoint, with which config, and what a rejected resume leaves unchanged."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from rl_backends_hf import HuggingFacePolicy
from rl_core.errors import CheckpointError, UserError
from rl_train.checkpoints.inputs import ComparedConfig
from rl_train.checkpoints.state import resumable_state
from rl_train.checkpoints.store import lock_folder
from rl_train.launch.train import train
from rl_train.trainers.trainers import SFTTrainer

MODEL = Path(__file__).parents[3] / "examples" / "addition" / "model"
RUN = {
    "sft": {"max_num_steps": 4, "global_batch_size": 2},
    "policy": {"backend": "hf", "model_name": str(MODEL), "max_total_sequence_length": 16},
    "data": {"train": {"dataset_name": "arithmetic", "num_samples": 40, "with_response": True}},
    "cluster": {"backend": "in_process"},
    "checkpointing": {"save_period": 2, "keep_latest_k": 2},
}


def merged(base, changes):
    return {
        key: merged(base.get(key, {}), changes[key]) if isinstance(changes.get(key), dict) else changes.get(key, base.get(key))
        for key in {**base, **changes}
    }


def launch_in(parent, changes=None, **options):
    path = parent / "run.yaml"
    path.write_text(json.dumps({**merged(RUN, changes or {}), "logger": {"log_dir": str(parent / "runs")}}))
    return train(path, **options)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Four steps, with checkpoints of the second and the fourth."""
    parent = tmp_path_factory.mktemp("finished")
    launch_in(parent, console=False)
    return parent / "runs"


@pytest.fixture
def launch(finished_run, tmp_path):
    """Start again, in a copy of the finished run."""
    shutil.copytree(finished_run, tmp_path / "runs")
    return lambda changes=None, **options: launch_in(tmp_path, changes, **options)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "run"


def contents(folder):
    """Every file, without the log, the locks, and the identity, which has the path of this copy."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("driver.log", ".lock", "run.json")
    }


def metrics_of(folder):
    return {row["step"]: row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}


@pytest.mark.slow
def test_resuming_an_earlier_checkpoint_moves_later_ones_to_another_folder(launch, folder, capsys):
    first = folder / "checkpoints" / "step_000004"
    old = contents(first)
    changes = {"sft": {"max_num_steps": 3}, "checkpointing": {"save_period": 10, "keep_latest_k": 1}}
    launch(changes, resume=str(folder / "checkpoints" / "step_000002"))
    steps = sorted(path.name for path in (folder / "checkpoints").iterdir() if path.is_dir())
    assert steps == ["abandoned_1", "step_000003"]
    assert contents(folder / "checkpoints" / "abandoned_1" / "step_000004") == old
    kept = (folder / "checkpoints" / "abandoned_1" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in kept] == [1, 2, 3, 4]
    assert f"moved to {folder / 'checkpoints' / 'abandoned_1'}: step_000004" in capsys.readouterr().out
    # The next start continues the new branch.
    again = launch({"sft": {"max_num_steps": 4}}, console=False)
    assert (again.folder, again.resumed_from) == (folder, 3)


def test_a_resume_of_a_path_that_does_not_exist_names_the_other_choices(tmp_path):
    with pytest.raises(CheckpointError, match=r"--resume latest: there is no such .*`auto`.*`never`"):
        launch_in(tmp_path, resume="latest")


def test_a_start_without_checkpointing_does_not_change_the_earlier_run(launch, folder, capsys):
    before = contents(folder)
    new = launch({"checkpointing": {"enabled": False}, "sft": {"max_num_steps": 5}})
    assert (new.folder.name, new.resumed_from) == ("run-2", 0)
    assert "checkpointing.enabled is false: this is a new run, which cannot be resumed" in capsys.readouterr().out
    assert contents(folder) == before
    with pytest.raises(CheckpointError, match=r"checkpointing\.enabled is false"):
        launch({"checkpointing": {"enabled": False}, "sft": {"max_num_steps": 5}}, resume=str(folder))
    assert contents(folder) == before


@pytest.mark.parametrize("refusal", ["config", "damage", "data"])
def test_a_rejected_resume_does_not_change_a_finished_run(launch, folder, refusal):
    changes = {"sft": {"max_num_steps": 6}}
    if refusal == "config":
        changes["sft"]["global_batch_size"] = 1
    elif refusal == "data":  # found only when the position in the data is restored
        changes["data"] = {"train": {"num_samples": 30}}
    else:  # found only when the optimizer is read, after the models were loaded
        (folder / "checkpoints" / "step_000004" / "policy" / "optimizer" / "trainer.pt").write_bytes(b"damaged")
    before = contents(folder)
    with pytest.raises(UserError):
        launch(changes, console=False, allow_config_change=refusal == "data")
    assert contents(folder) == before
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"


def test_allowed_changes_of_the_optimizer_take_effect_and_are_reported(launch, folder, capsys):
    before = metrics_of(folder)
    changes = {"sft": {"max_num_steps": 6}, "policy": {"optimizer": {"kwargs": {"lr": 0.5, "weight_decay": 0.1}}}}
    with pytest.raises(CheckpointError, match=r"lr: 1e-05 then, 0\.5 now") as refused:
        launch(changes, console=False)
    assert "--allow-config-change" in str(refused.value)
    launch(changes, console=False, allow_config_change=True)
    after = metrics_of(folder)
    assert [after[step]["lr"] for step in (1, 4, 5, 6)] == [1e-5, 1e-5, 0.5, 0.5]
    assert {step: after[step] for step in before} == before
    said = capsys.readouterr().err
    assert (
        "resumed with a changed config, which applies from step 5 on:\n  policy.optimizer.kwargs.lr: 1e-05 then, 0.5 now"
        in said
    )
    assert "policy.optimizer.kwargs.weight_decay: 0.0 then, 0.1 now" in (folder / "logs" / "driver.log").read_text()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"policy": {"optimizer": {"name": "torch.optim.SGD"}}}, r"A resume cannot change policy\.optimizer\.name"),
        ({"sft": None, "dpo": {"max_num_steps": 6}}, "written by an algorithm other than dpo"),
    ],
)
def test_unchangeable_settings_are_rejected_even_if_config_changes_are_allowed(finished_run, says, changes):
    checkpoint = finished_run / "run" / "checkpoints" / "step_000004"
    config = merged(json.loads((checkpoint / "state.json").read_text())["config"], changes)
    algorithm = next(name for name in ("sft", "dpo") if config.get(name))
    with pytest.raises(CheckpointError, match=says):
        resumable_state(checkpoint, ComparedConfig(values=config, algorithm=algorithm), allow_config_change=True)


def test_training_twice_in_one_folder_keeps_both_runs_checkpoints_and_locks_the_folder(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]}] * 4
    trainer = SFTTrainer(
        HuggingFacePolicy(str(MODEL), max_total_sequence_length=16),
        config={"max_num_steps": 1, "global_batch_size": 2},
        folder=tmp_path / "run",
        checkpointing={"keep_latest_k": 1},
    )
    for _ in range(2):
        trainer.train(rows)
    kept = sorted(str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("manifest.json"))
    assert kept == ["run/checkpoints/abandoned_1/step_000001", "run/checkpoints/step_000001"]
    with ExitStack() as exits:
        lock_folder(tmp_path / "run", exits, setting="logger.log_dir")
        with pytest.raises(UserError, match="run is in use by process"):
            trainer.train(rows)
