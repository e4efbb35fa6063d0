"""The installed command: how its process starts and ends."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, gc, sys, threading, time
from rlcore_cli import main as module

def ends_late():
    time.sleep(0.3)
    print("the thread has ended")

def run():
    print("collects after", gc.get_threshold()[0])
    gc.collect(0)
    print("then as before:", gc.get_threshold() == before and not gc.callbacks)
    threading.Thread(target=ends_late).start()
    atexit.register(print, "and what was registered has run")
    {end}

module.main, before = run, gc.get_threshold()
module.command()
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(3)", 3), ("sys.exit()", 0), ("raise SystemExit('a message')", 1), ("raise RuntimeError('of a plugin')", 1)],
)
def test_the_process_ends_with_the_code_of_the_command_after_its_threads_and_exit_functions(end, code):
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    first, then, *rest = done.stdout.splitlines()
    assert first == "collects after 1000000"
    assert then == "then as before: True"
    assert rest == ["the thread has ended", "and what was registered has run"]
    assert ("of a plugin" in done.stderr) == ("RuntimeError" in end)
    assert ("a message" in done.stderr) == ("message" in end)


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [(">&-", 0, ""), (">/dev/full", 120, "No space left on device")],
    ids=["no output", "a full disk"],
)
def test_output_that_cannot_be_written_is_reported_unless_there_is_none(redirection, code, message):
    program = "from rlcore_cli.main import command; command()"
    line = f'exec env -u PYTHONUNBUFFERED "$0" -c "{program}" --version {redirection}'
    done = subprocess.run(["bash", "-c", line, sys.executable], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
