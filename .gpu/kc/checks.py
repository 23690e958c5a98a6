"""What every launcher checks before it writes: arguments always, device values on request.

The checks of arguments read sizes, dtypes and places alone and never wait for a device. The
`validate_...` functions read values, wait, and run only under PAGEFAULT_VALIDATE=1.
"""

import os
import reprlib
import warnings
from numbers import Integral
from typing import NoReturn

import torch
from triton.runtime.jit import JITFunction

INT32_MIN = -(2**31)
INT32_MAX = 2**31 - 1

_INDEX_DTYPES = frozenset((torch.int32, torch.int64))
_has_warned_of_capture = False


def check_number(name: str, value: object, minimum: int = 0) -> int:
    """Return `value` as an int.

    Args:
        name: The argument's name, for the message.
        value: A Python int or numpy integer.
        minimum: The smallest value that is accepted.

    Raises:
        TypeError: It is a bool or no integer.
        ValueError: It is below `minimum` or past 2^31 - 1.
    """
    if type(value) is not int:
        # numpy registers its integers as Integral; a bool is one by inheritance.
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} is {_describe_object(value)}, but must be an int")
        value = int(value)
    if not minimum <= value <= INT32_MAX:
        raise ValueError(f"{name} is {value}, but must be in {minimum} ... {INT32_MAX}")
    return value


def check_index_vector(
    name: str, value: object, device: torch.device, numel: int | None = None
) -> torch.Tensor:
    """Return `value`, an input of indices, lengths, starts, counts or offsets.

    Args:
        name: The argument's name, for the message.
        value: A contiguous 1-D tensor; int32 or int64.
        device: Where it must lie.
        numel: How many elements it must have; any number if None.

    Raises:
        TypeError: It is no tensor, or has another dtype.
        ValueError: Its shape, size, strides or device are others.
    """
    if not isinstance(value, torch.Tensor) or value.dtype not in _INDEX_DTYPES:
        _refuse_type(name, value, "int32 or int64")
    _check_vector(name, value, device)
    if numel is not None and value.numel() != numel:
        raise ValueError(f"{name} has {value.numel()} elements, but must have {numel}")
    return value


def check_output_vector(
    name: str, value: object, device: torch.device, min_numel: int = 0
) -> torch.Tensor:
    """Return `value`, an output that is at least `min_numel` elements long.

    Args:
        name: The argument's name, for the message.
        value: A contiguous 1-D tensor; int32 or int64.
        device: Where it must lie.
        min_numel: How many elements it must have at least.

    Raises:
        TypeError: It is no tensor, or has another dtype.
        ValueError: Its shape, strides or device are others, or it is too short.
    """
    if not isinstance(value, torch.Tensor) or value.dtype not in _INDEX_DTYPES:
        _refuse_type(name, value, "int32 or int64")
    _check_vector(name, value, device)
    if value.numel() < min_numel:
        raise ValueError(f"{name} has {value.numel()} elements, but must have >= {min_numel}")
    return value


def check_page_ids(name: str, value: object, device: torch.device) -> torch.Tensor:
    """Return `value`, a flat input of page ids.

    Args:
        name: The argument's name, for the message.
        value: A contiguous 1-D tensor; int32.
        device: Where it must lie.

    Raises:
        TypeError: It is no tensor, or has another dtype.
        ValueError: Its shape, strides or device are others.
    """
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.int32:
        _refuse_type(name, value, "int32")
    _check_vector(name, value, device)
    return value


def check_page_table(name: str, value: object) -> torch.Tensor:
    """Return `value`, a page table.

    Args:
        name: The argument's name, for the message.
        value: [req_pool_size + 1, max_pages], rows of any pitch; int32.

    Raises:
        TypeError: It is no tensor, or has another dtype.
        ValueError: It has not two dimensions, its rows are not contiguous, or they overlap.
    """
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.int32:
        _refuse_type(name, value, "int32")
    if value.dim() != 2:
        raise ValueError(f"{name} has shape {list(value.shape)}, but must have 2 dimensions")
    num_rows, max_pages = value.shape
    if num_rows == 0 or max_pages == 0:
        return value
    row_stride, column_stride = value.stride()
    # The stride of a dimension of size 1 is never used, and torch leaves anything in it.
    if column_stride != 1 and max_pages > 1:
        raise ValueError(f"{name} has stride(1) == {column_stride}, but must have 1")
    if row_stride < max_pages and num_rows > 1:
        raise ValueError(
            f"{name} has stride(0) == {row_stride}, but must have >= {max_pages}, its width"
        )
    return value


def check_launchable(name: str, tensor: torch.Tensor, kernel: object) -> None:
    """Refuse a tensor on a device for which Triton compiles nothing.

    Raises:
        ValueError: It is not on a CUDA device and Triton is not interpreting.
    """
    if not tensor.is_cuda and isinstance(kernel, JITFunction):
        raise ValueError(
            f"{name} is on {tensor.device}, but must be on a CUDA device unless "
            "TRITON_INTERPRET=1 was set before triton was imported"
        )


def is_validating(tensor: torch.Tensor) -> bool:
    """Return whether the values on the device of `tensor` are to be checked now.

    Under PAGEFAULT_VALIDATE=1 they are, except while the current stream is being captured:
    reading a value would break the capture. The first time, that is warned of.
    """
    global _has_warned_of_capture
    if os.environ.get("PAGEFAULT_VALIDATE") != "1":
        return False
    if not tensor.is_cuda:
        return True
    with torch.cuda.device(tensor.device):
        if not torch.cuda.is_current_stream_capturing():
            return True
    if not _has_warned_of_capture:
        _has_warned_of_capture = True
        warnings.warn(
            "PAGEFAULT_VALIDATE=1 checks nothing while a stream is being captured",
            RuntimeWarning,
            stacklevel=3,
        )
    return False


