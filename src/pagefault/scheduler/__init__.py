"""A scheduler to live under: an engine's calls in an engine's order, against a model of its memory.

`check_scheduler` lets engines live on a target's functions. `Engine` is one that is right; a
subclass may do in its own way what an engine can get wrong.
"""

from .check import OrderFault, check_scheduler, live_again
from .engine import Engine, PagePool, Request, Shape
from .functions import Functions
from .model import COPY, INVARIANTS, RETURNS, Broken, Model
from .shorten import End

__all__ = [
    "COPY",
    "INVARIANTS",
    "RETURNS",
    "Broken",
    "End",
    "Engine",
    "Functions",
    "Model",
    "OrderFault",
    "PagePool",
    "Request",
    "Shape",
    "check_scheduler",
    "live_again",
]
