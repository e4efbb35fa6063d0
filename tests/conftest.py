"""Fixtures for the whole suite, and the local Ray instance that many tests share."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Modules next to this file are for the tests of several folders.
sys.path.insert(0, str(Path(__file__).parent))

# A busy machine is slow, not wrong: no example has a deadline, and none is drawn too slowly. The other check is left out here
# because `settings(suppress_health_check=...)` of a test would replace this list.
checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("suite", deadline=None, suppress_health_check=checks)
settings.load_profile("suite")

# A shell that starts the suite in the background has it ignore Ctrl-C, and every process that a test starts would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Torch waits for its slowest thread after each operation: with two threads in each process of a busy machine, tests of tiny
# models took up to four times the CPU time. The order of sums, and with it the last bits, depends on the number of threads too.
os.environ["OMP_NUM_THREADS"] = "1"

# Collecting imports all libraries, none of which is garbage.
gc.disable()
freeze, unfreeze = gc.freeze, gc.unfreeze

STARTED = pytest.StashKey[float]()
IMPORTS = pytest.StashKey[str]()
TOGETHER = ("tests/backends_megatron/",)
"""Folders whose files share an expensive fixture of the session: one process runs all of them."""


def pytest_addoption(parser):
    parser.addoption("--closing-line", action="store_true", help="end with one line: commit, passed, failed, skipped, minutes")
    parser.addoption("--gpu-results", type=Path, metavar="FILE", help="write the result of each test; fail if one does not run")


def pytest_configure(config):
    config.stash[STARTED] = time.monotonic()
    if (results := config.getoption("--gpu-results")) is not None:
        from gpu_results import GpuResults

        config.pluginmanager.register(GpuResults(results))
    if "RLCORE_TEST_IMPORTS" not in os.environ:  # else this process is one of several of a session, or a test of a test
        config.stash[IMPORTS] = os.environ["RLCORE_TEST_IMPORTS"] = tempfile.mkdtemp(prefix="rlcore-test-imports-")
        folders = [str(Path(__file__).with_name("fast_start")), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))


def pytest_collection_finish():
    # What has been imported and collected stays to the end: it is not searched for garbage again.
    freeze()
    gc.enable()
    # vLLM thaws everything with each engine, and each of its five collections would then take a second.
    gc.freeze = gc.unfreeze = lambda: None


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_of_the_module():
    """What the module has imported is not searched for garbage again either."""
    yield
    gc.collect()
    freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests that start Ray through a fixture."""
    for item in items:
        if {"local_ray", "no_ray"} & set(item.fixturenames):
            item.add_marker(pytest.mark.ray)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With several pytest processes, the tests of a file run in one of them, because fixtures of modules are expensive.

    So do the tests of a folder in `TOGETHER`. Groups of `--dist loadgroup` have no effect with pytest 9.2 and pytest-xdist 3.8.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrFolder(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return next((folder for folder in TOGETHER if file.startswith(folder)), file)

    return ByFileOrFolder(config, log)


def pytest_unconfigure(config):
    gc.freeze, gc.unfreeze = freeze, unfreeze
    # A process of pytest-xdist that takes more than 5 seconds to end is interrupted and then killed. The last search for
    # garbage among all libraries and tests would take that long.
    if not hasattr(config, "workerinput"):
        gc.unfreeze()
    if folder := config.stash.get(IMPORTS, None):
        shutil.rmtree(folder, ignore_errors=True)
    if hasattr(config, "workerinput"):
        return
    if line := skipped_sandbox_line(config):
        print(line)
    if config.getoption("--closing-line"):
        print(closing_line(config))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    from isolation import MissingIsolation

    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, MissingIsolation):
        report.user_properties.append(("missing", "isolation"))
    return report


