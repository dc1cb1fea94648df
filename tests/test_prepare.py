"""prepare.py against plain readings of the same files: what goes in comes out, whole, once, in the right split, whoever
does the work and whatever is killed."""

import bz2
import collections
import fcntl
import gc
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import unicodedata
from pathlib import Path

import forks
import numpy as np
import pytest

import prepare
from configurator import is_key
from groundup.demo import debug_data
from groundup.demo import python_docs as corpora
from groundup.errors import UserError
from groundup.files import streams
from groundup.text import inputs, prepared_dir, report, select, unit
from groundup.text.recipe import KINDS_OF
from groundup.text.workers import wait_for_workers
from groundup.tokens.mixture import window_sampler
from groundup.tokens.token_writer import verify, write_record
from groundup.tokens.training import train
from tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
KEYS = {key: value for key, value in vars(prepare).items() if is_key(key, value)}
ALL = {"near": -1, "rules": "length=1.."}  # nothing is dropped but what is empty
SMALL = "import sys, prepare; from groundup.text import inputs, select, unit; "  # many units and shards
SMALL += "inputs.UNIT_BYTES, unit.GROUP_BYTES, select.SHARD_TOKENS = 2**14, 2**12, 20_000"

EN = "The quick brown fox jumps over the lazy dog, and nobody knows why. It happened in 1987."
ZH = "语言模型读了很多文字，学会猜下一个字是什么。猜得越准，写出来的话就越像人写的话。"
CODE = "def f(x):\n\tif x:\n        return {'a': [1, 2]}  # \\n\n\n\n    return None\n"
EMOJI = "👩‍👩‍👧 family, flag 🇨🇳, \u00e9, \u2028 separator, \u0085 next line, <|endoftext|> is text here"


@pytest.fixture(scope="module")
def tok(tmp_path_factory) -> str:
    """Directory of a tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    train([EN, ZH, CODE, EMOJI] * 3, 512).save(path)
    return str(path)


def run(out_dir: Path, **settings) -> int:
    return prepare.main(
        KEYS
        | ALL
        | {"workers": 1, "out_dir": str(out_dir)}
        | {k: str(v) if isinstance(v, Path) else v for k, v in settings.items()}
    )


def texts(count: int, seed: int = 0) -> list[str]:
    """Different documents, short and long, in English, Chinese and code."""
    rng = random.Random(seed)
    return [f"{i} " + rng.choice([EN, ZH, CODE, EMOJI]) * rng.randint(1, 9) for i in range(count)]


def write_jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text(
        "".join(json.dumps({"text": t}, ensure_ascii=bool(i % 2)) + "\n" for i, t in enumerate(documents)), "utf-8"
    )
    return path


def read_back(out_dir: Path) -> dict[str, list[str]]:
    """{split: texts} of a prepared directory, by numpy and the tokenizer alone."""
    manifest = json.loads((out_dir / "manifest.json").read_text("utf-8"))
    tokenizer, found = Tokenizer.load(out_dir), {}
    for split, entry in manifest["splits"].items():
        found[split] = []
        for shard in entry["shards"]:
            tokens, offsets = np.load(out_dir / shard["file"]), np.load(out_dir / shard["offsets"])
            for begin, end in zip(offsets, offsets[1:], strict=False):
                assert tokens[begin] == tokenizer.eot_id
                found[split].append(tokenizer.decode(tokens[begin + 1 : end].tolist()))
        assert tokens[-1] == tokenizer.eot_id and len(tokens) == offsets[-1] + 1
    return found


def plainly_cleaned(text: str) -> str:
    text = re.sub("\r\n?|[\x0b\x0c\x1c-\x1f]", "\n", text)
    text = "".join(c for c in text if c in "\t\n" or (c >= " " and c not in "\x7f\ufeff\u200b"))
    return unicodedata.normalize("NFC", text)


def plain_split(text: str, val: float, test: float) -> str:
    u = int.from_bytes(hashlib.blake2b(text.encode(), key=b"split-v1", digest_size=8).digest(), "little") / 2**64
    return "test" if u < test else "val" if u < test + val else "train"


def content(out_dir: Path) -> dict[str, bytes]:
    """{name: bytes} of all that must not depend on how the work was done. config.py records how, e.g. workers."""
    return {path.name: path.read_bytes() for path in out_dir.iterdir() if path.name != "config.py"}


def command(out_dir: Path, **settings) -> list[str]:
    """A command line that runs main() in a process of its own."""
    config = KEYS | ALL | {"out_dir": str(out_dir)} | settings
    return [sys.executable, "-c", f"{SMALL}; sys.exit(prepare.main({config}))"]


def make_small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "UNIT_BYTES", 2**14)
    monkeypatch.setattr(unit, "GROUP_BYTES", 2**12)
    monkeypatch.setattr(select, "SHARD_TOKENS", 20_000)


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


# ---- what goes in comes out ------------------------------------------------------------------


def test_every_document_of_every_container_comes_out_once_and_in_order(tmp_path, tok):
    documents = texts(120)
    odd = [
        "line one\r\nline two\r\nold mac\rend",
        "\ufeff inner mark, and e\u0301 in two\u200b parts",
        " \t leading and trailing \n ",
        "\x00NUL \x1b[1m\x0c",
        "a",
    ]
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.txt").write_bytes(b"\xef\xbb\xbf" + odd[0].encode())
    (source / "b.txt.gz").write_bytes(gzip.compress((ZH * 50).encode()))
    (source / "c.json").write_text(json.dumps([{"text": t} for t in documents[:20]]), "utf-8")
    write_jsonl(source / "d.jsonl", documents[20:] + odd[1:])
    (source / "e.jsonl.bz2").write_bytes(bz2.compress(json.dumps({"text": "packed " + EMOJI}).encode()))
    (source / "f.csv").write_text('id,text\r\n1,"two\r\nlines"\r\n2,甲乙丙\r\n', "utf-8", newline="")
    read = [odd[0], ZH * 50, *documents, *odd[1:], "packed " + EMOJI, "two\nlines", "甲乙丙"]
    expected = [plainly_cleaned(t) for t in read]
    assert run(tmp_path / "out", input=source, tokenizer_dir=tok, val_fraction=0.2, test_fraction=0.1) == 0
    by_split = collections.defaultdict(list)
    for text in expected:
        by_split[plain_split(text, val=0.2, test=0.1)].append(text)
    assert min(map(len, by_split.values())) > 5
    assert read_back(tmp_path / "out") == by_split


@pytest.mark.parametrize("shard_tokens", [1, 40, 500, 2**27])
def test_totals_add_up_whatever_the_shards(tmp_path, tok, shard_tokens, capsys, monkeypatch):
    monkeypatch.setattr(select, "SHARD_TOKENS", shard_tokens)
    documents = texts(60) + ["", "  \n", "a"]
    lines = [json.dumps({"text": t}) for t in documents] + ["{bad", '{"other": 1}', '{"text": null}']
    (tmp_path / "x.jsonl").write_text("\n".join(lines), "utf-8")
    run(tmp_path / "out", input=tmp_path / "x.jsonl", tokenizer_dir=tok, val_fraction=0.3)
    manifest = verify(tmp_path / "out")
    info, splits = manifest["info"], manifest["splits"]
    assert info["documents"]["dropped"] == {"empty": 2, "bad_field": 2}
    assert info["documents"]["lost"] == {"bad_json": 1}
    size = (tmp_path / "x.jsonl").stat().st_size
    files = {str(tmp_path / "x.jsonl"): len("{bad\n")}
    assert info["input"] == {
        "bytes": size, "documents": size - 5, "lost": 5, "files_with_losses": 1, "files": files
    }  # fmt: skip
    assert info["documents"]["read"] == 66 == info["documents"]["kept"] + 5
    tokenizer = Tokenizer.load(tok)
    for split, found in read_back(tmp_path / "out").items():
        entry = splits[split]
        assert entry["documents"] == len(found) == sum(shard["documents"] for shard in entry["shards"])
        assert entry["bytes"] == sum(len(t.encode()) for t in found)
        assert entry["tokens"] == sum(1 + len(tokenizer.encode(t)) for t in found) + 1
    assert sum(entry["documents"] for entry in splits.values()) == info["documents"]["kept"] == 61
    assert sum(entry["bytes"] for entry in splits.values()) == info["bytes"]["kept"]
    assert info["bytes"]["read"] == sum(len(t.encode()) for t in documents)
    assert "documents: 66 read = 61 kept + 4 dropped + 1 lost" in capsys.readouterr().out


def test_manifest_says_what_it_was_made_of(tmp_path, tok):
    path = write_jsonl(tmp_path / "x.jsonl", texts(40))
    run(tmp_path / "out", input=path, tokenizer_dir=tok, val_fraction=0.2)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))
    (entry,) = inputs.read(tmp_path / "out")
    assert entry["path"] == str(path) and entry["size"] == path.stat().st_size
    assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert manifest["info"]["inputs"]["files"] == 1
    assert manifest["info"]["recipe"]["val_fraction"] == 0.2
    assert manifest["tokenizer_fingerprint"] == Tokenizer.load(tok).fingerprint()
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            names = {shard["file"], shard["offsets"], shard["sums"]}
            found = {name: hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() for name in names}
            assert shard["sha256"] == found


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "log.jsonl", "vocab.json", "tekken.json"])
def test_a_model_without_a_tokenizer_that_can_be_read_gets_no_new_one(tmp_path, name):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_text("{}", "utf-8")
    path = write_jsonl(tmp_path / "x.jsonl", texts(4))
    with pytest.raises(UserError, match="no tokenizer.json or tokenizer.model in"):
        run(tmp_path / "out", input=path, tokenizer_dir=tmp_path / "model", val_fraction=0.2)
    assert [file.name for file in (tmp_path / "model").iterdir()] == [name]


def test_a_tokenizer_of_sentencepiece(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", texts(200))
    train(texts(200), 512, backend="sentencepiece").save(tmp_path / "tok")
    assert run(tmp_path / "sp", input=path, tokenizer_dir=tmp_path / "tok", val_fraction=0.2) == 0
    assert sorted(sum(read_back(tmp_path / "sp").values(), [])) == sorted(texts(200))


# ---- splits ----------------------------------------------------------------------------------


def test_split_is_stable_under_additions_and_no_text_is_in_two(tmp_path, tok):
    old, new = texts(400), texts(1000, seed=1)
    write_jsonl(tmp_path / "a.jsonl", old)
    write_jsonl(tmp_path / "b.jsonl", old + new + old[:50])
    splits = []
    for name in "ab":
        run(tmp_path / name, input=tmp_path / f"{name}.jsonl", tokenizer_dir=tok, val_fraction=0.2, test_fraction=0.1)
        found = read_back(tmp_path / name)
        splits.append({text: split for split, documents in found.items() for text in documents})
        assert sum(len(set(documents)) for documents in found.values()) == len(splits[-1])
    assert {text: splits[1][text] for text in old} == splits[0]
    share = collections.Counter(splits[1].values())
    n = len(splits[1])
    for split, fraction in (("train", 0.7), ("val", 0.2), ("test", 0.1)):
        assert abs(share[split] - n * fraction) < 4 * (n * fraction * (1 - fraction)) ** 0.5


def test_the_advice_for_a_tiny_text_can_be_followed(tmp_path, tok, capsys):
    """The validation end of a tiny text is shorter than the demo config's block_size."""
    (tmp_path / "x.txt").write_text("\n".join(texts(60)), "utf-8")
    run(tmp_path / "out", input=tmp_path / "x.txt", tokenizer_dir=tok)
    said = capsys.readouterr().out
    n_val = int(re.search(r"warning: val has (\d+) tokens; a run whose block_size is \1 or more needs more", said)[1])
    block = int(re.search(r"next: python pretrain.py config/demo.py .* --block_size=(\d+)\n", said)[1])
    assert block < n_val <= 2 * block < 256 and f"(on a GPU with config/small.py --block_size={block})" in said
    share, about = re.search(r"needs more: --val_fraction=(0\.\d+) gives it about ([\d,]+)\n", said).groups()
    run(tmp_path / "out", input=tmp_path / "x.txt", tokenizer_dir=tok, val_fraction=float(share), overwrite=True)
    splits = prepared_dir.read_prepared(tmp_path / "out")["splits"]
    assert splits["val"]["tokens"] == pytest.approx(int(about.replace(",", "")), rel=0.2)

    (tmp_path / "x.txt").write_text("Hi there, all of you.", "utf-8")
    run(tmp_path / "least", input=tmp_path / "x.txt", tokenizer_dir=tok)
    assert "next: more text, or a larger --val_fraction with --overwrite=True" in capsys.readouterr().out


