"""What holds for all tests."""

import gc
import os
import signal

import forks
import pytest

# float32 products on a GPU are exact, in what the tests start too: they are compared with a CPU's.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")

# What is on the disk matters when the machine stops, which no test does; a check that the file is open remains.
os.fsync = lambda fd: os.fstat(fd) and None
# A saver's thread of low priority would wait for seconds beside another worker's tests.
os.setpriority = lambda *_: None

forks.spawn_forks()

gc.disable()  # until all files are imported: that leaves no garbage

# A shell starts what it runs in the background with Ctrl-C ignored, and what the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = "pretrain_ranks rl golden ddp_step pretrain plan readme sft stopping ddp prepare bench saver powersgd dpo "
LONGEST += "fsdp gpu_check reward engine tokenizer sample startup checkpoint curves self_instruct interop"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first: workers take whole files, and the last one should not keep a core idle."""
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # each full collection would walk through all that was imported
