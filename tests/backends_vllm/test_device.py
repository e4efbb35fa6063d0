"""The environment variables of an engine: what a run needs, and what the user can set."""

import gc
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_backends_vllm.device import matmul_precision, quiet_import, set_process_environment, worker_environment
from rl_backends_vllm.shm_cleanup import remove_stale_folders, unlink_shared_memory


@pytest.mark.parametrize(("own", "level"), [({}, "ERROR"), ({"VLLM_LOGGING_LEVEL": "DEBUG"}, "DEBUG")])
@pytest.mark.parametrize("use_gpus", [False, True])
def test_vllm_logs_only_errors_unless_configured_otherwise(monkeypatch, own, level, use_gpus):
    monkeypatch.setattr(os, "environ", dict(own))
    assert worker_environment(use_gpus=use_gpus)["VLLM_LOGGING_LEVEL"] == level
    set_process_environment("cuda" if use_gpus else "cpu")
    assert os.environ["VLLM_LOGGING_LEVEL"] == level


def test_required_engine_settings_cannot_be_overridden_in_a_worker(monkeypatch):
    monkeypatch.setattr(os, "environ", {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert worker_environment(use_gpus=False)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_float32_on_a_gpu_is_not_compared_as_exact():
    assert matmul_precision("float32", device="cpu") == "float32"
    assert matmul_precision("float32", device="cuda") == "tf32"
    assert matmul_precision("bfloat16", device="cuda") == "bfloat16"


def test_cpu_settings_are_not_applied_to_an_engine_on_a_gpu(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    set_process_environment("cuda")
    assert "TORCHDYNAMO_DISABLE" not in os.environ, "graphs of a GPU are compiled"
    assert os.environ.items() == worker_environment(use_gpus=True).items()


@pytest.mark.parametrize(("own", "level"), [({}, logging.ERROR), ({"VLLM_LOGGING_LEVEL": "info"}, logging.INFO)])
def test_the_import_of_vllm_logs_at_that_level_too(monkeypatch, own, level):
    monkeypatch.setattr(os, "environ", dict(own))
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    quiet_import()
    assert logger.level == level
    monkeypatch.setattr(logger, "level", logging.CRITICAL)
    quiet_import()
    assert logger.level == logging.CRITICAL, "a level that was set before is kept"


def test_folders_of_dead_processes_are_removed_and_others_kept(tmp_path):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    owners = (dead.stdout.strip(), os.getpid(), "of-something-else")
    gone, *kept = [tmp_path / f"rlcore-vllm-{owner}-0123abcd" for owner in owners]
    for folder in (gone, *kept):
        folder.mkdir()
        (folder / "socket").touch()
    remove_stale_folders(tmp_path)
    assert set(tmp_path.iterdir()) == set(kept)


def test_a_queue_is_unlinked_after_all_have_attached_and_closes_without_output(monkeypatch):
    from multiprocessing import shared_memory

    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    others = shared_memory.SharedMemory(create=True, size=4096)  # could belong to another process
    mine, reader = ShmRingBuffer(1, 64, 2), ShmRingBuffer(1, 64, 2, name=others.name)
    path = Path("/dev/shm") / mine.shared_memory.name
    assert path.exists()
    unlink_shared_memory()
    assert not path.exists()
    assert (Path("/dev/shm") / others.name).exists()
    with mine.get_data(1) as data:  # its memory stays
        data[0] = 7
    unlink_shared_memory()
    del mine, reader
    gc.collect()
    others.close()
    others.unlink()
    assert not heard


def test_one_openmp_runtime_is_preloaded_in_any_process_state(tmp_path, monkeypatch):
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
