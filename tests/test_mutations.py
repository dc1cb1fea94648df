"""Damage to any file that a run reads back is named in one line, or what is read is the same.

Each try changes one file of a directory at random: prepared text, conversations and pairs, a checkpoint, the base of an
adapter, the reference of dpo.py, a log, a compiled library. Nothing outside of the directory may be opened.
"""

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import saved
import torch

import prepare
from groundup.align.losses import read_reference, save_reference
from groundup.compile_c import compile_c
from groundup.errors import line_of
from groundup.tokens.batches import TextCorpus
from groundup.tokens.conversations import ChatCorpus
from groundup.tokens.pairs import PairCorpus
from groundup.tokens.token_files import record_sum
from groundup.tokens.training import train
from groundup.train import checkpoint, huggingface
from groundup.train.log import RunLog, read_events
from groundup.train.lora import LoRAConfig, set_trainable
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

TRIES = 64
KEYS = {key: v for key, v in vars(prepare).items() if isinstance(v, bool | int | float | str) and key.islower()}
SMALL = {"workers": 1, "near": 0.0, "rules": "length=1..", "val_fraction": 0.2, "pack": 0}
MADE_OF = {"checkpoint": "a", "pairs": "b"}
BLOCK = 16


# ---- what is there, and how it is opened: (directory) -> what a run gets from it -------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("good")
    tokenizer = train(["Hello world, 你好世界！ one two three\n"] * 20, vocab_size=384)
    tokenizer.save(top / "tokenizer")
    talks = [[("user", f"Q {i}?"), ("assistant", f"A {i}! " * (i % 5 + 1))] for i in range(30)]
    talks = [{"messages": [{"role": role, "content": content} for role, content in talk]} for talk in talks]
    pairs = [{"prompt": f"Q {i}?", "chosen": f"good {i} " * (i % 4 + 1), "rejected": f"bad {i}"} for i in range(30)]
    texts = [{"text": f"Document {i}: " + "hello world, 你好 " * (i % 7 + 1)} for i in range(60)]
    for kind, rows in (("text", texts), ("chat", talks), ("preference", pairs)):
        path = top / f"{kind}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        own = {"kind": kind, "input": str(path), "out_dir": str(top / kind), "pack": BLOCK if kind == "text" else 0}
        if kind != "preference":
            own["tokenizer_dir"] = str(top / "tokenizer")
        assert prepare.main(KEYS | SMALL | own) == 0

    torch.manual_seed(0)
    model = Transformer(ModelConfig(384, block_size=32, n_layer=2, n_head=2, n_embd=16))
    step = saved.save(top / "checkpoint", 7, model, tokenizer)
    shutil.copytree(step, top / "adapted" / "base", ignore=shutil.ignore_patterns("checksums.json", "*.pt"))
    set_trainable(model, "lora", LoRAConfig(rank=2, alpha=4))
    saved.save(top / "adapter", 3, model, tokenizer, base=top / "adapted" / "base")

    (top / "reference").mkdir()
    save_reference(top / "reference" / "reference.safetensors", torch.randn(20, 2), MADE_OF)
    log_of(top / "log", 0)
    (top / "cache").mkdir()
    (top / "cache" / "one.c").write_text("int number(void) { return 1; }", encoding="utf-8")
    library(top / "cache")
    return top


