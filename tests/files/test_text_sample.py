"""tokenizer.py reads a sample of all files."""

import json
from pathlib import Path

from groundup.files import readers, text_sample
from groundup.files.text_mix import parts_of


def test_all_files_are_sampled_in_proportion(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "en").mkdir()
    (tmp_path / "zh").mkdir()
    sizes = {"en/a.txt": 800_000, "en/b.jsonl": 400_000, "zh/c.txt": 400_000, "zh/d.txt": 200_000}
    for name, size in sizes.items():
        mark = name[3]
        line = json.dumps({"text": mark * 99}) + "\n" if "json" in name else mark * 99 + "\n"
        (tmp_path / name).write_text(line * (size // len(line)), "utf-8")
    cut = readers.work_units
    monkeypatch.setattr(readers, "work_units", lambda path: cut(path, unit_bytes=100_000))
    parts = parts_of(f"{tmp_path}/en,{tmp_path}/zh")
    found = "".join(text_sample.sampled_texts(parts, "", 1))
    share = 1_000_000 / sum(sizes.values())
    for name, size in sizes.items():
        n = found.count(name[3])
        assert 0.9 < n / (size * share) < 1.1, (name, n)
    said = capsys.readouterr().out
    assert f"{tmp_path}/zh: 0.3" in said and f"{tmp_path}/en: 0.6" in said
    assert text_sample.size_of(parts_of("-")) == 0
