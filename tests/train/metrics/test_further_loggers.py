"""TensorBoard, Weights & Biases and MLflow with the real libraries, read back; a missing library is a config error."""

import csv
import importlib.metadata
import json
import logging
import math
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from written_metrics import mlflow_run, scalars, written_wandb_rows

from rl_core.config.diagnostics import InvalidConfigError
from rl_core.plugins.manager import PluginManager, discover
from rl_core.plugins.registry import Registry
from rl_core.plugins.requirements import unmet_needs
from rl_train.config.loader import load_config
from rl_train.errors import RunInterrupted, StopReason
from rl_train.metrics import logger as wandb_module
from rl_train.metrics.logger import MlflowLogger, TensorBoardLogger, WandbLogger, make_loggers
from rl_train.metrics.logger_config import MlflowConfig, TensorBoardConfig, WandbConfig

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo_addition.yaml"


def log(logger, values, *, first_step):
    logger.log_hyperparams({"grpo": {"max_num_steps": 3, "val_period": None}})
    for step, value in enumerate(values, start=first_step):
        logger.log_metrics({"reward/mean": value}, step)
    logger.finish()
    logger.finish()


def test_tensorboard_drops_the_steps_that_a_resumed_run_repeats(tmp_path):
    config = TensorBoardConfig(log_dir=str(tmp_path / "elsewhere"))
    log(TensorBoardLogger(config=config, folder=tmp_path), [0.25, 0.5, 0.75], first_step=1)
    log(TensorBoardLogger(config=config, folder=tmp_path), [1.0, 2.0], first_step=3)
    assert scalars(tmp_path / "elsewhere") == {"reward/mean": [(1, 0.25), (2, 0.5), (3, 1.0), (4, 2.0)]}


def test_wandb_is_offline_despite_environment_variables_and_resumes_under_the_same_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    log(WandbLogger(config=WandbConfig(tags=["a"]), folder=tmp_path), [0.25, 0.5], first_step=1)
    time.sleep(1.1)  # its offline folders are named by the second
    log(WandbLogger(config=WandbConfig(), folder=tmp_path), [0.75], first_step=2)
    [(run_id, rows)] = written_wandb_rows(tmp_path, 3).items()
    assert run_id == (tmp_path / "wandb_run_id").read_text()
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(1, 0.25), (2, 0.5), (2, 0.75)]


def rollouts(count, step):
    """Records with what the tables show and a key that they do not."""
    texts = [f'step {step}, row {number}:\n1, "2" = 3' for number in range(count)]
    return [
        {"prompt": "1+2=", "completion": text, "reward": None if number == 1 else 0.5, "advantage": None, "tokens": [1]}
        for number, text in enumerate(texts)
    ]


def log_rollouts(logger):
    for step in (1, 2):
        logger.log_rollouts(rollouts(3, step), step)
        logger.log_metrics({"reward/mean": 0.5}, step)
    logger.finish()


COLUMNS = ["step", "prompt", "completion", "reward", "advantage"]


def expected_table(step, count):
    return [[step, row["prompt"], row["completion"], row["reward"], row["advantage"]] for row in rollouts(count, step)]


def test_wandb_shows_the_first_completions_of_each_step_with_the_metrics_of_the_step(tmp_path):
    log_rollouts(WandbLogger(config=WandbConfig(completions_logged=2), folder=tmp_path))
    [(_, rows)] = written_wandb_rows(tmp_path, 2).items()
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(1, 0.5), (2, 0.5)]
    for row in rows:
        [table] = tmp_path.glob(f"wandb/offline-run-*/files/{row['completions/path']}")
        content = json.loads(table.read_text())
        assert content["columns"] == COLUMNS
        assert content["data"] == expected_table(row["step"], 2)


