"""A grid of ranks with named axes (pipeline, data, context, tensor)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_core.errors import UserError


class NamedSharding:
    """Maps ranks to named coordinates: `layout` has the distinct ranks, one dimension per name, outermost first.

    Raises:
        UserError: The numbers of names and dimensions differ, a name or a rank is repeated, a rank is not an integer, or the
            layout is empty.
    """

    def __init__(self, layout: Sequence[Any] | NDArray[np.integer[Any]], names: Sequence[str]) -> None:
        try:
            ranks = np.asarray(layout)
        except ValueError:
            raise UserError(f"the layout is ragged: its rows differ in length, found {layout}") from None
        if ranks.size and not np.issubdtype(ranks.dtype, np.integer):
            raise UserError(f"ranks must be integers, found {ranks.ravel().tolist()} ({ranks.dtype})")
        grid = ranks.astype(np.int64)
        self._names = tuple(names)
        if grid.ndim != len(self._names):
            raise UserError(
                f"a layout of {grid.ndim} dimensions has {len(self._names)} axis names {list(self._names)}; "
                "give exactly one name per dimension"
            )
        if len(set(self._names)) != len(self._names):
            raise UserError(f"axis names must differ, found {list(self._names)}")
        if grid.size == 0:
            raise UserError(f"the layout of shape {grid.shape} has no ranks; every axis needs a size of at least 1")
        if np.unique(grid).size != grid.size or grid.min() < 0:
            raise UserError(f"ranks must be distinct and not negative, found {grid.ravel().tolist()}")
        self._grid = grid

    @classmethod
    def grid(cls, **sizes: int) -> NamedSharding:
        """Ranks 0, 1, 2, ... in row-major order; the last axis varies fastest.

        `NamedSharding.grid(data=2, tensor=2)` puts ranks 0 and 1 at data=0. Give the axes in the order
        pipeline, data, context, tensor, so that tensor-parallel ranks are adjacent (on one node).
        """
        are_sizes = (isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 1 for size in sizes.values())
        if not sizes or not all(are_sizes):
            raise UserError(f"every axis needs an integer size of at least 1, found {sizes or 'no axis'}")
        return cls(np.arange(int(np.prod(list(sizes.values())))).reshape(tuple(sizes.values())), tuple(sizes))

    @property
    def shape(self) -> dict[str, int]:
        """Axis name to size, outermost first."""
        return dict(zip(self._names, self._grid.shape, strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return self._names

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._grid.ndim

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self._grid.size)

    @property
    def layout(self) -> NDArray[np.int64]:
        """The ranks, int64, one dimension per axis (a copy)."""
        return self._grid.copy()

    def get_axis_index(self, name: str) -> int:
        """Position of the axis among `names`."""
        if name not in self._names:
            raise UserError(f"there is no axis {name!r}; this grid has {list(self._names)}")
        return self._names.index(name)

    def get_axis_size(self, name: str) -> int:
        """Number of coordinates on the axis."""
        return int(self._grid.shape[self.get_axis_index(name)])

    def get_worker_coords(self, rank: int) -> dict[str, int]:
        """Axis name to coordinate of that rank."""
        coordinates = np.argwhere(self._grid == rank)
        if not len(coordinates):
            raise UserError(f"rank {rank} is not in the grid {self.shape}")
        return {name: int(at) for name, at in zip(self._names, coordinates[0], strict=True)}

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """All ranks at these coordinates, in row-major order; unnamed axes are free."""
        index: list[int | slice] = [slice(None)] * self.ndim
        for name, at in coords.items():
            if not 0 <= at < self.get_axis_size(name):
                raise UserError(f"{name}={at} is outside the grid {self.shape}")
            index[self.get_axis_index(name)] = at
        return [int(rank) for rank in np.ravel(self._grid[tuple(index)])]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedSharding) and self._names == other._names and np.array_equal(self._grid, other._grid)

    def __hash__(self) -> int:
        return hash((self._names, self._grid.tobytes()))

    def __repr__(self) -> str:
        return f"NamedSharding({', '.join(f'{name}={size}' for name, size in self.shape.items())})"