def test_a_small_source_is_told_and_the_advised_command_runs(tmp_path, tok, capsys):
    """A source needs two windows: the borders of windows move in each epoch."""
    (tmp_path / "large.txt").write_text("\n".join(texts(400)), "utf-8")
    (tmp_path / "small.txt").write_text("\n".join(texts(3, seed=1)), "utf-8")
    sources = f"lg: {tmp_path}/large.txt; sg: {tmp_path}/small.txt"
    run(tmp_path / "out", input=sources, tokenizer_dir=tok, val_fraction=0.1, near=-1)
    said = capsys.readouterr().out
    found = re.search(r"warning: (\d+) training tokens of sg: a run whose block_size is (\d+) or more needs more", said)
    n_tokens, refused = map(int, found.groups())
    assert "make one source of several" in said and "tokens of lg" not in said
    block = int(re.search(r"next: python pretrain.py config/demo.py .* --block_size=(\d+)\n", said)[1])
    assert block < refused <= 2 * block and window_sampler(n_tokens, block, 1).per_epoch >= 1
    with pytest.raises(UserError, match="too few for block_size"):
        window_sampler(n_tokens, refused, 1)
    window_sampler(n_tokens, refused - 1, 1)


def test_the_advice_for_few_validation_rows_helps(tmp_path, capsys):
    rows = [json.dumps({"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}."}) for i in range(120)]
    for n, advice in ((120, "holds out about 24"), (40, "holds out about 8; more rows would do more")):
        (tmp_path / f"{n}.jsonl").write_text("\n".join(rows[:n]), "utf-8")
        run(tmp_path / str(n), input=tmp_path / f"{n}.jsonl", kind="chat", near=-1)
        assert f": too few to trust its loss; --val_fraction=0.2 {advice}" in capsys.readouterr().out
    run(tmp_path / "120", input=tmp_path / "120.jsonl", kind="chat", near=-1, val_fraction=0.2, overwrite=True)
    assert "too few to trust" not in capsys.readouterr().out
    (tmp_path / "5.jsonl").write_text("\n".join(rows[:5]), "utf-8")  # where the share would give no more
    for fraction in (0.1, 0.15):
        run(tmp_path / "5", input=tmp_path / "5.jsonl", kind="chat", near=-1, val_fraction=fraction, overwrite=True)
        said = re.search(r"val has (\d+) rows?: too few to trust its loss; (.*)", capsys.readouterr().out)
        more = re.search(r"holds out about (\d+)", said[2])
        assert int(more[1]) > int(said[1]) if more else said[2] == "give more rows"


def test_tiny_corpus_gets_the_lowest_document_as_val_and_a_warning(tmp_path, tok, capsys):
    documents = texts(51)
    run(tmp_path / "out", input=write_jsonl(tmp_path / "x.jsonl", documents), tokenizer_dir=tok, val_fraction=1e-9)
    said = capsys.readouterr().out
    assert "warning: val_fraction=1e-09 of 51 documents picked none, so one is taken for val, " in said
    assert " % of the text, and not trained on\n" in said
    lowest = min(documents, key=lambda t: hashlib.blake2b(t.encode(), key=b"split-v1", digest_size=8).digest()[::-1])
    assert read_back(tmp_path / "out")["val"] == [lowest]
    for i, text in enumerate(documents):
        (tmp_path / f"{i}.txt").write_text(text, "utf-8")
    run(tmp_path / "txt", input=tmp_path / "*.txt", tokenizer_dir=tok, val_fraction=1e-9)
    said = capsys.readouterr().out
    assert " % of the text, and not trained on; " in said and "txt_split=blank or line" in said


def test_ends_of_lines_are_no_validation_text(tmp_path, tok):
    """Of a dozen lines whole ones are held out; of a dozen longer texts the ends."""
    lines = [f"This is line {i} of a dozen." for i in range(12)]
    for name, documents, cut in (("lines", lines, False), ("texts", [line * 50 for line in lines], True)):
        path = write_jsonl(tmp_path / f"{name}.jsonl", documents)
        run(tmp_path / name, input=path, tokenizer_dir=tok, val_fraction=0.1, near=0.0)
        found = read_back(tmp_path / name)
        assert found["val"] and len(found["train"] + found["val"]) == (24 if cut else 12)


def test_the_ends_of_very_few_short_documents_are_more_than_a_full_stop(tmp_path, tok, capsys):
    documents = [f"{k} " + "It is a story of some length about a cat, a dog and a mouse. " * 8 for k in "abcde"]
    path = write_jsonl(tmp_path / "x.jsonl", documents)
    run(tmp_path / "out", input=path, tokenizer_dir=tok)
    assert "only 5 documents: the end of each becomes val (20 %)\n" in capsys.readouterr().out
    run(tmp_path / "both", input=path, tokenizer_dir=tok, test_fraction=0.5, near=-1)
    for name, share in (("out", 0.2), ("both", 0.49 / 3)):
        found = read_back(tmp_path / name)
        wanted = pytest.approx(share * len("".join(documents)), abs=9)
        assert len(found["val"]) == 5 and sum(map(len, found["val"])) == wanted
    documents = [text * 40 for text in documents]  # long enough: as the setting says
    run(tmp_path / "long", input=write_jsonl(path, documents), tokenizer_dir=tok, near=-1)
    assert sum(map(len, read_back(tmp_path / "long")["val"])) == pytest.approx(0.01 * len("".join(documents)), abs=9)