def skipped_sandbox_line(config) -> str | None:
    """How many tests were skipped because programs cannot be isolated here, and what to do; None if none was."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", ()) if reporter else ()
    skipped = [report.nodeid for report in reports if ("missing", "isolation") in report.user_properties]
    if not skipped:
        return None
    names = config.cache.mkdir("isolation") / "skipped"
    names.write_text("\n".join(skipped) + "\n")
    cause = (
        "bubblewrap is not installed: apt-get install bubblewrap"
        if shutil.which("bwrap") is None
        else "no isolation works here; docs/sandbox.md lists what it needs"
    )
    again = f"pytest @{os.path.relpath(names, config.invocation_params.dir)}"
    return f"{len(skipped)} tests of the sandbox were skipped, because {cause}; then `{again}` runs them"


def closing_line(config) -> str:
    """The result of this run in one line, for a closing note."""
    root = Path(__file__).parents[1]
    commit, changes = (
        subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
        for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain"])
    )
    stats = config.pluginmanager.get_plugin("terminalreporter").stats
    passed, failed, errors, skipped = (len(stats.get(key, ())) for key in ("passed", "failed", "error", "skipped"))
    minutes = (time.monotonic() - config.stash[STARTED]) / 60
    tested = " ".join(config.args)
    with_changes = " with uncommitted changes" if changes else ""
    return (
        f"{commit}{with_changes}, {tested}: {passed} passed, {failed + errors} failed, {skipped} skipped, {minutes:.1f} minutes"
    )


class SharedRay:
    """The Ray of this process, shared by the modules that need one, because a start takes seconds."""

    def __init__(self):
        self._lease = None
        self._folder = None

    def hold(self):
        from rl_core.cluster.ray_runtime import RayLease

        if self._lease is None:
            self._lease = RayLease()

    def enter(self, folder):
        if folder != self._folder:
            self.let_go()
        self._folder = folder

    def let_go(self):
        if self._lease is not None:
            self._lease.release()
        self._lease = None


@pytest.fixture(scope="session")
def _shared_ray():
    shared = SharedRay()
    yield shared
    shared.let_go()


@pytest.fixture(scope="module", autouse=True)
def _ray_of_the_folder(request, _shared_ray):
    """Shared fixtures of one distribution end before the tests of the next start."""
    _shared_ray.enter(request.path.relative_to(Path(__file__).parent).parts[0])


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Torch computes on one thread again after a module whose vLLM, in this process, has changed that.

    vLLM also puts a function that does nothing in the place of torch's own.
    """
    yield
    if "torch" in sys.modules:
        sys.modules["torch"]._C.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _own_module_folders():
    """The folders of config files that a module adds to `sys.path` are not searched by the tests of the next."""
    from rl_core.plugins.import_path import MODULE_FOLDERS

    path, folders = list(sys.path), list(MODULE_FOLDERS)
    yield
    sys.path[:], MODULE_FOLDERS[:] = path, folders


@pytest.fixture(scope="module")
def local_ray(_shared_ray):
    """The clusters of the module are created and removed on one local Ray, which the next module may reuse."""
    _shared_ray.hold()


@pytest.fixture(scope="module")
def no_ray(_shared_ray):
    """The module starts its own Ray."""
    _shared_ray.let_go()


@pytest.fixture
def rlcore(monkeypatch, capfd):
    """The command in this process, which saves seconds of imports: exit code and all output."""
    from rlcore_cli.main import main

    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # otherwise the command sets it permanently

    def call(*arguments, folder=None):
        if folder is not None:
            monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["rlcore", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        capfd.readouterr()
        code = 0
        try:
            main()
        except SystemExit as left:
            code = left.code or 0
        said = capfd.readouterr()
        return code, said.out + said.err

    return call


@pytest.fixture
def own_messages(caplog):
    """The messages of our own loggers so far. Libraries log too, some in threads that earlier tests have started."""
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith(("rlcore", "rl_"))]


@pytest.fixture
def make_small_disk(tmp_path):
    """Mounts an empty file system of a given size, such as "700k"; the test is skipped if mounting is not permitted."""
    mounted = []

    def make(size):
        folder = tmp_path / "small"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no command `mount`")
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)
