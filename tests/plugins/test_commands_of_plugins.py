"""A distribution adds commands to `rlcore`; they are listed with the others and imported when they run."""

import signal
import subprocess
import sys

import pytest

COMMANDS = """
    from rl_core.plugins import Component, hookimpl

    @hookimpl
    def rlcore_commands():
        return [
            Component("play", target="acme_rl.commands:play", summary="Play against a checkpoint"),
            Component("games", target="acme_rl.commands:games", summary="Games, several"),
            Component("doctor", target="acme_rl.commands:play", summary="A doctor of another kind"),
        ]

    @hookimpl
    def rlcore_run_finished(error):
        raise ValueError("the disk is full")
"""
TARGETS = '''
import time

import typer

from rl_core.errors import ConfigError, WorkerError

games = typer.Typer()


@games.command()
def chess():
    print("chess")


@games.command()
def go():
    print("go")


def play(how: str, times: int = 1):
    """Play.

    Example:
        rlcore play well --times 3
    """
    if how == "badly":
        raise ConfigError("line 3: no such game\\nline 4: nor this")
    if how == "broken":
        raise WorkerError("rank 1 of 2 on host a raised")
    if how == "unexpectedly":
        return {}["nothing"]
    if how == "hooked":
        from rl_core.plugins.manager import discover
        from rl_train.control import call_event

        try:
            raise WorkerError("rank 1 of 2 on host a raised")
        except WorkerError as error:
            call_event(discover(), "rlcore_run_finished", run=None, error=error)
    if how == "forever":
        print("playing", flush=True)
        time.sleep(3600)
    print(how * times)
'''


@pytest.fixture
def acme(site):
    package = site.install("acme-rl", source=COMMANDS)
    (package / "commands.py").write_text(TARGETS)
    return site


def test_it_is_listed_with_the_others_without_being_imported(acme):
    (acme.folder / "acme_rl" / "commands.py").write_text("raise RuntimeError('imported')")
    result = acme.rlcore("--help")
    assert result.returncode == 0
    assert "play Play against a checkpoint" in " ".join(result.stdout.split())


def test_it_takes_its_own_options_and_shows_its_own_help(acme):
    assert acme.rlcore("play", "well", "--times", "2").stdout == "wellwell\n"
    assert "rlcore play well --times 3" in acme.rlcore("play", "--help").stdout


def test_an_application_of_several_commands_is_a_group(acme):
    assert acme.rlcore("games", "go").stdout == "go\n"


def test_a_built_in_command_is_not_replaced_and_a_warning_is_printed(acme):
    assert acme.rlcore("doctor", "acme").stdout.startswith("acme  acme-rl 1.0  ready")
    assert "warning: acme-rl 1.0 registers a command 'doctor'; the built-in command is used" in acme.rlcore("--help").stderr


def test_a_misspelt_name_suggests_it(acme):
    result = acme.rlcore("plya")
    assert result.returncode == 2
    assert "No such command 'plya'. Did you mean 'play', 'plan'?" in result.stderr


def test_a_command_that_cannot_be_imported_says_so_without_a_traceback(acme):
    (acme.folder / "acme_rl" / "commands.py").write_text("import acme_kernels")
    result = acme.rlcore("play", "well")
    assert result.returncode == 2
    assert result.stderr.startswith("error: acme_rl.commands, the module of 'play', cannot be imported: ")
    assert "Traceback" not in result.stderr


def test_an_explained_error_is_printed_without_traceback_and_sets_the_exit_code(acme):
    mistake = acme.rlcore("play", "badly")
    assert (mistake.returncode, mistake.stderr) == (2, "error: line 3: no such game\nline 4: nor this\n")
    breakdown = acme.rlcore("play", "broken")
    assert (breakdown.returncode, breakdown.stderr) == (1, "error: rank 1 of 2 on host a raised\n")


def test_an_unexpected_exception_keeps_its_traceback(acme):
    result = acme.rlcore("play", "unexpectedly")
    assert result.returncode == 1
    assert 'return {}["nothing"]' in result.stderr
    assert "KeyError: 'nothing'" in result.stderr


def test_a_raising_event_hook_keeps_its_traceback_and_the_error_of_the_run(acme):
    result = acme.rlcore("play", "hooked")
    assert result.returncode == 1
    assert "WorkerError: rank 1 of 2 on host a raised" in result.stderr
    assert 'raise ValueError("the disk is full")' in result.stderr
    assert result.stderr.endswith(
        "error: rlcore_run_finished of the plugin 'acme' (acme-rl 1.0) raised ValueError: the disk is full.\n"
        "To run without it: RLCORE_DISABLE_PLUGINS=acme\n"
    )


def test_an_interrupt_ends_with_130_and_no_traceback(acme):
    with subprocess.Popen(
        [sys.executable, "-m", "rlcore_cli.main", "play", "forever"],
        env={"PYTHONPATH": str(acme.folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "playing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "Traceback" not in errors