def test_a_long_document_that_is_most_of_val_is_said(tmp_path, tok, capsys):
    documents = texts(60)
    of_val = next(text for text in documents if plain_split(text, val=0.1, test=0.0) == "val")
    times = int(0.9 * sum(len(text.encode()) for text in documents) / len(of_val.encode()))  # less than half of all
    long = next(t for t in (of_val * times + str(i) for i in range(99)) if plain_split(t, val=0.1, test=0.0) == "val")
    path = write_jsonl(tmp_path / "x.jsonl", [*documents, long])
    run(tmp_path / "out", input=path, tokenizer_dir=tok, val_fraction=0.1)
    said = capsys.readouterr().out
    assert re.search(r"warning: val has [45]\d % of the text: few, or long, documents are in it", said)


def test_no_val_is_made_where_none_is_wanted(tmp_path, tok):
    run(tmp_path / "out", input=write_jsonl(tmp_path / "x.jsonl", texts(4)), tokenizer_dir=tok, val_fraction=0.0)
    assert list(read_back(tmp_path / "out")) == ["train"]


def test_nothing_left_for_train_is_an_error(tmp_path, tok):
    path = write_jsonl(tmp_path / "x.jsonl", [EN] * 51)
    with pytest.raises(UserError, match="no document is left for train"):
        run(tmp_path / "out", input=path, tokenizer_dir=tok)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("n", [9, 10, 1003, 10007])
