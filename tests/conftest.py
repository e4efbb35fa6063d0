"""What holds for every test of this suite, and the one local Ray that many of them share."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is slow, not wrong: no example has a deadline, and none is drawn too slowly.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# Ray makes its workers nicer than everything else, so that beside any other work they would get next to nothing.
os.environ.setdefault("RAY_worker_niceness", "0")

# A shell that starts the suite in the background has it ignore Ctrl-C, and every process that a test starts would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class SharedRay:
    """A claim on this process's Ray, held over the modules that want one: a start takes seconds."""

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
    """What one distribution's tests share ends before those of the next begin."""
    _shared_ray.enter(request.path.relative_to(Path(__file__).parent).parts[0])


@pytest.fixture(scope="module")
def one_thread():
    """Torch of the module's tests, and of the processes that they start, computes on one thread.

    A second one costs models this small more than it brings, and the order of sums, with it the last bits, depends on their
    number. A vLLM in this process has put a function that does nothing in the place of torch's own.
    """
    import torch

    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch._C.set_num_threads(1)
        yield
        torch._C.set_num_threads(before)


@pytest.fixture(scope="module")
def local_ray(_shared_ray):
    """The clusters of the module come and go on one local Ray, which the next module may find still there."""
    _shared_ray.hold()


@pytest.fixture(scope="module")
def no_ray(_shared_ray):
    """The module starts a Ray of its own kind."""
    _shared_ray.let_go()
