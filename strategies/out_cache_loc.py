"""Cases of `compute_out_cache_loc` and its uniform form."""

from dataclasses import dataclass
from typing import ClassVar

from hypothesis import strategies as st

from pagefault.case import Case, PageTable, PerRequest, Placement
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
class OutCacheLocCase(Case):
    """A batch of new tokens: `input_lengths[i]` of them from `cache_start[i]` on."""

    PLAIN: ClassVar = {
        "out_cache_loc": Placement(),
        "req_pool_indices": Placement("int64"),
        "input_lengths": Placement(),
        "cache_start": Placement(),
        "req_to_pages": Placement(),
    }

    req_pool_indices: PerRequest
    input_lengths: PerRequest
    cache_start: PerRequest
    req_to_pages: PageTable
    page_size: int

    def check(self) -> None:
        check_rows(self.req_pool_indices, self.req_to_pages.num_rows)
        check_page_ids(self, "req_to_pages")
        for name in ("req_pool_indices", "input_lengths", "cache_start"):
            check_not_negative(name, getattr(self, name))
            check_fits(name, self.placement(name).dtype, getattr(self, name))
        dtype = self.placement("out_cache_loc").dtype
        check_slots("out_cache_loc", dtype, self.req_to_pages, self.page_size)


@dataclass(frozen=True)
class UniformOutCacheLocCase(Case):
    """A batch whose requests all have `uniform_input_length` new tokens."""

    PLAIN: ClassVar = {
        name: placement
        for name, placement in OutCacheLocCase.PLAIN.items()
        if name != "input_lengths"
    }

    req_pool_indices: PerRequest
    uniform_input_length: int
    cache_start: PerRequest
    req_to_pages: PageTable
    page_size: int

    def check(self) -> None:
        check_rows(self.req_pool_indices, self.req_to_pages.num_rows)
        check_page_ids(self, "req_to_pages")
        check_not_negative("uniform_input_length", [self.uniform_input_length])
        for name in ("req_pool_indices", "cache_start"):
            check_not_negative(name, getattr(self, name))
            check_fits(name, self.placement(name).dtype, getattr(self, name))
        dtype = self.placement("out_cache_loc").dtype
        check_slots("out_cache_loc", dtype, self.req_to_pages, self.page_size)


def out_cache_loc_cases(domain: Domain) -> st.SearchStrategy[OutCacheLocCase]:
    """Strategy of cases of `compute_out_cache_loc`."""
    roles = Roles("out_cache_loc", "req_to_pages", ("cache_start",))

    def make(choices: Choices) -> OutCacheLocCase:
        batch = make_batch(choices, domain, OutCacheLocCase.PLAIN, roles)
        case = OutCacheLocCase(
            batch.rows,
            batch.lengths,
            batch.starts,
            batch.table,
            batch.page_size,
            layout=batch.layout,
        )
        return widened(choices, domain, case, "req_to_pages")

    return made_from_choices(make)


def uniform_out_cache_loc_cases(domain: Domain) -> st.SearchStrategy[UniformOutCacheLocCase]:
    """Strategy of cases of `compute_out_cache_loc_uniform`."""
    roles = Roles("out_cache_loc", "req_to_pages", ("cache_start",), uniform=True)

    def make(choices: Choices) -> UniformOutCacheLocCase:
        batch = make_batch(choices, domain, UniformOutCacheLocCase.PLAIN, roles)
        case = UniformOutCacheLocCase(
            batch.rows,
            batch.lengths[0] if batch.lengths else choices.below(3),
            batch.starts,
            batch.table,
            batch.page_size,
            layout=batch.layout,
        )
        return widened(choices, domain, case, "req_to_pages")

    return made_from_choices(make)
