"""vLLM's own HTTP server on a CPU, as a process."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import closing, contextmanager, suppress

_START_S = 300
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def vllm_server(command, port, log, *, modules=()):
    """Runs a shell command that starts the server; yields its process once it is healthy.

    Args:
        command: sets variables and starts the server, as `rlcore serve --print-vllm-command` prints it.
        port: the port in the command.
        log: file of its output.
        modules: folders of further modules that the server imports.
    """
    paths = os.pathsep.join([*map(str, modules), *(path for path in sys.path if path)])
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {command}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": paths, **_ENVIRONMENT},
        )
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", process, log)
            yield process
        finally:
            kill(process)


def kill(process):
    """Kill the server and everything it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_for(url, process, log):
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        with suppress(OSError), closing(urllib.request.urlopen(url, timeout=5)):
            return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])