def test_single_document_is_cut_as_nanogpt_cuts_it(tmp_path, tok, n):
    text = ((EN + "\n" + ZH + EMOJI) * (n // 100 + 1))[:n]
    (tmp_path / "input.txt").write_text(text, "utf-8", newline="\r\n")
    run(tmp_path / "out", input=tmp_path / "input.txt", tokenizer_dir=tok, val_fraction=0.1)
    assert read_back(tmp_path / "out") == {"train": [text[: int(n * 0.9)]], "val": [text[int(n * 0.9) :]]}


def test_single_document_in_three(tmp_path, tok):
    (tmp_path / "input.txt").write_text(EN * 40, "utf-8")
    run(tmp_path / "out", input=tmp_path / "input.txt", tokenizer_dir=tok, val_fraction=0.2, test_fraction=0.1)
    train_text, val, test = (read_back(tmp_path / "out")[split][0] for split in ("train", "val", "test"))
    assert train_text + val + test == EN * 40
    assert (len(val), len(test)) == (len(EN) * 8, len(EN) * 4)


def test_of_few_files_each_gives_its_end(tmp_path, tok, capsys, monkeypatch):
    """Two files of different sizes: by their hashes one of them would be all of val. The longer one is read in pieces,
    and its ids are those of the whole."""
    monkeypatch.setattr(unit, "HUGE_CHARS", 1000)
    long, short = "\n\n".join(texts(40)), ZH * 5
    for name, text in (("long", long), ("short", short)):
        (tmp_path / f"{name}.txt").write_text(text, "utf-8")
    run(tmp_path / "out", input=tmp_path, tokenizer_dir=tok, val_fraction=0.1, test_fraction=0.2)
    said = capsys.readouterr().out
    assert "only 2 documents: the end of each becomes val (10 %) and test (20 %); if a .txt file" in said
    assert re.search(r"warning: val has (\d+) tokens; a run whose block_size is \1 or more needs more: ", said)
    found, places = read_back(tmp_path / "out"), {}
    for text in (long, short):
        val, test = int(len(text) * (1 - 0.2 - 0.1)), int(len(text) * 0.8)
        places[text] = text[:val], text[val:test], text[test:]
    for number, split in enumerate(("train", "val", "test")):
        assert found[split] == [places[text][number] for text in (long, short)]
    tokenizer = Tokenizer.load(tok)
    ids = np.load(tmp_path / "out" / "train_00000.npy")
    assert ids[1:].tolist()[: len(whole := tokenizer.encode(places[long][0]))] == whole


def test_ids_of_a_text_in_pieces_are_those_of_the_whole_where_each_text_begins_with_a_space(tok, tmp_path):
    class Spaced:
        def __init__(self):
            self.encode_array = lambda text: np.array(Tokenizer.load(tok).encode(" " + text))
            self.encode = lambda text: self.encode_array(text).tolist()
            self.vocab_size = 512

    pieces = [select.Piece(0, "One.\n\n", True), select.Piece(1, "Two", False)]
    assert select.write_ids(pieces, None, Spaced(), tmp_path / "ids") == 9
    assert np.fromfile(tmp_path / "ids", np.uint16).tolist() == Spaced().encode("One.\n\nTwo")


def test_forty_documents_are_few_and_more_are_not(tmp_path, tok, capsys):
    for n in (11, 40, 41):
        path = write_jsonl(tmp_path / f"{n}.jsonl", texts(n))
        run(tmp_path / str(n), input=path, tokenizer_dir=tok, val_fraction=0.3)
        found = read_back(tmp_path / str(n))
        assert len(found["train"]) + len(found["val"]) == (2 * n if n <= 40 else n)
        note = f"only {n} documents: the end of each becomes val (30 %)"
        report = (tmp_path / str(n) / "report.md").read_text("utf-8")
        assert (note in capsys.readouterr().out) == (note in report) == (n <= 40)
        run(tmp_path / f"{n}lines", input=path, tokenizer_dir=tok, fold="1/3", val_fraction=0.3)
        assert sum(map(len, read_back(tmp_path / f"{n}lines").values())) == n  # folds are of whole documents


@pytest.mark.parametrize("n_rows", [37, 56, 300])
@pytest.mark.parametrize("rows_first", [False, True])
def test_a_few_long_documents_give_their_ends_whatever_rows_stand_beside_them(
    tmp_path, tok, capsys, n_rows, rows_first
):
    """By hashes val would be a few rows and no prose, or a whole book."""
    long = [f"{name} " + EN * 60 + ZH * 40 for name in ("one", "two", "three")]
    for i, text in enumerate(long):
        (tmp_path / f"{i}.txt").write_text(text, "utf-8")
    rows = [f"{i} " + (ZH if i % 2 else EN)[:20] for i in range(n_rows)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    parts = [str(tmp_path / "0.txt"), str(path), f"{tmp_path}/[12].txt"]
    spec = ",".join(sorted(parts, key=lambda part: part != str(path)) if rows_first else parts)
    run(tmp_path / "out", input=spec, tokenizer_dir=tok, val_fraction=0.08, test_fraction=0.04)
    found = read_back(tmp_path / "out")
    for text in long:
        val, test = int(len(text) * (1 - 0.04 - 0.08)), int(len(text) * (1 - 0.04))
        for split, own in (("train", text[:val]), ("val", text[val:test]), ("test", text[test:])):
            assert own in found[split]
    of_rows = {split: [text for text in found[split] if text in rows] for split in found}
    for split, own in of_rows.items():
        assert own == [row for row in rows if plain_split(row, 0.08, 0.04) == split]
        assert len(found[split]) == len(own) + 3
    note = "3 long documents: the end of each becomes val (8 %) and test (4 %); of the"
    note += f" {n_rows} others, a hash chose {len(of_rows['val'])} for val"
    assert note in capsys.readouterr().out
    assert note in (tmp_path / "out" / "report.md").read_text("utf-8")


def test_the_advice_for_a_small_val_is_true(tmp_path, tok, capsys):
    """Followed, it gives the tokens that it names; no command names a block_size of a few tokens."""
    rows = [f"{i} " + EN[:20] for i in range(60)]
    path = write_jsonl(tmp_path / "x.jsonl", [(EN + ZH) * 60 + str(i) for i in range(2)] + rows)
    run(tmp_path / "out", input=path, tokenizer_dir=tok)
    share, tokens = re.search(r"--val_fraction=(\S+) gives it about (\S+)", capsys.readouterr().out).groups()
    run(tmp_path / "out", input=path, tokenizer_dir=tok, val_fraction=float(share), overwrite=True)
    found = prepared_dir.read_prepared(tmp_path / "out")["splits"]["val"]["tokens"]
    assert found == pytest.approx(int(tokens.replace(",", "")), rel=0.2)
    run(tmp_path / "small", input=write_jsonl(tmp_path / "y.jsonl", rows), tokenizer_dir=tok)
    said = capsys.readouterr().out
    assert "next: more text, or a larger --val_fraction with --overwrite=True: this has windows of " in said
    assert "gives it about" not in said and "--val_fraction=0.2 takes more documents" in said


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_the_report_says_what_became_val(tmp_path, tok, capsys, kind):
    documents = [f"{i} {EN}" for i in range(60)]
    path = tmp_path / "x.jsonl"
    rows = [{"question": text, "answer": "yes"} if kind == "chat" else {"text": text} for text in documents]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    for share in (0.2, 0.0):
        run(tmp_path / "out", input=path, tokenizer_dir=tok, kind=kind, val_fraction=share, overwrite=True)
        entry = json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))["splits"].get("val", {})
        n_val = entry.get("rows" if kind == "chat" else "documents", 0)
        what = "conversations" if kind == "chat" else "documents"
        line = f"val: {n_val} of 60 {what}, chosen by a hash; " if share else f"val: none of 60 {what}\n"
        report, said = (tmp_path / "out" / "report.md").read_text("utf-8"), capsys.readouterr().out
        assert line in report and line in said
        for warning in re.findall("prepare: (warning: .*)", said):
            assert f"- {warning}\n" in report


def test_tokenizer_learns_from_train_only(tmp_path, monkeypatch, capsys):
    learnt = []

    def spy(given, vocab_size, backend, pattern):
        learnt.extend(given)
        return train(learnt, vocab_size, backend, pattern)

    monkeypatch.setattr(prepare, "train", spy)
    documents = texts(60)
    path = write_jsonl(tmp_path / "x.jsonl", documents)
    run(tmp_path / "out", input=path, vocab_size=512, val_fraction=0.3, test_fraction=0.1)
    expected = [t for t in map(plainly_cleaned, documents) if plain_split(t, val=0.3, test=0.1) == "train"]
    assert learnt == expected
    learnt.clear()
    (tmp_path / "one.txt").write_text(EN * 10, "utf-8")
    (tmp_path / "two.txt").write_text(ZH * 10, "utf-8")
    run(tmp_path / "out1", input=tmp_path / "one.txt", vocab_size=512, val_fraction=0.3, test_fraction=0.1)
    assert learnt == [(EN * 10)[: len(EN) * 6]]
    learnt.clear()
    run(tmp_path / "out2", input=f"{tmp_path}/one.txt,{tmp_path}/two.txt", vocab_size=512, val_fraction=0.5)
    assert learnt == [EN * 5, ZH * 5]
    capsys.readouterr()
    for weights, label in ((("", ""), "by its size"), ((", weight=1", ", weight=2"), "weight 1")):
        spec = f"a: {tmp_path}/one.txt{weights[0]}; b: {tmp_path}/two.txt{weights[1]}"
        run(tmp_path / label, input=spec, vocab_size=512)
        assert f"tokenizer: source a, {label}: 0.00 MB" in capsys.readouterr().out
    monkeypatch.setattr(select, "MAX_DOC_CHARS", 100)  # of a mixture; a long file is given in so many pieces
    learnt.clear()
    run(tmp_path / "out3", input=f"a: {tmp_path}/one.txt; b: {tmp_path}/two.txt", vocab_size=512, val_fraction=0.5)
    assert max(map(len, learnt)) == 100 and sorted("".join(learnt)) == sorted(EN * 5 + ZH * 5)


@pytest.mark.parametrize("n, times", [(60, 6), (200, select.MAX_REPEATS)])
def test_a_source_small_for_its_weight_is_read_again_for_the_tokenizer(tmp_path, monkeypatch, capsys, n, times):
    """Otherwise a vocabulary of 70 KB of Chinese beside 11 MB of English has no Chinese words."""
    learnt = []
    monkeypatch.setattr(prepare, "train", lambda texts, *rest: train(learnt.extend(texts) or learnt, *rest))
    documents = [f"{i:03d} " + EN[:200] for i in range(n + 10)]
    large, small = (write_jsonl(tmp_path / f"{k}.jsonl", documents[k : k + m]) for k, m in ((10, n), (0, 10)))
    spec = f"large: {large}, weight=0.5; small: {small}, weight=0.5"
    run(tmp_path / "out", input=spec, vocab_size=512, val_fraction=0.0, near=0.0)
    assert collections.Counter(collections.Counter(learnt).values()) == {1: n, times: 10}
    assert f"tokenizer: source small, weight 0.5, read {times} times: " in capsys.readouterr().out


# ---- any number of processes, and what happens when one is lost ------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Some 0.2 MB in lines of one file and in small files, some of it bad, so that there are about 25 units."""
    path = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": t}, ensure_ascii=False) for t in texts(600)]
    lines[350:350] = ["{bad", '{"text": 1}']
    (path / "many.jsonl").write_text("\n".join(lines), "utf-8")
    for i, text in enumerate(texts(20, seed=7)):
        (path / f"{i:02d}.txt").write_text(text * 3, "utf-8")
    return path


@pytest.mark.slow
def test_units_do_not_change_the_order(tmp_path, tok, corpus, monkeypatch):
    monkeypatch.setattr(select, "SHARD_TOKENS", 20_000)
    run(tmp_path / "whole", input=corpus, tokenizer_dir=tok)
    make_small_units(monkeypatch)
    run(tmp_path / "cut", input=corpus, tokenizer_dir=tok)
    whole, cut = content(tmp_path / "whole"), content(tmp_path / "cut")
    differ = {name for name in whole if whole[name] != cut[name]}
    assert differ == {"inputs.tsv", "manifest.json"}  # a hash of each part


needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for worker processes in /proc")


def children(pid: int) -> list[int]:
    """Worker processes of a process: neither the resource tracker nor what forks (forks.py)."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()
        found = [p for p in found if b"resource_tracker" not in Path(f"/proc/{p}/cmdline").read_bytes()]
        return [int(p) for p in found if Path(f"/proc/{p}/comm").read_text("utf-8") != "server\n"]
    except OSError:
        return []


def wait_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


MOMENTS = {  # more than so many of these files are in the work directory
    "half-way": ("units/*.json", 15),
    "when they are compared": ("units/*.fates.npy", 0),
    "when the tokenizer is trained": ("out/tokenizer.json", 0),
    "when tokens come": ("units/*.tokenized", 10),
    "when a shard is done": ("out/train_00000.npy", 0),
}
# Python imports it first, in workers too. A test that looked from outside would miss moments on a busy machine.
KILLER = """if True:
    import os, pathlib, signal, sys

    def kill(event, arguments):
        scratch, pattern, most = os.environ["KILL_AT"].split(":")
        if event in ("open", "os.rename") and str(arguments[0]).startswith(scratch):
            if len(list(pathlib.Path(scratch).glob(pattern))) > int(most):
                worker = any("spawn_main" in argument for argument in sys.orig_argv)
                os.kill(os.getppid() if worker else os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
"""


def kill_when(moment: str, arguments: list[str], directory: Path) -> None:
    """Start a run that makes directory/out, and have it killed at a moment."""
    (directory / "killer").mkdir(exist_ok=True)
    (directory / "killer" / "sitecustomize.py").write_text(KILLER, encoding="utf-8")
    pattern, most = MOMENTS[moment]
    env = {"PYTHONPATH": str(directory / "killer"), "KILL_AT": f"{directory / '.out.work.tmp'}:{pattern}:{most}"}
    done = forks.run(arguments, cwd=ROOT, env=os.environ | env, stdout=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL, moment


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs kill -9")
def test_killed_at_any_moment_then_run_again(tmp_path, corpus, monkeypatch):
    """With two workers, the bytes of a run that was left alone with one."""
    make_small_units(monkeypatch)
    recipe = prepare.check_config(KEYS | {"input": str(corpus), "out_dir": "x"})
    assert len(unit.plan_units(prepare.find_inputs(recipe.sources, tmp_path / "out", tmp_path))) > 20
    settings = {"input": str(corpus), "vocab_size": 512, "val_fraction": 0.1}
    settings["max_bad_fraction"] = 0.01
    assert run(tmp_path / "whole", workers=1, **settings) == 0
    assert len(list((tmp_path / "whole").glob("train_?????.npy"))) > 2
    arguments = command(tmp_path / "out", workers=2, **settings)
    for moment in MOMENTS:
        kill_when(moment, arguments, tmp_path)
        assert not (tmp_path / "out").exists(), moment
    forks.run(arguments, cwd=ROOT, check=True, capture_output=True)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not leftovers(tmp_path)


def test_killed_while_tidying_up_then_run_again(tmp_path, tok, corpus, monkeypatch):
    settings = {"input": corpus, "vocab_size": 512, "workers": 1}
    run(tmp_path / "whole", **settings)
    remove_all = shutil.rmtree

    def killed(path: Path, **others) -> None:
        if not Path(path).name.endswith(".work.tmp"):
            return remove_all(path, **others)
        for file in [*Path(path).rglob("*.problems"), *Path(path).rglob("tokenizer.json")]:
            file.unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        run(tmp_path / "out", **settings)
    shutil.rmtree(tmp_path / "out")
    run(tmp_path / "out", **settings)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not leftovers(tmp_path)


def test_next_run_waits_for_workers_of_a_killed_one(tmp_path):
    (tmp_path / "units").mkdir()
    worker = os.open(tmp_path / "units", os.O_RDONLY)
    fcntl.flock(worker, fcntl.LOCK_SH)
    waiting = threading.Thread(target=wait_for_workers, args=(tmp_path,))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    os.close(worker)
    waiting.join(60)
    assert not waiting.is_alive()


@pytest.mark.slow
def test_killed_while_replacing_keeps_the_old_directory(tmp_path, tok, corpus):
    write_jsonl(tmp_path / "x.jsonl", texts(30))
    run(tmp_path / "out", input=tmp_path / "x.jsonl", tokenizer_dir=tok)
    before = content(tmp_path / "out")
    settings = {"input": str(corpus), "tokenizer_dir": tok, "overwrite": True}
    python, c, code = command(tmp_path / "out", workers=1, **settings)
    dies = "import os; from groundup.text import prepared_dir; "
    dies += "prepared_dir.publish = lambda *_: os.kill(os.getpid(), 9); "
    assert forks.run([python, c, dies + code], cwd=ROOT).returncode == -signal.SIGKILL
    assert list(tmp_path.glob(".out.work.tmp/out/train_00000.npy"))  # all but the last step was done
    assert content(tmp_path / "out") == before
    run(tmp_path / "out", **settings)
    assert content(tmp_path / "out") != before and verify(tmp_path / "out")
    assert not leftovers(tmp_path)


@pytest.mark.slow
def test_a_file_named_in_several_ways_is_read_once(tmp_path, tok, capsys):
    """Also where copies are kept; and no advice about .txt files where there are none."""
    path = write_jsonl(tmp_path / "x.jsonl", texts(20))
    names = f"{path},{tmp_path}/./x.jsonl,{tmp_path}/../{tmp_path.name}/x.jsonl"
    run(tmp_path / "out", input=names, tokenizer_dir=tok, near=-1)
    printed = capsys.readouterr().out
    assert "documents: 20 read = 20 kept" in printed and "txt_split" not in printed


@needs_proc
def test_killed_worker_is_an_error_and_the_next_run_goes_on(tmp_path, tok, corpus, monkeypatch):
    make_small_units(monkeypatch)
    settings = {"input": str(corpus), "tokenizer_dir": tok, "max_bad_fraction": 0.01}
    run(tmp_path / "whole", **settings)
    arguments = command(tmp_path / "out", workers=2, **settings)
    process = forks.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list(tmp_path.glob(".out.work.tmp/units/000004.json")))
    os.kill(children(process.pid)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "prepare: a worker process was killed; run again, with fewer workers if memory was short" in errors
    assert not (tmp_path / "out").exists()
    done = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob(".out.work.tmp/units/*.json")}
    assert len(done) > 3
    kill_when("when they are compared", arguments, tmp_path)
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob(".out.work.tmp/units/*.json")}
    assert done.items() < after.items()  # they were not made again
    forks.run(arguments, cwd=ROOT, check=True, capture_output=True)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.slow
def test_exception_in_a_worker_surfaces(tmp_path, tok, corpus, monkeypatch):
    make_small_units(monkeypatch)
    plan = prepare.plan_units

    def broken(inputs, recipe):
        units = plan(inputs, recipe)
        units[-2] = units[-2]._replace(parts=[part._replace(begin="here") for part in units[-2].parts])
        return units

    monkeypatch.setattr(prepare, "plan_units", broken)
    with pytest.raises(TypeError):
        run(tmp_path / "out", input=corpus, tokenizer_dir=tok, workers=2)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(prepare, "plan_units", plan)
    run(tmp_path / "out", input=corpus, tokenizer_dir=tok)
    assert not leftovers(tmp_path)


# ---- once more -------------------------------------------------------------------------------


def test_up_to_date_until_something_changes(tmp_path, tok, capsys, monkeypatch):
    path = write_jsonl(tmp_path / "x.jsonl", texts(50))
    other = write_jsonl(tmp_path / "y.jsonl", texts(5, seed=3))
    (tmp_path / "tok2").mkdir()
    train([EN, ZH] * 9, 400).save(tmp_path / "tok2")
    settings = {"input": path, "tokenizer_dir": tok, "val_fraction": 0.2}
    said = "prepare: .*/out is made anew: "

    def again(expected: str, **more) -> None:
        mark = (tmp_path / "out" / "manifest.json").stat().st_ino if (tmp_path / "out").exists() else 0
        settings.update(more)
        if differs := expected.startswith(said) and "nothing complete" not in expected:
            with pytest.raises(UserError, match=f"complete corpus that differs in {expected[len(said):-1]}; use anoth"):
                run(tmp_path / "out", **settings)
            assert capsys.readouterr().out == "" and not leftovers(tmp_path)
        assert run(tmp_path / "out", **settings, overwrite=differs) == 0
        out = capsys.readouterr().out
        assert re.search(expected, out), out
        assert ((tmp_path / "out" / "manifest.json").stat().st_ino == mark) == ("up to date" in expected)

    again("is done")
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "sha256_of", None)  # not needed while size and time are the same
        again("is up to date", workers=2)
    os.utime(path, ns=(1, 1))
    again("is up to date")
    again(said + "val_fraction\n", val_fraction=0.3)
    again(said + "rules\n", rules="length=3..")
    again(said + "tokenizer\n", tokenizer_dir=str(tmp_path / "tok2"))
    write_jsonl(path, texts(49) + ["new"])
    again(said + "input .*x.jsonl\n")
    again(said + "input .*y.jsonl\n", input=f"{path},{other}")
    again(said + "the order of the inputs\n", input=f"{other},{path}")
    (tmp_path / "out" / "train_00000.npy").write_bytes(b"")
    again(said + "nothing complete is there yet")
    (tmp_path / "out" / "tokenizer.json").unlink()
    again(said + "nothing complete is there yet")
    again("is up to date")
    verify(tmp_path / "out")


def test_a_damaged_file_of_a_unit_is_one_line(tmp_path, tok, monkeypatch):
    path, real = write_jsonl(tmp_path / "x.jsonl", texts(50)), prepare.tokenize_unit

    def damaged(unit, **settings):
        unit.file(settings["work"], "json").write_bytes(b"\0" * 99)
        real(unit, **settings)

    monkeypatch.setattr(prepare, "tokenize_unit", damaged)
    with pytest.raises(UserError, match=r"000000.json is damaged: .*; run again"):
        run(tmp_path / "out", input=path, tokenizer_dir=tok)
    monkeypatch.undo()
    assert run(tmp_path / "out", input=path, tokenizer_dir=tok) == 0


def test_the_manifest_does_not_grow_with_the_number_of_files(tmp_path, tok, monkeypatch):
    monkeypatch.setattr(report, "SHOWN_FILES", 5)
    sizes = []
    for n in (9, 90):
        for k in range(n):
            (tmp_path / f"{k}.txt").write_bytes(f"The text of file {k}.".encode() if k % 2 else b"\0")
        assert run(tmp_path / f"out{n}", input=f"{tmp_path}/*.txt", tokenizer_dir=tok, near=0.0) == 1
        sizes.append((tmp_path / f"out{n}" / "manifest.json").stat().st_size)
        assert len(inputs.read(tmp_path / f"out{n}")) == n
    assert sizes[1] < sizes[0] + 200  # one more note on val


def test_every_input_is_opened_twice(tmp_path, tok, monkeypatch):
    """Once to look at it, once to read it; its sha256 is taken while it is read."""
    for i, text in enumerate(texts(30)):
        (tmp_path / f"{i}.txt").write_text(text, "utf-8")
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": EN}).encode()))
    opened, real = collections.Counter(), open

    def counting(path, *args, **options):
        opened[str(path)] += 1
        return real(path, *args, **options)

    monkeypatch.setattr("builtins.open", counting)
    run(tmp_path / "out", input=f"{tmp_path}/*.txt,{tmp_path}/x.jsonl.gz", tokenizer_dir=tok)
    monkeypatch.undo()
    paths = [*tmp_path.glob("*.txt"), tmp_path / "x.jsonl.gz"]
    assert [opened[str(path)] for path in paths] == [2] * 31
    found = {entry["path"]: entry["sha256"] for entry in inputs.read(tmp_path / "out")}
    assert found == {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_too_many_documents_are_refused_while_they_are_read(tmp_path, tok, monkeypatch):
    make_small_units(monkeypatch)
    monkeypatch.setattr("groundup.text.dedup.MOST_DOCUMENTS", 20)
    monkeypatch.setattr(prepare.selection, "select", None)
    path = write_jsonl(tmp_path / "x.jsonl", texts(600))
    with pytest.raises(UserError, match="documents are more than 20; prepare them in parts, or with near=0"):
        run(tmp_path / "out", input=path, tokenizer_dir=tok, near=0.8)


def test_a_tokenizer_of_its_own_is_part_of_what_is_compared(tmp_path, capsys):
    path = write_jsonl(tmp_path / "x.jsonl", texts(50))
    for vocab_size, expected in ((512, "is done"), (512, "is up to date"), (640, "anew: tokenizer (trained, bpe 512 ")):
        run(tmp_path / "out", input=path, vocab_size=vocab_size, overwrite=vocab_size == 640)
        assert expected in capsys.readouterr().out
    for expected in ("is done", "is up to date"):
        run(tmp_path / "out2", input=path, vocab_size=512, tokenizer_dir=tmp_path / "new")
        assert expected in capsys.readouterr().out
    assert Tokenizer.load(tmp_path / "new").fingerprint() == Tokenizer.load(tmp_path / "out2").fingerprint()


def test_a_vocab_size_beside_a_tokenizer_is_said_to_have_no_effect(tmp_path, tok, capsys):
    path, size = write_jsonl(tmp_path / "x.jsonl", texts(50)), Tokenizer.load(tok).vocab_size
    said = f"prepare: vocab_size=4096 has no effect: tokenizer_dir={tok} has a tokenizer of {size}"
    for vocab_size, expected in ((4096, True), (size, False), (size - 100, False), (KEYS["vocab_size"], False)):
        run(tmp_path / "out", input=path, tokenizer_dir=tok, vocab_size=vocab_size)
        assert capsys.readouterr().out.startswith(said) == expected, vocab_size
    run(tmp_path / "out", input=path, tokenizer_dir=tok, pattern="zh")
    assert f"prepare: pattern=zh has no effect: tokenizer_dir={tok} has a tokenizer" in capsys.readouterr().out
    run(tmp_path / "new", input=path, tokenizer_dir=tmp_path / "trained", vocab_size=640, pattern="zh")
    assert "has no effect" not in capsys.readouterr().out


@pytest.mark.parametrize("given", [{"vocab_size": 4096}, {"pattern": "zh"}])
@pytest.mark.parametrize("kind", ["chat", "preference"])
def test_a_tokenizer_is_trained_for_texts_only(tmp_path, given, kind):
    ((key, value),) = given.items()
    with pytest.raises(UserError, match=f"{key}={value} has no effect with kind={kind}; leave it out"):
        run(tmp_path / "out", input=tmp_path, kind=kind, **given)
    assert KINDS_OF[key][1] == KEYS[key]


def test_a_lost_line_of_a_text_file_is_no_lost_document(tmp_path, tok, capsys):
    """One .txt file is one document: it is kept without the line."""
    source = tmp_path / "in"
    source.mkdir()
    lines = [f"{k} Übung {EN}".encode() for k in range(300)]
    (source / "a.txt").write_bytes(b"\n".join([*lines, b"\xff\xfe", b"\xff"]))
    (source / "b.txt").write_bytes(b"\xe9 all of it is lost \xff\xff")
    assert run(tmp_path / "out", input=source, tokenizer_dir=tok, val_fraction=0.1) == 1
    out = capsys.readouterr().out
    assert "prepare: documents: 2 read = 1 kept + 0 dropped + 1 lost\n" in out
    assert "prepare: lost: 1 bad_encoding\nprepare: lost: 2 bad_encoding within texts that are kept\n" in out
    documents = json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))["info"]["documents"]
    assert documents["lost"] == {"bad_encoding": 1} and documents["lost_lines"] == {"bad_encoding": 2}
    assert len((tmp_path / "out" / "errors.tsv").read_text("utf-8").splitlines()) == 4


def test_an_input_that_changes_meanwhile_is_an_error(tmp_path, tok, monkeypatch):
    path = write_jsonl(tmp_path / "x.jsonl", texts(50))
    inspect_units = prepare.inspect_units

    def slow(*args):
        write_jsonl(path, texts(51))
        return inspect_units(*args)

    monkeypatch.setattr(prepare, "inspect_units", slow)
    with pytest.raises(UserError, match="x.jsonl changed while it was read"):
        run(tmp_path / "out", input=path, tokenizer_dir=tok)
    monkeypatch.setattr(prepare, "inspect_units", lambda *args: (inspect_units(*args), path.unlink())[0])
    with pytest.raises(UserError, match="x.jsonl changed while it was read"):
        run(tmp_path / "out", input=path, tokenizer_dir=tok)
    assert not (tmp_path / "out").exists()


def test_the_config_of_a_replaced_directory_replaces_nothing(tmp_path, tok):
    path = write_jsonl(tmp_path / "x.jsonl", texts(50))
    for val_fraction in (0.2, 0.3):
        run(tmp_path / "out", input=path, tokenizer_dir=tok, val_fraction=val_fraction, overwrite=True)
    assert "overwrite = False" in (tmp_path / "out" / "config.py").read_text("utf-8")


def test_text_with_html_tags_is_named(tmp_path, tok, capsys):
    plain = write_jsonl(tmp_path / "plain.jsonl", texts(40))
    run(tmp_path / "a", input=plain, tokenizer_dir=tok)
    assert "HTML" not in capsys.readouterr().out
    pages = [f"<div><p>Page {i}: {text}</p></div>" for i, text in enumerate(texts(40))]
    run(tmp_path / "b", input=write_jsonl(tmp_path / "pages.jsonl", pages), tokenizer_dir=tok)
    assert "prepare: warning: 20 of 20 kept documents hold HTML tags" in capsys.readouterr().out
    assert not report.mostly_html([])  # nothing was kept


def test_files_of_others_are_never_removed(tmp_path, tok, capsys):
    path = write_jsonl(tmp_path / "x.jsonl", texts(50))
    out = tmp_path / "out"
    out.mkdir()
    (out / "chat.jsonl").write_text("{}", "utf-8")
    with pytest.raises(UserError, match="holds chat.jsonl, which is not ours"):
        run(out, input=path, tokenizer_dir=tok)
    assert capsys.readouterr().out == ""  # not that it is made anew
    (out / "config.py").write_text("'Resolved configuration; re-run with: python sft.py out/config.py'", "utf-8")
    with pytest.raises(UserError, match="out is a run of sft.py; use another out_dir"):
        run(out, input=path, tokenizer_dir=tok)
    (out / "config.py").unlink()
    (out / "chat.jsonl").unlink()
    (out / ".DS_Store").write_bytes(b"of a desktop")  # which is as good as empty
    run(out, input=path, tokenizer_dir=tok)
    (out / "notes.txt").write_text("mine", "utf-8")
    assert run(out, input=path, tokenizer_dir=tok) == 0  # nothing to do
    for overwrite in (False, True):
        with pytest.raises(UserError, match="holds notes.txt, which is not ours"):
            run(out, input=path, tokenizer_dir=tok, val_fraction=0.5, overwrite=overwrite)
    (out / "notes.txt").unlink()
    (out / "manifest.json").unlink()
    with pytest.raises(UserError, match="holds config.py, but no manifest.json of ours; overwrite=True"):
        run(out, input=path, tokenizer_dir=tok)
    assert run(out, input=path, tokenizer_dir=tok, overwrite=True) == 0
    with pytest.raises(UserError, match="x.jsonl is a file"):
        run(path, input=path, tokenizer_dir=tok)
    assert path.exists() and not leftovers(tmp_path)


@pytest.mark.parametrize("name", ["x/manifest.json", "x/config.py", "x/tokenizer.json", "x/train.jsonl", "train.jsonl"])
def test_what_has_names_like_ours_is_not_removed_either(tmp_path, tok, name):
    """The directory of all prepared data given for one of them; raw data that are called train.jsonl."""
    path, mine = write_jsonl(tmp_path / "x.jsonl", texts(50)), tmp_path / "data" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("{}", "utf-8")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=f"holds {name}, which is not ours"):
            run(tmp_path / "data", input=path, tokenizer_dir=tok, overwrite=overwrite)
    assert mine.exists() and not leftovers(tmp_path)


def test_another_run_of_the_same_directory_is_an_error(tmp_path, tok):
    path = write_jsonl(tmp_path / "x.jsonl", texts(50))
    with prepared_dir.work_dir(tmp_path / "out"):
        with pytest.raises(UserError, match="another run is making .*out; wait for it"):
            run(tmp_path / "out", input=path, tokenizer_dir=tok)
        assert run(tmp_path / "other", input=path, tokenizer_dir=tok) == 0
    assert run(tmp_path / "out", input=path, tokenizer_dir=tok) == 0
    assert not leftovers(tmp_path)


# ---- bad input -------------------------------------------------------------------------------


@pytest.mark.slow
def test_bad_lines_are_named_counted_and_listed(tmp_path, tok, monkeypatch, capsys):
    make_small_units(monkeypatch)
    lines = [json.dumps({"text": t}, ensure_ascii=False).encode() for t in texts(400)]
    bad = {3: b"{bad", 5: b'{"body": "x"}', 7: b'{"text": 1}', 300: b'{"text": "\xff\xfe\xff"}'}
    bad |= {350 + i: b"[" for i in range(20)}
    for line, raw in bad.items():
        lines[line - 1] = raw
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(lines))
    assert run(tmp_path / "out", input=path, tokenizer_dir=tok, workers=2) == 1
    rows = [row.split("\t") for row in (tmp_path / "out" / "errors.tsv").read_text("utf-8").splitlines()]
    assert rows[0] == ["path", "line", "byte", "reason", "detail"]
    reasons = {5: "bad_field", 7: "bad_field", 300: "bad_encoding"}
    where = [
        (str(path), str(k), str(sum(len(raw) + 1 for raw in lines[: k - 1])), reasons.get(k, "bad_json")) for k in bad
    ]
    assert [tuple(row[:4]) for row in rows[1:]] == where
    printed = [line for line in capsys.readouterr().out.splitlines() if f"{path}:" in line]
    # what is wrong in the same way is printed once
    assert [line.split(": ")[1] for line in printed] == [f"{path}:{k}" for k in list(bad)[:5]]
    info = json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))["info"]
    assert info["documents"]["dropped"] == {"bad_field": 2}
    assert info["documents"]["lost"] == {"bad_json": 21, "bad_encoding": 1}
    assert info["input"]["lost"] == sum(len(bad[k]) + 1 for k in bad if reasons.get(k) != "bad_field")
    assert info["documents"]["kept"] == 376 and info["failed"] == []
    with pytest.raises(UserError, match=r"x.jsonl:3: bad_json at byte \d+: .*; mend it, or leave such records out"):
        run(tmp_path / "strict", input=path, tokenizer_dir=tok, workers=2, strict=True)
    assert not (tmp_path / "strict").exists() and not leftovers(tmp_path)


def test_a_file_that_cannot_be_read_is_told_by_the_exit_status(tmp_path, tok, capsys):
    source = tmp_path / "in"
    source.mkdir()
    write_jsonl(source / "good.jsonl", texts(30))
    (source / "broken.txt").symlink_to("nowhere")
    (source / "latin.txt").write_bytes(b"caf\xe9 \xff\xff")
    packed = gzip.compress(write_jsonl(tmp_path / "x", texts(900)).read_bytes())
    (source / "torn.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    for said in ("done", "up to date"):
        assert run(tmp_path / "out", input=source, tokenizer_dir=tok) == 1
        out = capsys.readouterr().out
        before, following = out.split(f"out is {said} without what could not be read, with report.md; next: ")
        lost, failed = before.splitlines()[-3:-1]  # right before the next command
        assert following.startswith("python pretrain.py ") and "warning" not in following
        assert lost.startswith("prepare: warning: ") and " are lost, in 2 of 4 files: " in lost
        assert f"{source}/latin.txt (7 bytes)" in lost and f"{source}/torn.jsonl.gz (" in lost
        names = f"{source}/broken.txt, {source}/latin.txt"
        assert failed == f"prepare: warning: 2 of 4 files could not be read: {names}; errors.tsv says why"
    rows = (tmp_path / "out" / "errors.tsv").read_text("utf-8").splitlines()[1:]
    assert [row.split("\t")[3] for row in rows] == ["unreadable_file", "bad_encoding", "truncated_file"]
    assert len(sum(read_back(tmp_path / "out").values(), [])) > 60  # of the torn file, too
    with pytest.raises(UserError, match=f"cannot read {source}/broken.txt: No such file"):
        run(tmp_path / "strict", input=source, tokenizer_dir=tok, strict=True)


def bad_inputs(path: Path) -> dict[str, tuple[Path, str]]:
    """{name: (input, what is said about it)}"""
    files = {
        "empty.txt": b"",
        "blank.txt": b" \n\n",
        "malformed.jsonl": b"{bad\n[\n{\n",
        "latin.txt": b"\xff\xff",
        "none.json": b"[]",
    }
    for name, raw in files.items():
        (path / name).write_bytes(raw)
    (path / "broken.txt").symlink_to("nowhere")
    nothing = "prepare: no document to prepare: "
    return {
        "empty.txt": nothing + "1 empty",
        "blank.txt": nothing + "1 empty",
        "malformed.jsonl": nothing + "3 bad_json; first: PATH:1: bad_json: ",
        "latin.txt": nothing + "1 bad_encoding; first: PATH:1: bad_encoding: ",
        "none.json": nothing + "the input holds none",
        "missing.txt": "data: no file matches 'PATH' in --input; give",
    }


@pytest.mark.parametrize("trained", [False, True])
def test_nothing_to_prepare_is_one_clear_line(tmp_path, tok, trained):
    for name, said in bad_inputs(tmp_path).items():
        path = tmp_path / name
        with pytest.raises(ValueError) as caught:
            run(tmp_path / "out", input=path, tokenizer_dir="" if trained else tok)
        assert str(caught.value).startswith(said.replace("PATH", str(path)))
        assert "\n" not in str(caught.value) and isinstance(caught.value, UserError)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind, keys", [("chat", "question=问,answer=回答"), ("preference", "question=问题,chosen=好")])
def test_a_key_that_no_row_has_is_named(tmp_path, kind, keys):
    rows = [{"问题": f"几点{n}？", "回答": f"{n}点。"} for n in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    missing = "问" if kind == "chat" else "好"
    with pytest.raises(UserError) as caught:
        run(tmp_path / "out", input=tmp_path / "a.jsonl", kind=kind, text_key=keys)
    assert str(caught.value).endswith(f":1: bad_field: no {missing!r} (keys 问题, 回答); see text_key")


def test_a_file_in_gbk_is_read_not_mended(tmp_path, capsys):
    rows = [{"text": f"今天天气很好，我们去公园里走了{n}步。"} for n in range(30)]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_bytes(text.encode("gbk"))
    run(tmp_path / "out", input=tmp_path / "a.jsonl")
    said = capsys.readouterr().out
    assert "read as gb18030: 30\n" in said and "mended" not in said


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--input=x", "config: out_dir is empty; give --out_dir=... (--help lists the keys)"),
        ("--out_dir=x", "config: input is empty; give --input=... (--help lists the keys)"),
        ("--input=x --out_dir=x --kind=song", "config: kind must be one of text, chat, preference, got"),
        ("--input=a.jsonl --out_dir=x", "prepare: no document to prepare: 2 bad_json; first: a.jsonl:1: bad_json: E"),
        ("--input=a.jsonl --out_dir=x --strict=True", "data: a.jsonl:1: bad_json at byte 0: Expecting property name"),
        ("--input=a.jsonl --out_dir=x --workers=2 --vocab_size=12", "config: vocab_size must be at least "),
        ("--verify=x", "data: no directory x; run: python prepare.py --input=... --out_dir=x"),
    ],
)
def test_errors_of_the_command_are_one_line(tmp_path, flags, said):
    (tmp_path / "a.jsonl").write_text("{bad\n[\n", "utf-8")
    arguments = [sys.executable, ROOT / "prepare.py", *flags.split()]
    done = forks.run(arguments, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith(said) and done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_wrong_settings_are_named():
    for key, value in (
        ("val_fraction", 1.0),
        ("test_fraction", -0.1),
        ("workers", -1),
        *(("encoding", name) for name in ("base64", "rot13", "idna", "undefined", "utf-16", "cp037")),
    ):
        with pytest.raises(UserError, match=key):
            prepare.check_config(KEYS | {"input": "x", "out_dir": "x", key: value})


def test_tokenizer_without_an_end_of_text_is_refused(tmp_path, tok):
    path = write_jsonl(tmp_path / "x.jsonl", texts(5))
    description = json.loads(Path(tok, "tokenizer.json").read_text("utf-8"))
    description["added_tokens"] = []
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(description), "utf-8")
    with pytest.raises(UserError, match="has no end of text"):
        run(tmp_path / "out", input=path, tokenizer_dir=tmp_path / "t")
    (tmp_path / "t" / "tokenizer.json").write_text("{}", "utf-8")
    with pytest.raises(UserError, match="is damaged"):
        run(tmp_path / "out", input=path, tokenizer_dir=tmp_path / "t")


@pytest.mark.parametrize("form", ["txt", "jsonl", "jsonl.gz"])
def test_standard_input(tmp_path, tok, form):
    documents = [ZH + EN] if form == "txt" else texts(45)
    raw = documents[0].encode() if form == "txt" else write_jsonl(tmp_path / "x.jsonl", documents).read_bytes()
    raw = gzip.compress(raw) if form.endswith("gz") else raw
    flags = ["--input=-", f"--out_dir={tmp_path}/out", f"--tokenizer_dir={tok}", "--val_fraction=0.25", "--near=0"]
    for said in (b"is done", b"is up to date"):
        done = forks.run([sys.executable, ROOT / "prepare.py", *flags], input=raw, capture_output=True, check=True)
        assert said in done.stdout
    found = read_back(tmp_path / "out")
    if form == "txt":
        assert found["train"][0] + found["val"][0] == documents[0]
    else:
        assert sorted(found["train"] + found["val"]) == sorted(documents)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))["info"]["inputs"]["files"] == 1


def test_verify(tmp_path, tok, capsys):
    run(tmp_path / "out", input=write_jsonl(tmp_path / "x.jsonl", texts(50)), tokenizer_dir=tok)
    assert prepare.main(KEYS | {"verify": str(tmp_path / "out")}) == 0
    assert "out is as it was written" in capsys.readouterr().out
    train([EN] * 3, 384).save(tmp_path / "out")
    with pytest.raises(UserError, match="did not make its tokens"):
        prepare.main(KEYS | {"verify": str(tmp_path / "out")})
    with pytest.raises(UserError, match="not prepared"):
        prepare.main(KEYS | {"verify": str(tmp_path)})


# ---- built-in texts --------------------------------------------------------------------------


def test_debug_data_made_by_several_processes_at_once(tmp_path):
    code = f"from groundup.demo import debug_data; debug_data.make_debug_data({str(tmp_path / 'debug')!r})"
    processes = [forks.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert os.listdir(tmp_path) == ["debug"]
    verify(tmp_path / "debug")
    before = content(tmp_path / "debug")
    debug_data.make_debug_data(tmp_path / "debug")
    assert content(tmp_path / "debug") == before
    found = read_back(tmp_path / "debug")
    assert sorted(found["train"] + found["val"]) == sorted(corpora.debug_texts())
    assert any("的" in text for text in corpora.debug_texts())
    debug_data.make_debug_data(tmp_path / "again")
    assert content(tmp_path / "again").keys() == before.keys()
    assert (tmp_path / "again" / "train_00000.npy").read_bytes() == before["train_00000.npy"]


# ---- memory ----------------------------------------------------------------------------------

@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path, tok, monkeypatch):
    """In one process; workers do the same, unit by unit."""
    make_small_units(monkeypatch)
    monkeypatch.setattr(streams, "READ_BYTES", 2**14)
    monkeypatch.setattr(streams, "SAMPLE_BYTES", 2**10)
    run(tmp_path / "first", input=write_jsonl(tmp_path / "a.jsonl", texts(20)), tokenizer_dir=tok)  # imports
    documents, peaks = [text * 4 for text in texts(60)], []
    for times in (1, 6):
        path = tmp_path / f"{times}.jsonl"
        with open(path, "w", encoding="utf-8") as f:
            f.writelines(json.dumps({"text": f"{i} {text}"}) + "\n" for i in range(times) for text in documents)
        gc.collect()  # a tokenizer with its cache is a cycle
        tracemalloc.start()
        run(tmp_path / str(times), input=path, tokenizer_dir=tok)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert path.stat().st_size > 900_000
    assert peaks[1] < peaks[0] + 400_000, peaks  # 0.26 MB are lists of the units, which are small here


def test_a_directory_of_an_older_version_is_made_anew(tmp_path, tok, capsys):
    path = write_jsonl(tmp_path / "x.jsonl", texts(30))
    run(tmp_path / "out", input=path, tokenizer_dir=tok)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))
    manifest["info"]["prepare"] = 1  # when entries had other keys
    manifest["info"]["inputs"] = [{"path": str(path), "size": 1, "mtime_ns": 1, "sha256": "0" * 64}]
    (tmp_path / "out" / "inputs.tsv").unlink()
    del manifest["crc32"]
    write_record(tmp_path / "out" / "manifest.json", manifest)
    with pytest.raises(UserError, match="differs in the version of prepare.py; use another"):
        run(tmp_path / "out", input=path, tokenizer_dir=tok)
    assert run(tmp_path / "out", input=path, tokenizer_dir=tok, overwrite=True) == 0
    assert "is made anew: the version of prepare.py" in capsys.readouterr().out
    assert run(tmp_path / "out", input=path, tokenizer_dir=tok) == 0 and "up to date" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["cut", "one line without fields"])
def test_a_damaged_list_of_inputs_is_no_traceback(tmp_path, tok, capsys, damage):
    path = write_jsonl(tmp_path / "x.jsonl", texts(30))
    run(tmp_path / "out", input=path, tokenizer_dir=tok)
    listed = tmp_path / "out" / "inputs.tsv"
    whole = listed.read_text(encoding="utf-8")
    listed.write_text(whole[: len(whole) // 2] + "\n" if damage == "cut" else whole + "x\n", encoding="utf-8")
    capsys.readouterr()
    assert run(tmp_path / "out", input=path, tokenizer_dir=tok) == 0
    assert "is made anew: nothing complete is there yet" in capsys.readouterr().out
    assert listed.read_text(encoding="utf-8").count("\n") == whole.count("\n")
    assert run(tmp_path / "out", input=path, tokenizer_dir=tok) == 0 and "up to date" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "out_dir", "tokenizer_dir", "command"), [
    ("text", "data/shakespeare", "", "pretrain.py config/shakespeare.py"),
    ("text", "data/demo/", "data/demo", "pretrain.py config/demo.py --sample_prompts='One evening'"),
    ("chat", "data/demo_chat", "data/demo",
     "sft.py config/demo_sft.py --epochs=2.2 --sample_prompts='What is len for?'"),
    ("chat", "data/real_chat", "out/smollm2/",
     "sft.py config/real_sft.py --sample_prompts='What does the method str.isidentifier do?'"),
    ("preference", "data/demo_pairs", "", "dpo.py config/demo_dpo.py"),
    # a config whose command has a place for a path, or only plans
    ("text", "data/field", "", "pretrain.py config/demo.py --data_dir=data/field --out_dir=out/field\n"
     "(on a GPU with config/small.py)"),
    ("text", "data/llama_1b", "", "pretrain.py config/demo.py --data_dir=data/llama_1b --out_dir=out/my_llama_1b\n"
     "(on a GPU with config/small.py)"),
    # data of one's own
    ("text", "data/my x", "",
     "pretrain.py config/demo.py --data_dir='data/my x' --out_dir='out/my x'\n(on a GPU with config/small.py)"),
    ("text", "/x/real_sft", "out/run", "pretrain.py config/demo.py --data_dir=/x/real_sft --out_dir=out/my_real_sft\n"
     "(on a GPU with config/small.py)"),
    ("text", "data/x", "out/smollm2",
     "pretrain.py config/continue.py --init_from=out/smollm2 --data_dir=data/x --out_dir=out/x"),
    ("chat", "data/x", "data/demo", "sft.py config/demo_sft.py --init_from=MODEL --data=data/x --out_dir=out/x\n"
     "(on a GPU with config/sft.py)"),
    ("chat", "data/x", "out/run", "sft.py config/demo_sft.py --init_from=out/run --data=data/x --out_dir=out/x\n"
     "(on a GPU with config/sft.py)"),
    ("chat", "data/x", "out/run/latest", "sft.py config/demo_sft.py --init_from=out/run/latest --data=data/x "
     "--out_dir=out/x\n(on a GPU with config/sft.py)"),
    ("chat", "data/demo_chat", "out/smollm2",
     "sft.py config/real_sft.py --init_from=out/smollm2 --data=data/demo_chat --out_dir=out/demo_chat"),
    ("preference", "data/x", "", "dpo.py config/demo_dpo.py --init_from=MODEL --data=data/x --out_dir=out/x\n"
     "(on a GPU with config/dpo.py)"),
])  # fmt: skip
def test_the_next_command_fits_the_data(tmp_path, monkeypatch, kind, out_dir, tokenizer_dir, command):
    """A config's own command would refuse to run where another run has taken its out_dir."""
    monkeypatch.chdir(tmp_path)
    files = ("out/smollm2/config.json", "out/run/log.jsonl", "out/run/latest/config.json", "data/demo/tokenizer.json")
    for name in files:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}", encoding="utf-8")
    assert prepare.next_command(kind, Path(out_dir), tokenizer_dir) == f"python {command}"
