"""Ctrl-C and SIGTERM end a run after the step at hand, with a checkpoint."""

import signal
import time


class StopSignal:
    """Turn SIGTERM and Ctrl-C into a flag that the loop reads after each step. A second Ctrl-C stops at once, or after
    the checkpoint that is being written.

    torchrun repeats a terminal's Ctrl-C at once, so a second one counts only after two seconds.
    """

    def __init__(self) -> None:
        self.received, self.at = 0, 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.received and time.monotonic() - self.at > 2:
            raise KeyboardInterrupt
        if not self.received:
            self.received, self.at = number, time.monotonic()

    @property
    def exit_code(self) -> int:
        """Return 128 + the signal's number, as a shell does; 143 if only another rank received the signal."""
        return 128 + (self.received or signal.SIGTERM)