def validate_pool_indices(name: str, req_pool_indices: torch.Tensor, num_rows: int) -> None:
    """Refuse a pool index that is no row of the page table.

    Raises:
        ValueError: With the first one and its place.
    """
    is_bad = (req_pool_indices < 0) | (req_pool_indices >= num_rows)
    _refuse_first(name, req_pool_indices, is_bad, f"in 0 ... {num_rows - 1}")


def validate_not_negative(name: str, values: torch.Tensor) -> None:
    """Refuse a negative value.

    Raises:
        ValueError: With the first one and its place.
    """
    _refuse_first(name, values, values < 0, ">= 0")


def validate_fits(name: str, results: torch.Tensor, dtype: torch.dtype) -> None:
    """Refuse a result that its destination can't hold.

    Args:
        name: The destination's name, for the message.
        results: int64, what would be written.
        dtype: The destination's.

    Raises:
        ValueError: With the first one and its place.
    """
    if dtype is torch.int32:
        _refuse_first(name, results, results > INT32_MAX, f"<= {INT32_MAX}")


def validate_equal(name: str, values: torch.Tensor, other_name: str, others: torch.Tensor) -> None:
    """Refuse a value that differs from the one in the same place of the other tensor.

    Raises:
        ValueError: With the first pair and its place.
    """
    on_cpu = values.cpu().long()
    is_bad = on_cpu != others
    if bool(is_bad.any()):
        idx = int(is_bad.nonzero()[0, 0])
        raise ValueError(
            f"{name}[{idx}] is {int(on_cpu[idx])}, but must be {int(others[idx])}, "
            f"as {other_name}[{idx}] is"
        )


def validate_sum_within(name: str, lens: torch.Tensor, limit_name: str, limit: int) -> int:
    """Return the sum of `lens`, which is not past `limit`.

    Args:
        name: The argument's name, for the message.
        lens: Elements of each request; none negative.
        limit_name: What they are elements of.
        limit: How many there are.

    Raises:
        ValueError: With the first one whose sum is past it.
    """
    # Past the limit by one is as bad as past it by 2^62, and adds up without a wrap.
    ends = lens.long().clamp(max=limit + 1).cumsum(0)
    is_bad = ends > limit
    if bool(is_bad.any()):
        idx = int(is_bad.nonzero()[0, 0])
        before = int(ends[idx - 1]) if idx else 0
        raise ValueError(
            f"{name}[{idx}] is {int(lens[idx])} after a sum of {before}, but must leave the sum "
            f"<= {limit}, the number of elements of {limit_name}"
        )
    return int(ends[-1]) if ends.numel() else 0


def list_tokens(
    req_pool_indices: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the position of every token, one request after another, as int64."""
    lens = lens.long()
    req_idx = torch.arange(lens.numel(), device=lens.device).repeat_interleave(lens)
    first_token = (lens.cumsum(0) - lens)[req_idx]
    idx_in_req = torch.arange(req_idx.numel(), device=lens.device) - first_token
    return req_pool_indices[req_idx].long(), starts[req_idx].long() + idx_in_req


def validate_slots(
    name: str,
    dtype: torch.dtype,
    req_to_page: torch.Tensor,
    req_pool_indices: torch.Tensor,
    positions: torch.Tensor,
    page_size: int,
) -> None:
    """Refuse a slot that its destination can't hold.

    Args:
        name: The destination's name, for the message.
        dtype: The destination's.
        req_to_page: [req_pool_size + 1, max_pages], page ids.
        req_pool_indices: [num_tokens], row of each token; each in range.
        positions: [num_tokens], token index inside its request; none negative.
        page_size: Tokens per page.

    Raises:
        ValueError: With the first one and its place.
    """
    max_pages = req_to_page.shape[1]
    if dtype is not torch.int32 or max_pages == 0 or positions.numel() == 0:
        return
    positions = positions.long()
    page_idx = positions.div(page_size, rounding_mode="floor")
    page_ids = req_to_page[req_pool_indices.long(), page_idx.clamp(0, max_pages - 1)].long()
    has_page = (positions >= 0) & (page_idx < max_pages) & (page_ids >= 0)
    slots = torch.where(has_page, page_ids * page_size + positions % page_size, 0)
    validate_fits(name, slots, dtype)


def _check_vector(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.dim() != 1:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, but must have 1 dimension")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has stride {tensor.stride(0)}, but must be contiguous")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, but must be on {device}")


def _refuse_type(name: str, value: object, dtypes: str) -> NoReturn:
    if isinstance(value, torch.Tensor):
        found = str(value.dtype).removeprefix("torch.")
        raise TypeError(f"{name} has dtype {found}, but must have {dtypes}")
    raise TypeError(f"{name} is {_describe_object(value)}, but must be a tensor of {dtypes}")


def _refuse_first(name: str, values: torch.Tensor, is_bad: torch.Tensor, allowed: str) -> None:
    if bool(is_bad.any()):
        place = is_bad.nonzero()[0].tolist()
        where = "".join(f"[{idx}]" for idx in place)
        raise ValueError(f"{name}{where} is {int(values[tuple(place)])}, but must be {allowed}")


def _describe_object(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
