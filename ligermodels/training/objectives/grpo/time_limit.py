"""A time limit for code of others that runs in the main thread. Must not know what it runs."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeLimitExceeded(BaseException):
    """Not an Exception, so that an `except Exception` in the code that is stopped does not hold it back."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeLimitExceeded in the block after this time, also where it sleeps or waits for a network.

    It uses SIGUSR2, and leaves SIGALRM to the code of others, which uses it for limits of its own. Python runs signal
    handlers in the main thread alone: in any other thread there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: FrameType | None) -> None:
        raise TimeLimitExceeded

    before = signal.signal(signal.SIGUSR2, expire)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR2, before)
