"""Runs commands of one checkout in forks of a process that has imported its libraries, because imports take seconds.

Reads one request per line: a JSON object with `argv` (of `rlcore`), `folder`, `output`, `errors` (files), `timeout` (seconds).
Answers each with the exit code of the command; null after the timeout.
"""

import atexit
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress

LIBRARIES = ("torch", "transformers", "transformers.models.llama.modeling_llama", "ray", "peft", "datasets", "plotext")
OURS = ("rlcore_cli.main", "rlcore_cli.train", "rl_train.launch.train", "rl_train.algorithms", "rl_backends_hf", "rl_envs")
"""Imported before the first fork. A checkout may lack some of them."""


def main():
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for name in (*LIBRARIES, *OURS):
        with suppress(ImportError):
            importlib.import_module(name)
    path = list(sys.path)
    status_of(["validate", *sys.argv[1:]])  # imports the config sections of all plugins
    sys.path[:] = path
    gc.collect()
    gc.freeze()
    answers.write("ready\n")
    for line in requests:
        request = json.loads(line)
        if (child := os.fork()) == 0:
            requests.close()
            answers.close()
            run(request)
        answers.write(json.dumps(ending_of(child, request["timeout"])) + "\n")


def run(request):
    """Run the command in the child, and end it without taking the libraries down, which would take seconds."""
    os.setsid()
    os.chdir(request["folder"])
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.path[0] = request["folder"]  # instead of the folder of this file, whose modules would hide others
    code = status_of(request["argv"])
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def status_of(argv):
    """The exit code of a command of `rlcore` in this process."""
    from rlcore_cli.main import main as rlcore

    sys.argv = ["rlcore", *argv]
    try:
        rlcore()
    except SystemExit as left:
        return left.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def ending_of(child, timeout):
    """The exit code of a child, which is killed with its group after the timeout."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    main()
