"""What pagefault's own kernels say of themselves as a target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from ..kernels import chunked_prefill, launches
from ..kernels.launches import RaggedShape, UniformShape

# Requests a window, by what a window has; of a launch for any number of requests, the last. A few
# requests more than that take several windows, of which some programs walk four at a time.
_SMALL_WINDOWS = {64: 4, 256: 8, 1024: 16}
_ANY_WINDOW = 4
# So many times fewer elements a tile, and so many programs that share tiles: two for each of two
# requests, and some for either to take turns with.
_TILE_DIVISOR, _MOST_TILE_PROGRAMS = 64, 5


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
    is_any = not shape.has_one_window
    window_size = _ANY_WINDOW if is_any else _SMALL_WINDOWS[shape.window_size]
    return shape._replace(
        window_size=window_size,
        group_size=min(max(shape.group_size // 16, 2), window_size),
        tile_size=shape.tile_size // _TILE_DIVISOR,
        max_tile_programs=_MOST_TILE_PROGRAMS,
        most_requests=shape.most_requests if is_any else window_size,
        least_room=-(-shape.least_room // _TILE_DIVISOR),
    )


pagefault_target = {"launches": {"small": small_launches}}
