"""One progress helper: a bar while a person watches, one line at the end in a batch.

Also the one place that decides whether a person watches. Bars and widgets leave dead output behind when a notebook
is executed by papermill, so the batch runner sets SPECDEC_WORKBOOK_BATCH=1.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

BATCH_VARIABLE = "SPECDEC_WORKBOOK_BATCH"
T = TypeVar("T")


def is_watched() -> bool:
    """True where a person can see a bar move: a notebook kernel or a terminal, unless the runner said it is a batch."""
    said = os.environ.get(BATCH_VARIABLE, "").strip()
    if said:
        return said == "0"
    return in_kernel() or sys.stderr.isatty()


def in_kernel() -> bool:
    """True inside a Jupyter kernel (which does not tell whether anybody looks at it)."""
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    return hasattr(get_ipython(), "kernel")


def track(
    items: Iterable[T], what: str, *, total: int | None = None, say: Callable[[str], None] | None = None
) -> Iterator[T]:
    """Yield `items` and report: a bar named `what`, or the line `what: 8 in 3.2 s` when they are exhausted.

    The line goes through `say`, by default to stderr in a program and to the output of the cell in a kernel.
    """
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # type: ignore[arg-type]
    if is_watched():
        from tqdm.auto import tqdm

        yield from tqdm(items, desc=what, total=total, leave=False)
        return
    start, count = time.perf_counter(), 0
    for item in items:
        yield item
        count += 1
    line = f"{what}: {count} in {time.perf_counter() - start:.1f} s"
    if say is not None:
        say(line)
    else:
        print(line, file=sys.stdout if in_kernel() else sys.stderr)
