from __future__ import annotations

import pickle

import numpy as np
import pytest

from rl_core.cluster import NamedSharding, WorkerContext
from rl_core.errors import UserError
from rl_core.interfaces.worker_context import construct


def test_a_grid_numbers_its_ranks_with_the_last_axis_fastest():
    grid = NamedSharding.grid(pipeline=2, data=3, context=1, tensor=2)
    assert grid.shape == {"pipeline": 2, "data": 3, "context": 1, "tensor": 2}
    assert (grid.ndim, grid.size, grid.names) == (4, 12, ("pipeline", "data", "context", "tensor"))
    for rank in range(12):
        expected = np.unravel_index(rank, (2, 3, 1, 2))
        assert tuple(grid.get_worker_coords(rank).values()) == tuple(int(at) for at in expected)


def test_coordinates_and_ranks_are_inverse_of_each_other():
    grid = NamedSharding([[3, 1], [0, 2]], ["data", "tensor"])
    for rank in range(4):
        assert grid.get_ranks_by_coord(**grid.get_worker_coords(rank)) == [rank]


def test_fixing_some_axes_selects_the_ranks_of_the_others():
    grid = NamedSharding.grid(data=2, tensor=2)
    assert grid.get_ranks_by_coord(data=1) == [2, 3]
    assert grid.get_ranks_by_coord(tensor=1) == [1, 3]
    assert grid.get_axis_index("tensor") == 1
    assert grid.get_axis_size("data") == 2


@pytest.mark.parametrize(
    ("layout", "names"),
    [([[0, 1]], ["data"]), ([0, 0], ["data"]), ([[0, 1]], ["data", "data"]), ([], ["data"]), ([-1, 0], ["data"])],
)
def test_a_layout_must_be_a_grid_of_distinct_ranks(layout, names):
    with pytest.raises(UserError):
        NamedSharding(layout, names)


@pytest.mark.parametrize("layout", [[0.5, 1.2], [0.0, 1.0], [True, False], ["0", "1"], [None, 1]])
def test_ranks_that_are_not_integers_are_refused_instead_of_truncated(layout):
    with pytest.raises(UserError, match="ranks must be integers"):
        NamedSharding(layout, ["data"])


def test_a_ragged_layout_is_refused():
    with pytest.raises(UserError, match="ragged"):
        NamedSharding([[0, 1], [2]], ["data", "tensor"])


@pytest.mark.parametrize("size", [1.5, 2.0, True, "2", 0])
def test_an_axis_size_that_is_not_a_positive_integer_is_refused(size):
    with pytest.raises(UserError, match="integer size of at least 1"):
        NamedSharding.grid(data=size)


def test_an_unknown_axis_rank_or_coordinate_is_named_in_the_error():
    grid = NamedSharding.grid(data=2)
    for call, word in [
        (lambda: grid.get_axis_size("tensor"), "tensor"),
        (lambda: grid.get_worker_coords(2), "2"),
        (lambda: grid.get_ranks_by_coord(data=5), "data=5"),
    ]:
        with pytest.raises(UserError, match=word):
            call()


def _context() -> WorkerContext:
    return WorkerContext(rank=1, world_size=2, local_rank=1, node_rank=0, master_address="h", master_port=1, coords={"data": 1})


def test_a_worker_context_survives_pickling_and_cannot_be_changed():
    context = _context()
    assert pickle.loads(pickle.dumps(context)) == context
    with pytest.raises(TypeError):
        context.coords["data"] = 0


def test_only_a_constructor_that_asks_for_the_context_is_given_it():
    class ByName:
        def __init__(self, context, *, size=1):
            self.got = (context.rank, size)

    class ByAnnotation:
        def __init__(self, ctx: WorkerContext, size=1):
            self.got = (ctx.rank, size)

    class ByKeyword:
        def __init__(self, size=1, *, context):
            self.got = (context.rank, size)

    class Without:
        def __init__(self, size=1, **kwargs):
            self.got = (None, size)

    for cls in (ByName, ByAnnotation, ByKeyword):
        assert construct(cls, _context(), {"size": 4}).got == (1, 4)
    assert construct(Without, _context(), {"size": 4}).got == (None, 4)
