"""The environment of an engine: what a run needs, and what the user's own environment decides."""

import logging
import os
import subprocess
import sys

import pytest

from rl_backends_vllm.device import quiet_import, set_environment_here, worker_environment
from rl_backends_vllm.leftovers import sweep_registrations


@pytest.mark.parametrize(("own", "level"), [({}, "ERROR"), ({"VLLM_LOGGING_LEVEL": "DEBUG"}, "DEBUG")])
@pytest.mark.parametrize("use_gpus", [False, True])
def test_vllm_reports_errors_alone_unless_the_user_asks_for_more(monkeypatch, own, level, use_gpus):
    monkeypatch.setattr(os, "environ", dict(own))
    assert worker_environment(use_gpus=use_gpus)["VLLM_LOGGING_LEVEL"] == level
    set_environment_here()
    assert os.environ["VLLM_LOGGING_LEVEL"] == level


def test_what_the_engine_depends_on_is_not_the_users_to_change_in_a_worker(monkeypatch):
    monkeypatch.setattr(os, "environ", {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert worker_environment(use_gpus=False)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize(("own", "level"), [({}, logging.ERROR), ({"VLLM_LOGGING_LEVEL": "info"}, logging.INFO)])
def test_the_import_of_vllm_logs_at_that_level_too(monkeypatch, own, level):
    monkeypatch.setattr(os, "environ", dict(own))
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    quiet_import()
    assert logger.level == level
    monkeypatch.setattr(logger, "level", logging.CRITICAL)
    quiet_import()
    assert logger.level == logging.CRITICAL, "whoever has set it before keeps it"


def test_pages_of_intels_runtime_go_with_processes_that_are_gone_and_stay_with_those_that_live(tmp_path):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    gone = tmp_path / f"__KMP_REGISTERED_LIB_{int(dead.stdout)}_0"
    mine, others = tmp_path / f"__KMP_REGISTERED_LIB_{os.getpid()}_0", tmp_path / "__KMP_REGISTERED_LIB_of_something_else"
    for page in (gone, mine, others):
        page.touch()
    assert sweep_registrations(tmp_path) == [gone.name]
    assert mine.exists()
    assert others.exists()


def test_one_openmp_runtime_is_preloaded_whatever_vllm_left_in_this_process(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libgomp.so.1:/usr/lib/libjemalloc.so")
    python = tmp_path / "bin" / "python"
    assert worker_environment(use_gpus=False, python=str(python))["LD_PRELOAD"].split(":") == [
        "/usr/lib/libgomp.so.1",
        "/usr/lib/libjemalloc.so",
    ]
    intel = tmp_path / "lib" / "libiomp5.so"
    intel.parent.mkdir()
    intel.touch()
    assert worker_environment(use_gpus=False, python=str(python))["LD_PRELOAD"].split(":") == [
        str(intel),
        "/usr/lib/libjemalloc.so",
    ]
