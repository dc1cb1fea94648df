"""Bounds of uvicorn's connections: clients that send nothing, half a head, or do not read."""

import asyncio

HEAD_S = 10  # for the head of a connection's first request
KEEP_S = (
    30  # of an idle connection: clients that drop it after 5, as httpx does, never meet its end
)
STALL_S = 60  # of a client that does not read what is sent to it


def bounded_protocol(most: int) -> type:
    """Return a protocol for uvicorn that keeps at most `most` connections without a request.

    When one more comes, the oldest of them is closed: a client that sends its request at once is
    answered, however many others are silent."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    waiting: dict[H11Protocol, asyncio.TimerHandle] = {}  # without a request, the oldest first

    class BoundedProtocol(H11Protocol):
        stalled: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.expect_request(HEAD_S)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self.stop_waiting()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete:  # no other request has come already
                self.expect_request(KEEP_S)

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop_waiting()
            self.resume_writing()
            super().connection_lost(exc)

        def expect_request(self, seconds: float) -> None:
            self.stop_waiting()
            waiting[self] = self.loop.call_later(seconds, self.transport.abort)
            if len(waiting) > most:
                oldest = next(iter(waiting))
                oldest.stop_waiting()  # at once: many may come before it is closed
                oldest.transport.abort()

        def stop_waiting(self) -> None:
            if timer := waiting.pop(self, None):
                timer.cancel()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.stalled = self.loop.call_later(STALL_S, self.transport.abort)

        def resume_writing(self) -> None:
            if self.stalled:
                self.stalled.cancel()
                self.stalled = None
            super().resume_writing()

    return BoundedProtocol
