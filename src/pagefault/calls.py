"""Plain calls of a target: a case goes in, and what the function wrote and returned comes out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from . import interpreter
from .case import Case
from .family import Family, HostTensor, Plain, Tensor, family_named
from .memory import TORCH_DTYPES
from .target import Target

# What an output holds before the call.
UNWRITTEN = -7


class Excluded(Exception):
    """A case that the target can't do, or that a known fault of it may show in."""


class Calls:
    """Calls functions of a target on tensors that lie as a case says.

    Args:
        target: The functions.
        device: "cpu" or "cuda".
    """

    def __init__(self, target: Target, device: str) -> None:
        self._target = target
        self._device = device
        if device == "cpu":
            interpreter.tune()

    def case_of(
        self, function: str, fields: Mapping[str, Any], like: Case, renamed: Mapping[str, str]
    ) -> Case:
        """Return a case of one function that is about the same tensors as one of another.

        Args:
            function: Its name.
            fields: The fields of its case.
            like: The case whose placements it takes over.
            renamed: New names of tensors, by their names in that case.

        Raises:
            CaseError: It lies outside the domain.
        """
        type_ = family_named(function).case_type
        layout = {renamed.get(name, name): like.placement(name) for name in like.PLAIN}
        kept = tuple((name, at) for name, at in layout.items() if name in type_.PLAIN)
        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return type_(**values, layout=kept)

    def call(self, function: str, case: Case) -> None:
        """Call a function on the tensors of a case; nobody looks at what comes of it."""
        values = self._values(family_named(function), case, {})
        with _without_warnings():
            self._target.functions[function](*values)

    def answer(self, function: str, case: Case) -> dict[str, Any]:
        """Return all device tensors after a call, and what was returned by its path.

        Tensors come as lists; an output without its spare elements.

        Raises:
            Excluded: The target can't do the case, or has a known fault there.
        """
        family = family_named(function)
        faults = [fault for fault in self._target.known_faults if fault.family == function]
        if not self._target.allows(family, case) or any(f.applies(case) for f in faults):
            raise Excluded
        tensors: dict[str, torch.Tensor] = {}
        values = self._values(family, case, tensors)
        with _without_warnings():
            result = self._target.functions[function](*values)
        returned = {} if result is None else family.returned(result)
        return {
            **{name: tensor.tolist() for name, tensor in tensors.items()},
            **{
                path: value.tolist() if isinstance(value, torch.Tensor) else value
                for path, value in returned.items()
            },
        }

    def _values(self, family: Family, case: Case, tensors: dict[str, torch.Tensor]) -> list[Any]:
        """Return the call's arguments; device tensors are remembered by name."""
        values: list[Any] = []
        for argument in family.arguments(case):
            if isinstance(argument, Plain):
                values.append(argument.make(self._device))
            elif isinstance(argument, HostTensor):
                dtype = TORCH_DTYPES[case.placement(argument.name).dtype]
                values.append(torch.tensor(argument.values, dtype=dtype))
            else:
                tensor = self._placed(argument, case)
                values.append(tensor)
                num_needed = argument.shape[0]
                tensors[argument.name] = tensor[:num_needed]
        return values

    def _placed(self, argument: Tensor, case: Case) -> torch.Tensor:
        at = case.placement(argument.name)
        num_rows, *rest = argument.shape
        num_columns = rest[0] if rest else 1
        row_stride = num_columns + at.pitch if rest else 1
        num_rows += at.spare if argument.values is None else 0
        storage = torch.full(
            (at.offset + num_rows * row_stride,), UNWRITTEN, dtype=TORCH_DTYPES[at.dtype]
        ).to(self._device)
        shape = (num_rows, *rest)
        tensor = storage.as_strided(shape, (row_stride, 1) if rest else (1,), at.offset)
        values: Any = argument.values
        if values is not None and tensor.numel():
            rows = [list(row) for row in values.rows] if rest else list(values)
            tensor.copy_(torch.tensor(rows, dtype=tensor.dtype))
        return tensor


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep the log silent: a clamp is warned of in every one of many calls."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
