"""Ctrl-C and SIGTERM end a run after the step at hand, with a checkpoint; before the first step at once."""

import signal
import time

from groundup.errors import Stopped


class StopSignal:
    """Turn SIGTERM and Ctrl-C into a flag that the loop reads after each step. A second Ctrl-C stops at once, or after
    the checkpoint that is being written; so does the first signal until `begin` is called.

    torchrun repeats a terminal's Ctrl-C at once, so a second one counts only after two seconds.
    """

    def __init__(self) -> None:
        self.received, self.at, self.begun = 0, 0.0, False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def begin(self) -> None:
        """Call before the first step: from here on a signal waits for a step to end."""
        self.begun = True

    def _handle(self, number: int, frame: object) -> None:
        if not self.begun:
            raise Stopped(number)
        if number == signal.SIGINT and self.received and time.monotonic() - self.at > 2:
            raise KeyboardInterrupt
        if not self.received:
            self.received, self.at = number, time.monotonic()

    @property
    def exit_code(self) -> int:
        """Return 128 + the signal's number, as a shell does; 143 if only another rank received the signal."""
        return 128 + (self.received or signal.SIGTERM)
