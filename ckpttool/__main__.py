"""``python -m ckpttool`` and the console script: Ctrl-C ends them without a traceback, whenever it
comes.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def process() -> int:
    """Run the command line of this process and return its exit status."""
    # ignored, as in the background of a shell
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        from ckpttool.cli.app import process as run

        return run()
    try:
        signal.signal(signal.SIGINT, _end)  # nothing is begun while the program is imported
        from ckpttool.cli.app import process as run

        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = run()
        signal.signal(signal.SIGINT, _end)
    except KeyboardInterrupt:
        _end(signal.SIGINT, None)
    return status


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(process())