def test_mlflow_has_the_first_completions_of_each_step_as_a_table(tmp_path):
    log_rollouts(MlflowLogger(config=MlflowConfig(completions_logged=2), folder=tmp_path))
    tables = sorted(tmp_path.glob("mlflow_artifacts/*/artifacts/completions/*.csv"))
    assert [path.name for path in tables] == ["step_000001.csv", "step_000002.csv"]
    for step, path in enumerate(tables, 1):
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
        assert header == COLUMNS
        assert rows == [["" if value is None else str(value) for value in row] for row in expected_table(step, 2)]


def test_no_table_is_written_if_none_is_wanted_or_there_are_no_rollouts(tmp_path):
    log_rollouts(WandbLogger(config=WandbConfig(completions_logged=0), folder=tmp_path))
    log_rollouts(MlflowLogger(config=MlflowConfig(completions_logged=0), folder=tmp_path))
    assert not any("completions" in str(path) for path in tmp_path.rglob("*"))
    [(_, rows)] = written_wandb_rows(tmp_path, 2).items()
    assert {key for row in rows for key in row if not key.startswith("_")} == {"step", "reward/mean"}


def test_an_upload_to_wandb_that_does_not_end_is_reported_with_the_way_to_repeat_it(tmp_path, monkeypatch, own_messages):
    settings = wandb_module._settings(WandbConfig(mode="online"))
    assert (settings.finish_timeout, settings.finish_timeout_raises) == (300.0, True)
    logger = WandbLogger(config=WandbConfig(), folder=tmp_path)
    finish = logger._run.finish

    def expires(**options):
        finish(**options)
        raise TimeoutError

    monkeypatch.setattr(logger._run, "finish", expires)
    logger.finish()
    logger.finish()
    [message] = own_messages()
    assert "upload it with `wandb sync" in message
    assert str(tmp_path) in message


