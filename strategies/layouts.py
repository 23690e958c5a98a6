"""How the tensors of a case lie in memory."""

from collections.abc import Mapping, Sequence
from functools import cache

from pagefault.case import Placement
from pagefault.family import Domain

from .edges import Choices

OTHER_DTYPE = {"int32": "int64", "int64": "int32"}


def dtypes(
    choices: Choices, names: Sequence[str], domain: Domain, fixed: frozenset[str]
) -> frozenset[str]:
    """Return which tensors have the dtype that production does not give them.

    Half of the draws are production's dtypes; the others change one, any, or all.

    Args:
        choices: Where choices come from.
        names: Tensors that may be int32 or int64.
        domain: Its `dtype_choices`, where it has any, are numbers whose bits say which change.
        fixed: Tensors that must keep production's.
    """
    if domain.dtype_choices is not None:
        bits = choices.pick(domain.dtype_choices) % 2 ** len(names)
    else:
        how = choices.below(6)
        any_bits = choices.below(2 ** len(names))
        bits = (0, 0, 0, 1 << any_bits % len(names), any_bits, 2 ** len(names) - 1)[how]
    return frozenset(name for i, name in enumerate(names) if bits >> i & 1 and name not in fixed)


def layout(
    choices: Choices,
    plain: Mapping[str, Placement],
    changed: frozenset[str],
    outputs: Sequence[str],
    table: str,
    domain: Domain,
) -> tuple[tuple[str, Placement], ...]:
    """Return placements: half of the draws are plain but for the dtypes.

    Args:
        choices: Where choices come from.
        plain: Production's placements, by tensor.
        changed: Tensors of the other dtype.
        outputs: Tensors that may have spare elements.
        table: The page table, which may be pitched.
        domain: Its `without` may name "offset", "spare output" and "pitched table".
    """
    fancy = choices.one_in(2)
    placements = []
    for name, placement in plain.items():
        dtype = OTHER_DTYPE[placement.dtype] if name in changed else placement.dtype
        offset = pitch = spare = 0
        if fancy and "offset" not in domain.without:
            offset = choices.pick((0, 0, 1, 2, 3))
        if fancy and name in outputs and "spare output" not in domain.without:
            spare = choices.pick((0, 1, 5, 300))
        if fancy and name == table and "pitched table" not in domain.without:
            pitch = choices.pick((0, 1, 2, 14))
        placements.append((name, _placement(dtype, offset, pitch, spare)))
    return tuple(placements)


_placement = cache(Placement)
