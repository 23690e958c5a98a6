"""Cases of `fused_decode_input_prep`."""

from dataclasses import dataclass
from typing import ClassVar

from hypothesis import strategies as st

from pagefault.case import Case, CaseError, PageTable, PerRequest, Placement
from pagefault.family import Domain

from .batches import (
    Roles,
    check_fits,
    check_not_negative,
    check_page_ids,
    check_rows,
    check_slots,
    make_batch,
)
from .edges import Choices, made_from_choices
from .layouts import widened


@dataclass(frozen=True)
class FusedDecodeCase(Case):
    """A decode step: `uniform_input_length` new tokens of each request.

    Attributes:
        valid_cache_lengths: [num_rows], cached tokens per request pool index.
    """

    PLAIN: ClassVar = {
        "out_cache_loc": Placement(),
        "positions": Placement(),
        "seq_lens_out": Placement(),
        "req_pool_indices": Placement("int64"),
        "valid_cache_lengths": Placement(),
        "req_to_pages": Placement(),
    }

    req_pool_indices: PerRequest
    valid_cache_lengths: tuple[int, ...]
    uniform_input_length: int
    req_to_pages: PageTable
    page_size: int

    def check(self) -> None:
        check_rows(self.req_pool_indices, self.req_to_pages.num_rows)
        check_page_ids(self, "req_to_pages")
        if len(self.valid_cache_lengths) != self.req_to_pages.num_rows:
            raise CaseError(
                f"valid_cache_lengths has {len(self.valid_cache_lengths)} entries, but should "
                f"have one for each of the table's {self.req_to_pages.num_rows} rows"
            )
        check_not_negative("uniform_input_length", [self.uniform_input_length])
        for name in ("req_pool_indices", "valid_cache_lengths"):
            check_not_negative(name, getattr(self, name))
            check_fits(name, self.placement(name).dtype, getattr(self, name))
        ends = [start + self.uniform_input_length for start in self.starts]
        check_fits("seq_lens_out", self.placement("seq_lens_out").dtype, ends)
        if self.uniform_input_length:
            last_positions = [end - 1 for end in ends]
            check_fits("positions", self.placement("positions").dtype, last_positions)
        dtype = self.placement("out_cache_loc").dtype
        check_slots("out_cache_loc", dtype, self.req_to_pages, self.page_size)

    @property
    def starts(self) -> list[int]:
        """[num_requests], position of each request's first new token."""
        return [self.valid_cache_lengths[row] for row in self.req_pool_indices]


def fused_decode_cases(domain: Domain) -> st.SearchStrategy[FusedDecodeCase]:
    """Strategy of cases of `fused_decode_input_prep`."""
    roles = Roles(
        "out_cache_loc",
        "req_to_pages",
        ("valid_cache_lengths",),
        ends=("positions", "seq_lens_out"),
        uniform=True,
    )

    def make(choices: Choices) -> FusedDecodeCase:
        batch = make_batch(choices, domain, FusedDecodeCase.PLAIN, roles)
        # Rows that nobody uses have a length of their own, which a wrong index brings to light.
        lengths = [1 + 13 * row % 97 for row in range(batch.table.num_rows)]
        for row, start in zip(batch.rows, batch.starts):
            lengths[row] = start
        case = FusedDecodeCase(
            batch.rows,
            tuple(lengths),
            batch.lengths[0] if batch.lengths else choices.below(3),
            batch.table,
            batch.page_size,
            layout=batch.layout,
        )
        return widened(choices, domain, case, "req_to_pages", "valid_cache_lengths")

    return made_from_choices(make)