@contextmanager
def nobody_is_called(folder, *own_server):
    """An environment in which all connections go to one local port, and the test fails if there is one."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        url = f"http://127.0.0.1:{door.getsockname()[1]}"
        # An empty environment, because libraries stay silent if a variable indicates a test or CI.
        ways = dict.fromkeys((*own_server, "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), url)
        yield {"PATH": os.environ["PATH"], "HOME": str(folder)} | ways
        door.settimeout(0.2)
        with pytest.raises(TimeoutError):
            door.accept()


LOG_ONE_STEP = """
import pathlib
from rl_train.metrics.logger_config import {name}Config
from rl_train.metrics.logger import {name}Logger
logger = {name}Logger(config={name}Config(), folder=pathlib.Path({folder!r}))
logger.log_metrics({{"reward/mean": 1.0}}, 1)
logger.finish()
"""


def log_one_step(name, folder, env):
    code = LOG_ONE_STEP.format(name=name, folder=str(folder))
    return subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=240, capture_output=True, text=True)


def test_wandb_offline_opens_no_connection(tmp_path):
    with nobody_is_called(tmp_path, "WANDB_BASE_URL") as env:
        log_one_step("Wandb", tmp_path, env)
    assert len(written_wandb_rows(tmp_path, 1)) == 1


def test_mlflow_writes_to_the_run_folder_despite_environment_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    log(MlflowLogger(config=MlflowConfig(tags={"a": "b"}), folder=tmp_path), [0.25, 0.5, 0.75], first_step=1)
    experiment, run, metrics = mlflow_run(tmp_path)
    assert metrics == {"reward/mean": [(1, 0.25), (2, 0.5), (3, 0.75)]}
    assert run.data.params == {"grpo.max_num_steps": "3", "grpo.val_period": "None"}
    assert (experiment.name, run.info.run_name, run.data.tags["a"]) == ("rlcore", tmp_path.name, "b")
    assert run.info.status == "FINISHED"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlflow.db", "mlflow_run_id"]


def test_mlflow_metric_names_are_valid_for_its_stores(tmp_path):
    logger = MlflowLogger(config=MlflowConfig(), folder=tmp_path)
    logger.log_metrics({"validation/pass@4": 0.5, "reward/right?": 1.0, "env/math: hard/accuracy (%)": 2.0}, 1)
    logger.finish()
    assert mlflow_run(tmp_path)[2] == {
        "validation/pass_at_4": [(1, 0.5)],
        "reward/right_": [(1, 1.0)],
        "env/math: hard/accuracy ___": [(1, 2.0)],
    }


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("x"), "FAILED"), (RunInterrupted(3, True, StopReason.SIGTERM), "KILLED")]
)
def test_mlflow_shows_how_a_run_ended(tmp_path, error, status):
    with suppress(ValueError, RunInterrupted), ExitStack() as exits:
        exits.callback(MlflowLogger(config=MlflowConfig(), folder=tmp_path).finish)
        raise error
    assert mlflow_run(tmp_path)[1].info.status == status


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), (ValueError("x"), 1), (RunInterrupted(3, True, StopReason.SIGTERM), 143)]
)
def test_wandb_gets_the_exit_code_of_the_run(error, code):
    codes = []
    logger = WandbLogger.__new__(WandbLogger)
    logger._run = SimpleNamespace(finish=lambda exit_code: codes.append(exit_code))
    with suppress(ValueError, RunInterrupted), ExitStack() as exits:
        exits.callback(logger.finish)
        if error is not None:
            raise error
    assert codes == [code]


def test_mlflow_uses_the_tracking_uri_and_names_of_the_config(tmp_path):
    config = MlflowConfig(tracking_uri=f"sqlite:///{tmp_path}/own.db", experiment_name="sums", run_name="third")
    log(MlflowLogger(config=config, folder=tmp_path), [1.0], first_step=1)
    experiment, run, metrics = mlflow_run(tmp_path, "own.db")
    assert (experiment.name, run.info.run_name, metrics) == ("sums", "third", {"reward/mean": [(1, 1.0)]})


def test_a_resumed_run_continues_its_mlflow_run_and_keeps_its_first_parameters(tmp_path, caplog):
    log(MlflowLogger(config=MlflowConfig(), folder=tmp_path), [0.25, 0.5], first_step=1)
    resumed = MlflowLogger(config=MlflowConfig(), folder=tmp_path)
    assert mlflow_run(tmp_path)[1].info.status == "RUNNING"
    with caplog.at_level(logging.WARNING, logger="rlcore"):
        resumed.log_hyperparams({"grpo": {"max_num_steps": 4, "val_period": None, "seed": 1}})
    own = [record.getMessage() for record in caplog.records if record.name.startswith("rlcore")]
    assert own == ["MLflow keeps the first value of a parameter; changed since: grpo.max_num_steps"]
    resumed.log_metrics({"reward/mean": 0.625}, 2)
    resumed.log_metrics({"reward/mean": 0.75}, 3)
    resumed.finish()
    _, run, metrics = mlflow_run(tmp_path)
    assert metrics == {"reward/mean": [(1, 0.25), (2, 0.5), (2, 0.625), (3, 0.75)]}
    assert run.data.params == {"grpo.max_num_steps": "3", "grpo.val_period": "None", "grpo.seed": "1"}
    assert run.info.status == "FINISHED"


def test_a_run_resumed_with_another_tracking_uri_gets_a_new_mlflow_run(tmp_path, caplog):
    log(MlflowLogger(config=MlflowConfig(), folder=tmp_path), [0.25], first_step=1)
    elsewhere = MlflowConfig(tracking_uri=f"sqlite:///{tmp_path}/own.db")
    with caplog.at_level(logging.WARNING, logger="rlcore"):
        log(MlflowLogger(config=elsewhere, folder=tmp_path), [0.5], first_step=2)
    assert "does not exist at this tracking_uri: a new one is created" in caplog.text
    assert mlflow_run(tmp_path, "own.db")[2] == {"reward/mean": [(2, 0.5)]}


def test_mlflow_accepts_nan_metrics_and_long_parameters(tmp_path):
    logger = MlflowLogger(config=MlflowConfig(), folder=tmp_path)
    logger.log_hyperparams({"text": "x" * 7000, "many": {str(number): number for number in range(150)}})
    logger.log_metrics({"loss": math.nan, "grad_norm": math.inf, "reward/mean": 0.5}, 1)
    logger.log_metrics({"loss": 0.25, "grad_norm": 1.0, "reward/mean": 0.5}, 2)
    logger.finish()
    _, run, metrics = mlflow_run(tmp_path)
    assert math.isnan(metrics["loss"][0][1])
    assert metrics["loss"][1] == (2, 0.25)
    # Databases have no infinity: MLflow writes the largest float.
    assert metrics["grad_norm"] == [(1, sys.float_info.max), (2, 1.0)]
    assert metrics["reward/mean"] == [(1, 0.5), (2, 0.5)]
    assert len(run.data.params) == 151
    assert run.data.params["text"] == "x" * 6000


def test_mlflow_opens_no_connection_and_prints_nothing(tmp_path):
    with nobody_is_called(tmp_path, "MLFLOW_TRACKING_URI") as env:
        done = log_one_step("Mlflow", tmp_path, env)
    assert (done.stdout, done.stderr) == ("", "")
    assert mlflow_run(tmp_path)[2] == {"reward/mean": [(1, 1.0)]}


def config_file(folder, loggers):
    path = folder / "config.yaml"
    path.write_text(f"defaults: {EXAMPLE}\nlogger:\n  loggers:\n{loggers}")
    return path


def test_several_loggers_at_once_have_their_own_keys(tmp_path):
    path = config_file(tmp_path, "    tensorboard: {flush_s: 2}\n    wandb: {project: sums, tags: [a, b]}\n")
    loggers = load_config(path).run.logger.loggers
    assert loggers["tensorboard"] == TensorBoardConfig(flush_s=2)
    assert loggers["wandb"] == WandbConfig(project="sums", tags=["a", "b"])
    assert loggers["wandb"].mode == "offline"


def test_tensorboard_and_mlflow_record_one_run_side_by_side(tmp_path):
    path = config_file(tmp_path, "    tensorboard: {}\n    mlflow: {experiment_name: sums}\n")
    registry = Registry(discover())
    run = load_config(path, registry=registry).run
    with ExitStack() as exits:
        loggers = make_loggers(run.logger.loggers, registry, tmp_path, exits)
        for logger in loggers:
            logger.log_metrics({"reward/mean": 0.5, "loss": 0.25}, 3)
    experiment, run, metrics = mlflow_run(tmp_path)
    assert metrics == scalars(tmp_path / "tensorboard") == {"reward/mean": [(3, 0.5)], "loss": [(3, 0.25)]}
    assert (experiment.name, run.info.status) == ("sums", "FINISHED")


def test_a_custom_logger_is_named_by_its_import_path_and_gets_its_keys_and_the_run_folder(tmp_path, monkeypatch):
    (tmp_path / "sums_logger.py").write_text(
        "from rl_train.metrics.logger import Logger\n"
        "class Lines(Logger):\n"
        "    def __init__(self, *, config, folder):\n"
        "        self.path = folder / config.file\n"
        "    def log_metrics(self, metrics, step):\n"
        "        self.path.write_text(f'{step} {metrics}')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = config_file(tmp_path, "    sums_logger.Lines: {file: lines.txt}\n")
    registry = Registry(discover())
    run = load_config(path, registry=registry).run
    with ExitStack() as exits:
        [logger] = make_loggers(run.logger.loggers, registry, tmp_path, exits)
        logger.log_metrics({"reward/mean": 0.5}, 3)
    assert (tmp_path / "lines.txt").read_text() == "3 {'reward/mean': 0.5}"


def test_a_logger_with_async_methods_is_refused_because_nothing_awaits_them(tmp_path, monkeypatch, rlcore):
    (tmp_path / "async_logger.py").write_text(
        "from rl_train.metrics.logger import Logger\n"
        "class Late(Logger):\n"
        "    def __init__(self, *, config, folder): pass\n"
        "    async def log_metrics(self, metrics, step): pass\n"
        "    async def finish(self): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = config_file(tmp_path, "    async_logger.Late: {}\n")
    code, output = rlcore("validate", path, "--deep")
    assert code == 2
    assert "cannot be used: it defines finish, log_metrics as async, but a run does not await" in output


def test_a_logger_without_its_library_is_an_error_with_line_and_install_command(tmp_path, monkeypatch):
    everything = importlib.metadata.distribution

    def all_but_mlflow(name):
        if name == "mlflow-skinny":
            raise importlib.metadata.PackageNotFoundError(name)
        return everything(name)

    monkeypatch.setattr(importlib.metadata, "distribution", all_but_mlflow)
    path = config_file(tmp_path, "    mlflow: {experiment_name: sums}\n")
    with pytest.raises(InvalidConfigError) as error:
        load_config(path)
    assert str(error.value) == (
        f"{path}:4:13: logger.loggers.mlflow: the logger 'mlflow' cannot run here: mlflow-skinny<4,>=3.17 is not "
        "installed: pip install 'rl-train[mlflow]'"
    )
    assert load_config(path, ["logger.loggers.mlflow.enabled=false"]).run.logger.loggers["mlflow"].enabled is False


WITHOUT_MLFLOW = """
import importlib.metadata

