"""TensorBoard and Weights & Biases with their real libraries, read back; an absent library is a mistake of the config."""

import json
import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from rl_core.assembly.parts import Builder
from rl_core.config.diagnostics import InvalidConfigError
from rl_core.config.loader import load_config
from rl_core.metrics.logger_config import TensorBoardConfig, WandbConfig
from rl_core.metrics.tensorboard import TensorBoardLogger
from rl_core.metrics.wandb import WandbLogger
from rl_core.plugins.manager import PluginManager, discover
from rl_core.plugins.registry import Registry
from rl_core.plugins.requirements import unmet_needs

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo_addition.yaml"


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def log(logger, values, *, first_step):
    logger.log_hyperparams({"grpo": {"max_num_steps": 3, "val_period": None}})
    for step, value in enumerate(values, start=first_step):
        logger.log_metrics({"reward/mean": value}, step)
    logger.finish()
    logger.finish()


def test_tensorboard_shows_each_metric_under_its_own_name(tmp_path):
    log(TensorBoardLogger(config=TensorBoardConfig(), folder=tmp_path), [0.25, 0.5, 0.75], first_step=1)
    assert scalars(tmp_path / "tensorboard") == {"reward/mean": [(1, 0.25), (2, 0.5), (3, 0.75)]}


def test_tensorboard_drops_the_steps_that_a_resumed_run_repeats(tmp_path):
    config = TensorBoardConfig(log_dir=str(tmp_path / "elsewhere"))
    log(TensorBoardLogger(config=config, folder=tmp_path), [0.25, 0.5, 0.75], first_step=1)
    log(TensorBoardLogger(config=config, folder=tmp_path), [1.0, 2.0], first_step=3)
    assert scalars(tmp_path / "elsewhere") == {"reward/mean": [(1, 0.25), (2, 0.5), (3, 1.0), (4, 2.0)]}


def records(path):
    """The records of a .wandb file: after 7 bytes, the log format of LevelDB, which is blocks of 32 KiB with framed pieces."""
    data, piece, at = path.read_bytes(), b"", 7
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = struct.unpack_from("<HB", data, at + 4)
        piece += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield piece
            piece = b""


def wandb_rows(folder):
    """What was logged, by run id."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records(path):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                rows.setdefault(path.stem.removeprefix("run-"), []).append(row)
    return rows


def test_wandb_writes_offline_whatever_the_environment_says_and_goes_on_under_the_same_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    log(WandbLogger(config=WandbConfig(tags=["a"]), folder=tmp_path), [0.25, 0.5], first_step=1)
    time.sleep(1.1)  # its offline folders are named by the second
    log(WandbLogger(config=WandbConfig(), folder=tmp_path), [0.75], first_step=2)
    [(run_id, rows)] = wandb_rows(tmp_path).items()
    assert run_id == (tmp_path / "wandb_run_id").read_text()
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(1, 0.25), (2, 0.5), (2, 0.75)]


def test_wandb_offline_calls_nobody(tmp_path):
    code = (
        "import pathlib\n"
        "from rl_core.metrics.logger_config import WandbConfig\n"
        "from rl_core.metrics.wandb import WandbLogger\n"
        f"logger = WandbLogger(config=WandbConfig(), folder=pathlib.Path({str(tmp_path)!r}))\n"
        "logger.log_metrics({'reward/mean': 1.0}, 1)\n"
        "logger.finish()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as door:
        # Its own server, and the way to every other one, is this door; the library's service is a process of its own.
        door_url = f"http://127.0.0.1:{door.getsockname()[1]}"
        ways = dict.fromkeys(("WANDB_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), door_url)
        clean = {key: value for key, value in os.environ.items() if key.lower() != "no_proxy"}
        subprocess.run([sys.executable, "-c", code], check=True, env=clean | ways, timeout=60)
        door.settimeout(0.2)
        with pytest.raises(TimeoutError):
            door.accept()
    assert len(wandb_rows(tmp_path)) == 1


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


def test_a_logger_of_ones_own_is_named_by_its_path_and_gets_its_keys_and_the_run_folder(tmp_path, monkeypatch):
    (tmp_path / "sums_logger.py").write_text(
        "from rl_core.interfaces.logger import Logger\n"
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
        [logger] = Builder(run=run, registry=registry, exits=exits, cluster=None).loggers(tmp_path)
        logger.log_metrics({"reward/mean": 0.5}, 3)
    assert (tmp_path / "lines.txt").read_text() == "3 {'reward/mean': 0.5}"


def test_a_logger_whose_library_is_absent_is_a_mistake_at_its_line_with_the_command_that_mends_it(tmp_path):
    with pytest.raises(PackageNotFoundError):
        version("mlflow")
    path = config_file(tmp_path, "    mlflow: {experiment_name: sums}\n")
    with pytest.raises(InvalidConfigError) as error:
        load_config(path)
    assert str(error.value) == (
        f"{path}:4:13: logger.loggers.mlflow: the logger 'mlflow' cannot run here, since mlflow<4,>=3.17 is not installed: "
        "pip install 'rl-core[mlflow]'"
    )
    assert load_config(path, ["logger.loggers.mlflow.enabled=false"]).run.logger.loggers["mlflow"].enabled is False


def test_the_lists_and_the_doctor_say_that_it_is_not_installed():
    def rlcore(*arguments):
        command = [sys.executable, "-m", "rlcore_cli.main", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    rows = {row["name"]: row for row in json.loads(rlcore("list-backends", "--all", "--json")) if row["kind"] == "logger"}
    assert (rows["mlflow"]["status"], rows["mlflow"]["reason"]) == ("not installed", "pip install 'rl-core[mlflow]'")
    assert rows["tensorboard"]["status"] == rows["wandb"]["status"] == "ready"
    assert "not usable here: mlflow<4,>=3.17 is not installed: pip install 'rl-core[mlflow]'" in rlcore("doctor", "core")


def test_what_one_component_needs_does_not_make_its_plugin_missing():
    from rl_core import plugin

    manager = PluginManager()
    core = manager.add("core", lambda: plugin, distribution="rl-core", version="0")
    assert core.status == "ready"
    assert unmet_needs(["pytest>=1", "no-such-distribution>=2"]) == "no-such-distribution>=2 is not installed"
    assert unmet_needs(["pytest>=1000"]) == f"pytest>=1000 is required, {version('pytest')} is installed"
    assert unmet_needs([]) is None


def test_what_a_logger_needs_is_what_its_extra_installs():
    import tomllib

    from rl_core.plugin import rlcore_loggers

    extras = tomllib.loads((EXAMPLE.parents[1] / "rl_core" / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {c.name: list(c.needs) for c in rlcore_loggers() if c.needs} == extras
    assert all(c.install == f"pip install 'rl-core[{c.name}]'" for c in rlcore_loggers() if c.needs)
