"""tools/gpu_check.py without a GPU: its figures and files, and sections that fail or take too long."""

import re
import time

import forks
import gpu_check
import machine
import pytest
from gpu_check import Command

from configurator import defaults_of
from groundup.errors import UserError

SETTINGS = defaults_of(gpu_check.ROOT / "tools/gpu_check.py")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    forks.server()  # it is started with the Popen that is replaced now
    monkeypatch.setattr(machine.subprocess, "Popen", forks.Popen)
    monkeypatch.setattr(gpu_check.timing, "matmul", lambda device, dtype: lambda: 1e9)  # bfloat16 takes a CPU seconds


@pytest.mark.slow
@pytest.mark.parametrize("part", gpu_check.PARTS)
def test_without_a_gpu_each_part_runs_whole_on_tiny_shapes(tmp_path, capsys, part: str):
    assert gpu_check.main(SETTINGS | {"out_dir": str(tmp_path), "sections": part}) == 0
    said = (tmp_path / f"{part}.md").read_text("utf-8")
    assert "There is no GPU" in said and said in capsys.readouterr().out and "failed:" not in said
    assert re.findall("^## (.*)$", said, re.MULTILINE) == list(gpu_check.PARTS[part])
    if part == "first":
        assert len(re.findall("^memory .* GiB", said, re.MULTILINE)) == 2  # adamw and muon
        assert len(re.findall(r"^step +3/3 .* tok/s", said, re.MULTILINE)) == 2
        assert len(re.findall("^generate .* tok/s", said, re.MULTILINE)) == 4
    else:
        straight, resumed = (re.search(rf"^{name}: (.*)$", said, re.MULTILINE) for name in ("straight", "resumed"))
        assert straight[1] == resumed[1] and straight[1].count(",") == 3
        assert len(re.findall(r"^step +2/2 \| loss", said, re.MULTILINE)) == 3  # sft, dpo, rl
    assert [path.name for path in tmp_path.iterdir()] == [f"{part}.md"]


def test_a_section_that_fails_is_written_down_and_the_next_one_begins(tmp_path, monkeypatch):
    fails = [Command(["-c", "print('why'); raise SystemExit(3)"]), Command(["-c", "print('goes on')"])]
    monkeypatch.setattr(gpu_check, "tests", lambda setup: fails)
    slow = "import time; print('slow', flush=True); time.sleep(60)"
    monkeypatch.setattr(gpu_check, "decode", lambda setup: [Command(["-c", slow])])
    monkeypatch.setitem(gpu_check.LIMIT_S, "decode", 2)
    begin = time.monotonic()
    assert gpu_check.main(SETTINGS | {"out_dir": str(tmp_path), "sections": "tests,decode,machine"}) == 0
    assert time.monotonic() - begin < 30
    _, tests, decode, machine = (tmp_path / "gpu_check.md").read_text("utf-8").split("\n## ")
    assert "exit status 3\nwhy" in tests and "\ngoes on\n" in tests
    assert re.search("no end after [12] s\nslow", decode)
    assert "reading memory" in machine and "failed" not in machine
    assert all(sum(part.values()) <= 300 for part in gpu_check.PARTS.values())
    with pytest.raises(UserError, match="sections='nonsense' is none of first, second, machine"):
        gpu_check.main(SETTINGS | {"out_dir": str(tmp_path), "sections": "nonsense"})


def test_runs_of_others_in_out_dir_are_left_alone(tmp_path, monkeypatch):
    """--out_dir=out may hold a run that is called runs."""
    monkeypatch.setattr(gpu_check, "run_section", lambda *_: True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "log.jsonl").write_text("{}", encoding="utf-8")
    gpu_check.main(SETTINGS | {"out_dir": str(tmp_path), "sections": "machine"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu_check.md", "runs"]
    assert (tmp_path / "runs" / "log.jsonl").exists()
    with pytest.raises(UserError, match="out_dir"):
        gpu_check.main(SETTINGS | {"out_dir": "", "sections": "machine"})
