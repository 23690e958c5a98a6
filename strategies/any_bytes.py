"""Legal cases whose device tensors hold garbage."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from hypothesis import strategies as st

from pagefault.case import DTYPE_RANGES, Case, PageTable
from pagefault.family import Domain, Family, Tensor
from pagefault.garbage import Garbage, is_refused

from .edges import INT32_MAX, Choices

NUM_BYTES = 64

HOW_MUCH = ("one element", "one element", "few elements", "one tensor", "everything")

# A large table is spoilt in a few places.
MOST_CELLS = 64

# Of garbage, few pages of so many tokens are more than 32 bits hold.
LARGE_PAGE_SIZES = (INT32_MAX, 2**30, 2**20)


def garbage_of(family: Family, domain: Domain) -> st.SearchStrategy[Garbage]:
    """Strategy of a family's legal cases that need no refusal, each with some garbage."""

    def spoil(case: Case, drawn: bytes) -> Garbage:
        choices = Choices(drawn)
        tensors = [
            argument
            for argument in family.arguments(case)
            if isinstance(argument, Tensor) and argument.values is not None
        ]
        sizes = {size for tensor in tensors for size in tensor.shape} | _numbers_of(case)
        return Garbage(case, tuple(_garbage(choices, case, tensors, sorted(sizes))))

    cases = family.strategy(domain)
    if domain.page_sizes is None:
        cases |= family.strategy(replace(domain, page_sizes=LARGE_PAGE_SIZES))
    cases = cases.filter(lambda case: not is_refused(family, case))
    return st.builds(spoil, cases, st.binary(min_size=NUM_BYTES, max_size=NUM_BYTES))


# Of an index, the first that is none is the size itself: an off-by-one there shows nowhere else.
KINDS = ("near", "near", "size", "size", "multiple", "multiple", "extreme", "extreme", "bits")


@dataclass(frozen=True)
class Spoil:
    """What an element holds instead, before it is known which element it is."""

    kind: str
    which: int
    bits: int

    @classmethod
    def of(cls, choices: Choices) -> "Spoil":
        kind = choices.pick(KINDS)
        bits = [choices.below(256) for _ in range(8)] if kind == "bits" else [0]
        return cls(kind, choices.below(2**8), int.from_bytes(bytes(bits), "little", signed=True))

    def value(self, was: int, dtype: str, sizes: Sequence[int]) -> int:
        """Return the garbage.

        Args:
            was: What the element held.
            dtype: What its tensor can hold.
            sizes: Of all tensors of the call, and its plain numbers: what indices and sums come up
                against.
        """
        legal = DTYPE_RANGES[dtype]
        least, largest = legal[0], legal[-1]
        menu = {
            "near": (was - 1, was + 1, -was, was - 2, was + 2, was - 2**32, was + 2**32),
            "size": tuple(size - beside for size in sizes for beside in (0, 0, 1)),
            "multiple": tuple(
                times * size + beside
                for times in (1, -1, 2, -2)
                for size in sizes
                for beside in (0, -1, 1)
            ),
            "extreme": (-1, 0, 1, least, largest, least + 1, largest - 1, -(2**31), 2**31 - 1),
            "bits": (self.bits, self.bits >> 32, self.bits >> 48, self.bits >> 56),
        }[self.kind]
        value = menu[self.which % len(menu)]
        return (value - least) % (largest - least + 1) + least


def _garbage(
    choices: Choices, case: Case, tensors: Sequence[Tensor], sizes: Sequence[int]
) -> Iterator[tuple[str, int, int]]:
    """Yield (tensor, flat index, value) of the elements that are spoilt."""
    spoilable = [tensor for tensor in tensors if _num_elements(tensor)]
    how_much = choices.pick(HOW_MUCH)
    if not spoilable:
        return
    chosen = spoilable if how_much == "everything" else [choices.pick(spoilable)]
    spoils = [Spoil.of(choices) for _ in range(1 if how_much == "one element" else 4)]
    for tensor in chosen:
        num_elements = _num_elements(tensor)
        dtype = case.placement(tensor.name).dtype
        indices: Sequence[int] = range(num_elements)
        is_large = isinstance(tensor.values, PageTable) and num_elements > MOST_CELLS
        if is_large or "element" in how_much:
            indices = [choices.below(2**16) % num_elements for _ in spoils]
        for i, idx in enumerate(dict.fromkeys(indices)):
            was = _element(tensor, idx)
            yield tensor.name, idx, spoils[i % len(spoils)].value(was, dtype, sizes)


def _numbers_of(case: Case) -> set[int]:
    """Return the plain numbers of a case, such as its page size."""
    values = [getattr(case, field.name) for field in fields(case)]
    return {value for value in values if isinstance(value, int)}


def _num_elements(tensor: Tensor) -> int:
    num_rows, *rest = tensor.shape
    return num_rows * (rest[0] if rest else 1)


def _element(tensor: Tensor, idx: int) -> int:
    values = tensor.values
    assert values is not None
    if isinstance(values, PageTable):
        return values.page_id(*divmod(idx, values.max_pages))
    return values[idx]