everything = importlib.metadata.Distribution.discover
importlib.metadata.Distribution.discover = lambda **where: (d for d in everything(**where) if d.name != "mlflow-skinny")
"""


def test_list_plugins_and_doctor_report_that_it_is_not_installed(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_MLFLOW)

    def rlcore(*arguments):
        command = [sys.executable, "-m", "rlcore_cli.main", *arguments]
        env = os.environ | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=True).stdout

    rows = {row["name"]: row for row in json.loads(rlcore("list-backends", "--all", "--json")) if row["kind"] == "logger"}
    assert (rows["mlflow"]["status"], rows["mlflow"]["reason"]) == ("not installed", "pip install 'rl-train[mlflow]'")
    assert rows["tensorboard"]["status"] == rows["wandb"]["status"] == "ready"
    assert "unavailable: mlflow-skinny<4,>=3.17 is not installed: pip install 'rl-train[mlflow]'" in rlcore("doctor", "train")


def test_an_unmet_requirement_of_one_component_does_not_disable_its_plugin():
    from rl_train import plugin

    manager = PluginManager()
    train = manager.add("train", lambda: plugin, distribution="rl-train", version="0")
    assert train.status == "ready"
    assert unmet_needs(["pytest>=1", "no-such-distribution>=2"]) == "no-such-distribution>=2 is not installed"
    assert unmet_needs(["pytest>=1000"]) == f"pytest>=1000 is required, {version('pytest')} is installed"
    assert unmet_needs([]) is None


def test_the_requirements_of_a_component_are_those_of_its_extra():
    import tomllib

    from rl_train.plugin import rlcore_datasets, rlcore_loggers

    extras = tomllib.loads((EXAMPLE.parents[1] / "rl_train" / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    # The extras of datasets, of images, of nearest examples and of the agents `inspect` and `verifiers` belong to no logger.
    others = {name: extras[name] for name in ("data", "images", "prompts", "inspect", "verifiers")}
    assert {c.name: list(c.needs) for c in rlcore_loggers() if c.needs} | others == extras
    assert {tuple(c.needs) for c in rlcore_datasets() if c.needs} == {tuple(extras["data"])}
    assert all(c.install == f"pip install 'rl-train[{c.name}]'" for c in rlcore_loggers() if c.needs)
