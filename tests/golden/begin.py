"""python tests/golden/begin.py N SCRIPT FLAGS...: run a trainer, and end it soon after step N.

These steps have the learning rates of the whole run, as --max_steps=N would not.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from groundup.train.log import RunLog  # noqa: E402 (found by the path)

n_steps, script = int(sys.argv[1]), sys.argv[2]
advance = RunLog.advance


def stop_at_the_last(log: RunLog) -> None:
    advance(log)
    if log.step == n_steps:
        os.kill(os.getpid(), signal.SIGTERM)


RunLog.advance = stop_at_the_last
sys.argv = sys.argv[2:]
try:
    runpy.run_path(str(ROOT / script), run_name="__main__")
except SystemExit as end:
    assert end.code == 128 + signal.SIGTERM, end.code
