"""Memory that stays with the process.

glibc gives large tensors back to the system as soon as they are freed, and asks for them again at the next step; the kernel
clears every page anew. In an unroll on a CPU that was half of the time.
"""

import ctypes
import platform
from functools import cache

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # of mallopt


@cache
def keep_pages() -> bool:
    """Has the allocator keep what is freed, for the rest of the process; whether it is one that can."""
    if platform.libc_ver()[0] != "glibc":
        return False
    settings = {MMAP_THRESHOLD: 2**30, TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 2**28}
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(name, value) for name, value in settings.items()])
