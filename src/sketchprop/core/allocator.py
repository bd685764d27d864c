"""Keeping memory pages on CPUs: an opt-in for Linux with the GNU C library.

Every training step asks for large buffers and gives them back. By default the C allocator takes
each large buffer fresh from the system, and the system fills fresh pages with zeros one by one
when they are first touched, which can take longer than the arithmetic on them. ``keep_pages``
tells the allocator to keep what it has. The process then holds on to its largest footprint.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_pages(top_pad: int = 256 << 20) -> bool:
    """Tells the C allocator to reuse its pages; returns ``True`` if that worked.

    Call it once, before the first large tensor is made. ``top_pad``: bytes to ask of the system
    at a time. It has the effect of starting Python with ``MALLOC_MMAP_MAX_=0``,
    ``MALLOC_TRIM_THRESHOLD_`` and ``MALLOC_TOP_PAD_`` in the environment. Without Linux and the GNU
    C library it does nothing and returns ``False``. Memory of accelerators stays as it is.

    >>> kept = keep_pages()
    """
    if not 0 <= top_pad < 1 << 31:
        raise ValueError(f"top_pad={top_pad!r}; give a number of bytes from 0 to 2**31 - 1")
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, top_pad))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
