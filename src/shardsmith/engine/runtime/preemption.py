"""SIGTERM as a request: the job is to end soon, and cleanly (a scheduler takes the machine back)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from shardsmith.engine.runtime import failures


@contextmanager
def noticed(request: Callable[[], None]) -> Iterator[None]:
    """While inside, SIGTERM calls `request` instead of ending this process, once and again.

    The handler runs between two Python instructions of the main thread: one that waits in a collective
    notices when that ends, as it does within the timeout. Elsewhere than in the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        request()

    before = failures.handle(signal.SIGTERM, handler)
    try:
        yield
    finally:
        failures.handle(signal.SIGTERM, before)
