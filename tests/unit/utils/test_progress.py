"""The progress page: what one process writes, another reads."""

from __future__ import annotations

import os
import subprocess
import sys

from evensong.utils.progress import CoreState, ProgressPage, make_page

WRITER = """
import sys
from evensong.utils.progress import CoreState, ProgressPage
page = ProgressPage(int(sys.argv[1]))
for _ in range(3):
    page.tick()
page.step_done()
page.set_state(CoreState.ASLEEP)
"""


def test_a_child_writes_and_the_parent_reads() -> None:
    fd = make_page()
    page = ProgressPage(fd)
    assert (page.num_steps, page.state) == (0, CoreState.OPEN)
    subprocess.run([sys.executable, "-c", WRITER, str(fd)], pass_fds=(fd,), check=True, timeout=60)
    assert (page.num_steps, page.state) == (1, CoreState.ASLEEP) and page.seconds_still < 60
    page.close()
    page.close()
    os.close(fd)


def test_a_page_of_its_own() -> None:
    one, other = ProgressPage(), ProgressPage()
    one.step_done()
    assert (one.num_steps, other.num_steps) == (1, 0)
    one.close()
    other.close()
