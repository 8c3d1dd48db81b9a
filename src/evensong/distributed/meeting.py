"""Where the ranks of a replica find each other before they exchange anything: a word of the memory that they share.

The first rank has an anonymous file open, and says in that word where; the others open the same file by that. Nothing
has a name in a folder, so nothing can be left behind.
"""

from __future__ import annotations

import os
import time
import weakref

import numpy as np

from evensong.distributed.grid import Rank
from evensong.distributed.links import Bytes

_POLL_SECONDS = 0.002
_FD_BITS = 32


class Meeting:
    """`path`: a file that all ranks open, empty in the beginning. The first rank's object keeps it there.

    `memory` is the links' region for it. Raises TimeoutError where the first rank has not come in `timeout` seconds,
    OSError where its file cannot be opened.
    """

    def __init__(self, memory: Bytes, rank: Rank, timeout: float) -> None:
        word = memory[:8].view(np.uint64)
        if rank.index == 0:
            fd = os.memfd_create("evensong-meeting", os.MFD_CLOEXEC)
            self._closing = weakref.finalize(self, os.close, fd)
            # The word becomes visible whole, or not at all.
            word[0] = np.uint64((os.getpid() << _FD_BITS) | fd)
        ends = time.monotonic() + timeout
        while int(word[0]) == 0:
            if time.monotonic() > ends:
                raise TimeoutError(f"the first rank of the replica did not come within {timeout:.0f} s")
            time.sleep(_POLL_SECONDS)
        pid, fd = divmod(int(word[0]), 1 << _FD_BITS)
        self.path = f"/proc/{pid}/fd/{fd}"
        os.stat(self.path)