def text(directory: Path, pack: bool = False) -> list:
    """Every window of training and validation; the tokenizer is compared as pretrain.py does."""
    corpus = TextCorpus(str(directory), BLOCK, pack)
    corpus.train[0].check_tokenizer(Tokenizer.load(directory).fingerprint())
    assert corpus.most_documents()
    (data,) = corpus.train
    starts = np.arange(data.n_rows if pack else (data.n_tokens - 1) // BLOCK) * (1 if pack else BLOCK)
    windows = corpus.load(np.zeros(len(starts), int), starts)
    held_out = [tensor.tolist() for batch in corpus.val_batches(4, 0)["text"] for tensor in batch]
    return [windows.x.tolist(), windows.y.tolist(), held_out]


def packed(directory: Path) -> list:
    return text(directory, pack=True)


def tokenizer_of(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory.parent / "tokenizer")


def chat(directory: Path) -> list:
    corpus = ChatCorpus(str(directory), tokenizer_of(directory), 64, 1)
    rows = [
        [(ids.tolist(), mask.tolist()) for ids, mask in data.row(r)]
        for data in corpus.train
        for r in range(data.n_rows)
    ]
    return [rows, corpus.train[0].fingerprint, [data.fingerprint for data in corpus.val.values()]]


def preference(directory: Path) -> list:
    corpus = PairCorpus(str(directory), tokenizer_of(directory), 64, 1)
    return [corpus.fingerprint, corpus.train[0].tokens.tolist()]


def state_of(directory: Path) -> list:
    path = checkpoint.find_latest(directory, lambda line: None)
    weights = huggingface.load_model(path).state_dict()
    states = [checkpoint.read_state(path / name) for name in ("train_state.pt", "rank_00000.pt")]
    return [{name: tensor.tolist() for name, tensor in weights.items()}, repr(states)]


def adapted(directory: Path) -> list:
    """The model of an adapter, whose base lies in `directory`. Its own files are not changed here."""
    adapter = directory.parent / "adapter" / "step_000003"
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = str(directory / "base")
    (adapter / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return [tensor.tolist() for tensor in huggingface.load_model(adapter).state_dict().values()]


def reference(directory: Path) -> list:
    table = read_reference(directory / "reference.safetensors", MADE_OF)
    return ["computed again" if table is None else table.tolist()]


def log_of(directory: Path, step: int = 8) -> list:
    """A resume after step 8: what it says, and the events. With step 0 the log is made."""
    if not step:
        for n in (4, 8):
            (directory / f"step_{n:06d}").mkdir(parents=True)
    log = RunLog(str(directory), 12, step)
    for n in range(1, 0 if step else 9):
        log.write("train", n, {"loss": 1.5 + n / 7})
        if n % 4 == 0:
            log.write("eval", n, {"val_loss": 2.25 - n / 7})
            log.write("save", n, {"path": f"step_{n:06d}"})
    log.close()
    return read_events(directory / "log.jsonl")


def library(directory: Path) -> list:
    """In a process of its own: a library that is cut short would end it."""
    child = os.fork()
    if child == 0:
        os.environ["XDG_CACHE_HOME"] = str(directory)
        os._exit(compile_c(directory / "one.c").number())
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


KINDS: dict[str, tuple[Callable[[Path], list], str]] = {  # and the files that are changed
    "text": (text, r"[tvm]*.[nj]*"),
    "packed": (packed, r"[tm]*.[nj]*"),
    "chat": (chat, r"[tvm]*.[nj]*"),
    "preference": (preference, r"[tvm]*.json*"),
    "checkpoint": (state_of, "step_000007/*"),
    "adapted": (adapted, "base/*.safetensors"),
    "reference": (reference, "*"),
    "log": (log_of, "log.jsonl"),
    "cache": (library, "groundup/*.so"),
}


# ---- how a file is changed -------------------------------------------------------------------------------------------


def flip(raw: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(raw))
    return raw[:place] + bytes([raw[place] ^ 1 << rng.randrange(8)]) + raw[place + 1 :]


def zero(raw: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(raw))
    return (raw[:place] + bytes(min(64, len(raw) - place)) + raw[place + 64 :])[: len(raw)]


def retyped(raw: bytes, rng: random.Random, names: bool = False) -> bytes:
    """A JSON file with another value at a random place, and the sum that belongs to it. names: of files."""
    value = json.loads(raw)
    places = [(part, key) for part, key, old in leaves(value) if not names or str(old).endswith((".npy", ".jsonl"))]
    part, key = rng.choice(places)
    values = [5, "5", None, [], {}, -1, 1.5, True, 10**30, "x" * 99, [5], {"a": 5}]
    part[key] = rng.choice(
        ["../outside/secret", "/etc/hostname", "..", ".", "", "a/../../outside/secret"] if names else values
    )
    if value.pop("crc32", None):
        value["crc32"] = record_sum(value)
    return json.dumps(value).encode()


def renamed(raw: bytes, rng: random.Random) -> bytes:
    return retyped(raw, rng, names=True)


def leaves(value: dict | list) -> list[tuple]:
    found = []
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        found.append((value, key, part))
        if isinstance(part, dict | list) and key != "info":
            found += leaves(part)
    return found


CHANGES = [
    flip, flip, flip, zero, lambda raw, rng: raw[: rng.randrange(len(raw))], lambda raw, rng: raw + b"\0more",
    lambda raw, rng: b"", lambda raw, rng: raw[::-1],
]  # fmt: skip


def change(path: Path, rng: random.Random) -> str:
    """Change a file; return how."""
    how = rng.randrange(len(CHANGES) + 4)
    raw = path.read_bytes()
    if how < len(CHANGES):
        path.unlink()  # of a library that is loaded the old file stays
        path.write_bytes(CHANGES[how](raw, rng))
    elif path.suffix == ".json" and how < len(CHANGES) + 2:
        path.write_bytes((retyped if how % 2 or path.name != "manifest.json" else renamed)(raw, rng))
    else:
        path.unlink()
        if how % 2:
            os.mkfifo(path)
    return f"{path.name} {how}"


# ---- the test --------------------------------------------------------------------------------------------------------

OPENED: list[str] = []  # files that were opened outside


@pytest.fixture(scope="module")
def watched() -> None:
    def note(event: str, arguments: tuple) -> None:
        if event == "open" and ("outside" in str(arguments[0]) or str(arguments[0]) == "/etc/hostname"):
            OPENED.append(str(arguments[0]))

    sys.addaudithook(note)  # cannot be removed


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes and forks")
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_named_or_harmless(good: Path, tmp_path: Path, watched: None, capsys, kind: str) -> None:
    open_it, pattern = KINDS[kind]
    source = "text" if kind == "packed" else kind
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"secret")
    for name in ("tokenizer", "adapter"):
        shutil.copytree(good / name, tmp_path / name)
    work = tmp_path / source
    shutil.copytree(good / source, work)
    OPENED.clear()
    right = open_it(work)
    counts = {"named": 0, "same": 0}
    for number in range(-(-TRIES // len(KINDS))):
        rng = random.Random(f"{kind} {number}")
        shutil.rmtree(work)
        shutil.copytree(good / source, work)
        how = change(rng.choice(sorted(path for path in work.glob(pattern) if path.is_file())), rng)
        capsys.readouterr()
        try:
            found = open_it(work)
        except Exception as error:
            line = line_of(error)
            assert str(tmp_path) in line and "\n" not in line, (how, error)
            counts["named"] += 1
        else:
            named = kind == "log" and "log: " in capsys.readouterr().out
            assert named or found == right or found == ["computed again"], how
            counts["named" if named else "same"] += 1
        assert not OPENED, how
    print(kind, counts)
