"""Ctrl-C and SIGTERM end a run after the step at hand, with a checkpoint."""

import signal
import time


class StopSignal:
    """Turns SIGTERM and Ctrl-C into a flag that the loop reads after each step; a second Ctrl-C stops at once, or
    when the checkpoint that is being written is whole.

    torchrun passes a terminal's Ctrl-C on a second time within moments, so a repeat counts only after two seconds.
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
        """128 + the signal's number, as a shell reports it; 143 for a signal that only another rank received."""
        return 128 + (self.received or signal.SIGTERM)


