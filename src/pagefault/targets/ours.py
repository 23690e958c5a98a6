"""What pagefault's own kernels say of themselves as a target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from ..kernels import chunked_prefill, launches
from ..kernels.launches import RaggedShape, UniformShape

# So many times fewer requests a window and elements a tile, and so many programs that share tiles.
_WINDOW_DIVISOR, _TILE_DIVISOR = 16, 32
_MOST_TILE_PROGRAMS = 3
# Of the launch for any number of requests, which walks four windows at a time now and then.
_ANY_WINDOW_SIZE = 16


@contextmanager
def small_launches() -> Iterator[None]:
    """Launch with small windows and tiles and with few programs.

    Batches of a few requests then have several windows, tiles that are shared, and tiles that no
    program is there for at first: a small case reaches every loop of every kernel.
    """
    ragged = {name: _smaller(shape) for name, shape in launches.RAGGED_SHAPES.items()}
    uniform = {name: UniformShape(16, 1) for name in launches.UNIFORM_SHAPES}
    with (
        mock.patch.object(launches, "RAGGED_SHAPES", ragged),
        mock.patch.object(launches, "UNIFORM_SHAPES", uniform),
        mock.patch.object(chunked_prefill, "CHUNKING_WINDOW_SIZE", 16),
    ):
        yield


def _smaller(shape: RaggedShape) -> RaggedShape:
    is_any = shape.most_requests > launches.RAGGED_SHAPES["many, long"].most_requests
    return shape._replace(
        window_size=_ANY_WINDOW_SIZE if is_any else shape.window_size // _WINDOW_DIVISOR,
        group_size=max(shape.group_size // _WINDOW_DIVISOR, 2),
        tile_size=shape.tile_size // _TILE_DIVISOR,
        max_tile_programs=_MOST_TILE_PROGRAMS,
        most_requests=shape.most_requests if is_any else shape.most_requests // _WINDOW_DIVISOR,
        least_room=-(-shape.least_room // _TILE_DIVISOR),
    )


pagefault_target = {"launches": {"small": small_launches}}
