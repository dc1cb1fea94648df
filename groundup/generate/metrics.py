"""What serve.py counts: requests, tokens, samples, and the time to the first token."""

from collections import Counter

# Buckets of the time to the first token
TTFT_SECONDS = (
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
)


class Metrics:
    """What the server counts, in Prometheus's text format."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.tokens: Counter[str] = Counter()  # prompt | generated
        self.samples = 0  # that wait or are generated
        # Requests whose first token came within the bucket
        self.waits: list[int] = [0] * (len(TTFT_SECONDS) + 1)
        self.wait_s = 0.0

    def first_token(self, seconds: float) -> None:
        self.waits[next((i for i, most in enumerate(TTFT_SECONDS) if seconds <= most), -1)] += 1
        self.wait_s += seconds

    def text(self, running: int) -> str:
        """running: samples that the engines generate now; the others of `samples` wait."""
        lines = ["# TYPE groundup_requests_total counter"]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'groundup_requests_total{{path="{path}",status="{status}"}} {count}')
        for kind in ("prompt", "generated"):
            name = f"groundup_{kind}_tokens_total"
            lines += [f"# TYPE {name} counter", f"{name} {self.tokens[kind]}"]
        gauges = {"samples_running": running, "samples_waiting": max(0, self.samples - running)}
        for name, value in gauges.items():
            lines += [f"# TYPE groundup_{name} gauge", f"groundup_{name} {value}"]
        name, total = "groundup_time_to_first_token_seconds", 0
        lines.append(f"# TYPE {name} histogram")
        for most, count in zip((*TTFT_SECONDS, "+Inf"), self.waits, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{most}"}} {total}')
        return "\n".join([*lines, f"{name}_sum {self.wait_s:.6f}", f"{name}_count {total}", ""])
