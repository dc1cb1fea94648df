"""Damaged and forged files of a checkpoint: each is refused in one line or does no harm; none runs code, none takes 5
seconds or 500 MB. Whoever opens a checkpoint from elsewhere trusts this table."""

import gzip
import json
import os
import pickle
import re
import struct
import sys
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import saved

from groundup.errors import UserError
from groundup.files import readers, records, streams, untrusted
from groundup.tokens import templates
from groundup.tokens.training import train
from groundup.train import checkpoint, huggingface
from groundup.train.log import RunLog
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

CONVERSATION = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A checkpoint whose pattern and chat template are not ours."""
    tokenizer = train(["Hello world, 你好世界！\n"] * 20, vocab_size=384)
    config = json.loads(tokenizer.files["tokenizer_config.json"]) | {"chat_template": TEMPLATE.format("")}
    files = tokenizer.files | {"tokenizer_config.json": json.dumps(config).encode()}
    model = Transformer(ModelConfig(384, block_size=32, n_layer=2, n_head=2, n_embd=16))
    return saved.save(tmp_path_factory.mktemp("good"), 7, model, Tokenizer(files))


TEMPLATE = "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}<|im_end|>{{% endfor %}}{}"


@pytest.fixture
def forged(good, tmp_path) -> Path:
    """A copy, without checksums.json: as somebody else would give it."""
    copy = tmp_path / "run" / good.name
    copy.mkdir(parents=True)
    for path in good.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "checksums.json").unlink()
    return copy


def opened(step_dir: Path) -> None:
    """Open all that a checkpoint holds, as training, sampling and scoring do."""
    directory = checkpoint.resolve(step_dir)
    huggingface.is_reward_model(directory)
    tokenizer = Tokenizer.load(directory)
    tokenizer.encode("Hello world, it's 2024!\n\n" + "a" * 100)
    if tokenizer.turn_end_id >= 0:
        tokenizer.render(CONVERSATION)
    huggingface.load_model(directory)
    huggingface.weights_fingerprint(directory)
    for name in ("train_state.pt", "rank_00000.pt"):
        checkpoint.read_state(directory / name)


def refusal(action: Callable[[], object]) -> str:
    """The line by which it is refused, "" if it is not. It must keep to the bounds of time and memory."""
    bounded = os.access("/proc/self/clear_refs", os.W_OK)
    if bounded:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    before, begin, line = memory(), sum(os.times()[:4]), ""  # of a CPU: the machine may be busy
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action()
    except UserError as error:
        line = str(error)
        assert line and "\n" not in line, line
    assert sum(os.times()[:4]) - begin < 5
    assert not bounded or memory("VmHWM") - before < 500e6
    return line


def memory(which: str = "VmRSS") -> int:
    if not os.path.exists("/proc/self/status"):
        return 0
    return 1024 * int(re.search(rf"{which}:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1])


def test_the_copy_is_good(forged):
    assert refusal(lambda: opened(forged)) == ""


# ---- damage: every file, five ways ----------------------------------------------------------------------------------

NAMES = [
    "checksums.json", "config.json", "generation_config.json", "model.safetensors", "rank_00000.pt", "tokenizer.json",
    "tokenizer_config.json", "train_state.pt",
]  # fmt: skip
DAMAGES = {
    "flip": lambda b: b[: len(b) // 2] + bytes([b[len(b) // 2] ^ 0x80]) + b[len(b) // 2 + 1 :],
    "truncate": lambda b: b[: len(b) // 2],
    "delete": None,
    "append": lambda b: b + b"\0garbage",
    "zero": lambda b: bytes(len(b)),
}


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_file_is_named(forged, name):
    """As a copy that was cut short or a power cut leaves it."""
    (forged / name).write_bytes(b"")
    assert f"{forged}/{name}" in refusal(lambda: opened(forged))


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_one_line(good, forged, name):
    """With checksums.json it is always found; without it nothing else happens."""
    names = sorted(path.name for path in good.iterdir())
    assert names == NAMES
    for how, damage in DAMAGES.items():
        for sums in (True, False):
            for other in NAMES:
                (forged / other).write_bytes((good / other).read_bytes())
            (forged / name).unlink()
            if damage:
                (forged / name).write_bytes(damage((good / name).read_bytes()))
            if not sums:
                (forged / "checksums.json").unlink(missing_ok=True)
            line = refusal(lambda: opened(forged))
            found = sums and (name, how) != ("checksums.json", "delete")
            assert not found or "checksum" in line or name in line, (how, line)


# ---- forged files: (file, content or how to make it, words of the refusal; "" = it may do no harm) ------------------


def changed(**values: object) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(json.loads(content) | values).encode()


def pattern(expression: str) -> Callable[[bytes], bytes]:
    def forge(content: bytes) -> bytes:
        description = json.loads(content)
        description["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = expression
        return json.dumps(description).encode()

    return forge


def template(text: str) -> Callable[[bytes], bytes]:
    return changed(chat_template=TEMPLATE.format(text))


def header(text: str | bytes, n_bytes: int | None = None, data: bytes = b"") -> Callable[[bytes], bytes]:
    text = text if isinstance(text, bytes) else text.encode()
    return lambda content: struct.pack("<Q", len(text) if n_bytes is None else n_bytes) + text + data


def weights(change: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    def forge(content: bytes) -> bytes:
        size = struct.unpack("<Q", content[:8])[0]
        entries = json.loads(content[8 : 8 + size])
        change(entries)
        return header(json.dumps(entries))(b"") + content[8 + size :]

    return forge


class Bomb:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("executed",)


EMBEDDING = "model.embed_tokens.weight"
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.mkdir('executed') }}",
    "{{ self.__init__.__globals__ }}", "{{ lipsum.__globals__['os'].mkdir('executed') }}",
    "{{ messages.append(1) }}", "{{ (messages|attr('__class__')) }}", "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.mkdir('executed') }}", "{{ '{0.__class__}'.format(1) }}",
    "{% set x = raise_exception.__globals__ %}{{ x }}", "{{ strftime_now.__code__ }}",
]  # fmt: skip
FORGED = [
    # sizes that are not those of the weights
    ("config.json", changed(vocab_size=10**12), "embed_tokens.weight has shape"),
    ("config.json", changed(vocab_size=10**30), "must be a positive whole number"),
    ("config.json", changed(num_hidden_layers=10**5), "2 layers, its config has 100000"),
    ("config.json", changed(num_hidden_layers=1000), "2 layers, its config has 1000"),
    ("config.json", changed(hidden_size=2**20), "has shape"),
    ("config.json", changed(intermediate_size=10**12), "has shape"),
    ("config.json", changed(head_dim=2**30), "too many for a table"),
    ("config.json", changed(num_attention_heads=10**9, num_key_value_heads=10**9), "has shape"),
    ("config.json", changed(max_position_embeddings=10**12), "too many for a table"),
    # wrong types
    *[("config.json", changed(**{key: value}), f"{key} must be a positive") for value in ("x", [], {}, 1e308, -1, True)
      for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")],
    ("config.json", changed(rms_norm_eps="x"), "rms_norm_eps must be a positive number"),
    ("config.json", changed(rope_theta=[1]), "rope_theta must be a positive number"),
    ("config.json", changed(rope_scaling="x", rope_parameters=[]), "not an object"),
    ("config.json", changed(rope_scaling={"rope_type": {}}), "supported are default"),
    ("config.json", changed(rope_scaling={"rope_type": "yarn", "factor": {}, "original_max_position_embeddings": 8}),
     "factor must be a positive number"),
    ("config.json", changed(model_type=["llama"]), "model_type"),
    ("config.json", changed(architectures=5), ""),
    ("config.json", b"[]", "holds a list"),
    ("config.json", b"\xff", "damaged"),
    ("config.json", b'{"vocab_size": ' + b"9" * 10_000 + b"}", "damaged"),
    ("generation_config.json", changed(eos_token_id={"a": [1]}), ""),
    ("generation_config.json", changed(eos_token_id=[[1], "x", 10**30]), "damaged"),
    ("generation_config.json", b"5", "holds a int"),
    ("tokenizer_config.json", changed(chat_template=5), ""),
    ("tokenizer_config.json", changed(eos_token=[]), "damaged"),
    ("tokenizer.json", changed(model={"type": "BPE", "vocab": [], "merges": 5}), "damaged"),
    ("tokenizer.json", changed(added_tokens=[{"id": 2**30, "content": "x", "special": True}]), "id 1073741824, but"),
    ("tokenizer.json", changed(added_tokens=[{"id": -5, "content": "x", "special": True}]), "not a number"),
    ("tokenizer.json", changed(pre_tokenizer=5), "damaged"),
    # nested a hundred thousand deep, a million values, a size that no such file has
    *[(name, DEEP.encode(), "nests too deep") for name in NAMES if name.endswith(".json")],
    ("config.json", b'{"a": [' + b"[]," * 5_000_000 + b"[]]}", "values"),
    ("tokenizer.json", b'{"a": [' + b"[]," * 5_000_000 + b"[]]}", "values"),
    # regular expressions
    ("tokenizer.json", pattern(r"(a+)+$"), ""),
    ("tokenizer.json", pattern(r"(?=(a+)+$)(a|aa)+$|."), "cannot"),
    ("tokenizer.json", pattern(r"((a*)*)*\1b|."), "pattern cannot be used"),
    ("tokenizer.json", pattern(r"(?:a{1000}){1000}"), "damaged"),
    ("tokenizer.json", pattern("("), "damaged"),
    ("tokenizer.json", pattern("(" * 10_000 + ")" * 10_000), "damaged"),
    # chat templates
    *[("tokenizer_config.json", template(escape), "") for escape in ESCAPES],
    ("tokenizer_config.json", template("{% for i in range(100000) %}{% for j in range(100000) %}" + 2 * "{% endfor %}"),
     "takes more than"),
    ("tokenizer_config.json", template("{{ 'a' * 10**11 }}"), "template cannot be used"),
    ("tokenizer_config.json", template("{{ 'a'|center(10**11) }}"), "template cannot be used"),
    ("tokenizer_config.json", template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "refuses"),
    ("tokenizer_config.json", template("{{ 1 / 0 }}"), "refuses"),
    ("tokenizer_config.json", template("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"), "damaged"),
    ("chat_template.jinja", b"{{ '\xff\xfe' }}", "damaged"),
    # pickles, where state is, and where weights and text should be
    *[(name, lambda _: pickle.dumps(Bomb()), "") for name in NAMES],
    ("model.bin", lambda _: pickle.dumps(Bomb()), ""),
    # pointers of Git LFS in their place
    *[(name, untrusted.LFS_POINTER + b"v1\nsize 9\n", "git lfs pull") for name in NAMES],
    # safetensors
    ("model.safetensors", header(b"", 2**63), "header"),
    ("model.safetensors", header("{}", 10**6), "cannot read"),
    ("model.safetensors", header('{"a": ' + DEEP + "}"), "cannot read"),
    ("model.safetensors", header('{"a": 5}'), "cannot read"),
    ("model.safetensors", header('{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}', None, b"1234"),
     "cannot read"),
    ("model.safetensors", weights(lambda e: e[EMBEDDING].update(shape=[2**40, 2**40])), "cannot read"),
    ("model.safetensors", weights(lambda e: e[EMBEDDING].update(dtype="I32")), "is I32"),
    ("model.safetensors", weights(lambda e: e[EMBEDDING].update(data_offsets=[0, 2**40])), "cannot read"),
    ("model.safetensors", weights(lambda e: e.update({"model.x": e.pop(EMBEDDING)})), "embed_tokens.weight is missing"),
    ("model.safetensors", weights(lambda e: e.update({"model.layers.x.y": e[EMBEDDING]})), "cannot read"),
    # names outside of the directory
    ("checksums.json", b'{"/dev/zero": "crc32 00000000"}', "it names '/dev/zero'"),
    ("checksums.json", b'{"../../good": "crc32 00000000"}', "it names"),
    ("checksums.json", b'{"": 5, ".": 6}', "it names"),
]  # fmt: skip


@pytest.mark.parametrize("name, content, words", FORGED, ids=[f"{name}-{k}" for k, (name, *_) in enumerate(FORGED)])
def test_a_forged_file_is_one_line(forged, monkeypatch, name, content, words):
    monkeypatch.chdir(forged.parent)
    path = forged / name
    if callable(content):
        content = content(path.read_bytes() if path.exists() else b"{}")
    path.write_bytes(content)
    line = refusal(lambda: opened(forged))
    assert words in line and (line or not words), line
    assert not os.path.exists("executed")


def test_a_template_that_explodes_later_is_stopped(forged, monkeypatch):
    """It behaves when it is tried on a few messages. After the first conversation it is given up."""
    monkeypatch.setattr(templates, "RENDER_S", 0.3)
    loop = "{% if messages|length > 9 %}" + "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2 + "{% endif %}"
    path = forged / "tokenizer_config.json"
    path.write_bytes(template(loop)(path.read_bytes()))
    tokenizer = Tokenizer.load(forged)
    tokenizer.render(CONVERSATION)
    for _ in range(100):
        assert "takes more than 0.3 s" in refusal(lambda: tokenizer.render(CONVERSATION * 5))


@pytest.mark.skipif(sys.platform != "linux", reason="no copy is made elsewhere")
def test_a_copy_that_waits_for_ever_is_ended(monkeypatch):
    """As one may, whose lock another thread held when it was made: it takes no time of a CPU."""
    monkeypatch.setattr(untrusted, "STUCK_S", 1)
    assert untrusted.why_unusable(lambda: time.sleep(99)) == "it takes more than 1 s"


def test_a_compressed_state_is_refused(forged):
    """A thousand times larger in memory than on the disk."""
    state = forged / "train_state.pt"
    with zipfile.ZipFile(state) as parts:
        found = {part: parts.read(part) for part in parts.namelist()}
    with zipfile.ZipFile(state, "w", zipfile.ZIP_DEFLATED) as parts:
        for part, content in found.items():
            parts.writestr(part, content + bytes(2**20))
    assert "refused to load" in refusal(lambda: opened(forged))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_or_a_device_in_place_of_a_file_does_not_wait(forged, name):
    (forged / name).unlink(missing_ok=True)
    os.mkfifo(forged / name)
    line = refusal(lambda: opened(forged))
    assert f"{name}: is no regular file" in line or "refused to load" in line
    (forged / name).unlink()
    (forged / name).symlink_to("/dev/zero")
    line = refusal(lambda: opened(forged))
    assert "is no regular file" in line or "refused to load" in line


def test_a_pipe_as_a_log_does_not_wait(tmp_path):
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(OSError, match="is no regular file"):
        RunLog(str(tmp_path), 10, 0)


def test_a_bomb_is_named_and_stopped(tmp_path, monkeypatch):
    """What came before is kept; the rest is reported like a file that is cut."""
    monkeypatch.setattr(streams, "BOMB_BYTES", 2**22)
    rows = gzip.compress(b'{"text": "a"}\n' * 10, mtime=0)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(rows + gzip.compress(b"a" * 2**24, mtime=0))
    report = records.Report()
    found = []
    refusal(lambda: found.extend(readers.read_documents(str(path), report=report)))
    assert len(found) == 10 and any("bomb" in detail for *_, detail in report.places)
