"""What holds for all tests."""

import functools
import gc
import importlib.metadata
import os
import runpy
import signal

import forks
import pytest

from groundup.demo import debug_data

# float32 products on a GPU are exact, in what the tests start too: they are compared with a CPU's.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")

# What is on the disk matters when the machine stops, which no test does; a check that the file is open remains.
os.fsync = lambda fd: os.fstat(fd) and None
# Each run writes down the versions of seven packages, and reads their descriptions for it.
importlib.metadata.version = functools.cache(importlib.metadata.version)

# Hundreds of runs compile and parse the same few scripts.
compile_script = runpy._get_code_from_file
compiled_at = functools.cache(lambda changed, *args: compile_script(*args))
runpy._get_code_from_file = lambda *args: compiled_at(os.stat(args[-1]).st_mtime_ns, *args)

forks.spawn_forks()
debug_data.subprocess = forks  # prepare.py makes the debug data for each folder

gc.disable()  # until all files are imported: that leaves no garbage

# A shell starts what it runs in the background with Ctrl-C ignored, and what the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = "rl ddp_step pretrain_ranks golden sft pretrain engine ddp stopping prepare powersgd dpo saver sample "
LONGEST += "interop readme reward startup fsdp plan python_talks tokenizer bench repo curves cross_entropy templates"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first: workers take whole files, and the last one should not keep a core idle."""
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # each full collection would walk through all that was imported
