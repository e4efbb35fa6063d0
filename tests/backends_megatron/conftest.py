"""Models created once per session, and the results of real ranks with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1]))
sys.path.insert(2, str(Path(__file__).parents[1] / "e2e"))

from megatron_cases import KINDS, VALUE_KINDS, make_model, make_value_model
from megatron_layouts import jobs
from rank_processes import RankProgram


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each kind, by name."""
    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        make_model(kind, root / kind)
    for kind in VALUE_KINDS:
        make_value_model(kind, root / f"{kind}-value")
    return root


@pytest.fixture
def policy(models):
    """A policy in this process; it is shut down afterwards, since Megatron keeps its groups for the whole process."""
    from rl_backends_megatron.policy import MegatronPolicy

    made = []

    def make(kind="llama-tied", **fields):
        made.append(MegatronPolicy(str(models / kind), **fields))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


@pytest.fixture(scope="session")
def out(request, models, tmp_path_factory) -> Path:
    """The output of runs with four, two and one processes, forks of one program, because importing Megatron takes long."""
    folder = tmp_path_factory.mktemp("ranks")
    full = any(item.get_closest_marker("full") and "out" in item.fixturenames for item in request.session.items)
    launches = [f"{world}={','.join(jobs(world, full=full))}" for world in (4, 2, 1)]
    RankProgram(Path(__file__).with_name("megatron_ranks.py"), models, folder, *launches).wait()
    return folder
