"""tools/gpu_check.py without a GPU: its figures and files, and sections that fail or take too long."""

import json
import time

import forks
import gpu_check
import machine
import pytest
from gpu_check import Check

from configurator import defaults_of
from groundup.errors import UserError

SETTINGS = defaults_of(gpu_check.ROOT / "tools/gpu_check.py")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.subprocess, "Popen", forks.Popen)
    monkeypatch.setattr(gpu_check.timing, "matmul", lambda device, dtype: lambda: 1e9)  # bfloat16 takes a CPU seconds


@pytest.mark.slow
@pytest.mark.parametrize("part", gpu_check.PARTS)
def test_without_a_gpu_each_part_runs_whole_on_tiny_shapes(tmp_path, capsys, part: str):
    assert gpu_check.main(SETTINGS | {"out_dir": str(tmp_path), "sections": part}) == 0
    said, found = (tmp_path / f"{part}.md").read_text("utf-8"), json.loads((tmp_path / f"{part}.json").read_text())
    last = f"## {list(gpu_check.PARTS[part])[-1]}"
    assert "There is no GPU" in said and last in said and last in capsys.readouterr().out
    assert [section["name"] for section in found] == list(gpu_check.PARTS[part])
    assert not [section["failed"] for section in found if section["failed"]]
    if part == "first":
        figures = {row["optimizer"]: row for row in found[2]["figures"]}
        assert set(figures) == {"adamw", "muon"} and float(figures["muon"]["GiB planned"]) > 0
    assert not (tmp_path / "runs").exists()


def test_a_section_that_fails_is_written_down_and_the_next_one_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(Check, "tests", lambda self: self.run("-c", "print('why'); raise SystemExit(3)"))
    slow = "import time; print('slow', flush=True); time.sleep(60)"
    monkeypatch.setattr(Check, "decode", lambda self: self.run("-c", slow))
    monkeypatch.setitem(gpu_check.LIMIT_S, "decode", 2)
    begin = time.monotonic()
    assert gpu_check.main(SETTINGS | {"out_dir": str(tmp_path), "sections": "tests,decode,machine"}) == 0
    assert time.monotonic() - begin < 30
    tests, decode, machine = json.loads((tmp_path / "gpu_check.json").read_text())
    assert "exit status 3\nwhy" in tests["failed"] and "no end after 2 s\nslow" in decode["failed"]
    assert machine["figures"] and not machine["failed"]
    assert all(sum(part.values()) <= 300 for part in gpu_check.PARTS.values())
    with pytest.raises(UserError, match="sections='nonsense' is none of first, second, machine"):
        gpu_check.main(SETTINGS | {"out_dir": str(tmp_path), "sections": "nonsense"})
