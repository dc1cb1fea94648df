"""evaluate.py and scores/rows.py: whole commands, on one rank and on two; scores of rows against transformers."""

import errno
import json
import math
import os
import random
import re
import runpy
import shutil
import sys
from pathlib import Path

import forks
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import evaluate
import prepare
from configurator import is_key
from groundup.align import reward_model
from groundup.align.reward_model import RewardModel
from groundup.errors import UserError
from groundup.files.answer_files import write_settings
from groundup.files.text_keys import as_score
from groundup.scores import domains, likelihood, tables
from groundup.scores import rows as row_scores
from groundup.tokens.training import train
from groundup.train import huggingface
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
BLOCK = 96
WORDS = {"zh": "模型 给 每 一段 文字 的 概率 。", "en": "A model of language is it, a text"}
rng = random.Random(0)
TEXTS = {name: (" " * (name == "en")).join(rng.choices(words.split(), k=400)) for name, words in WORDS.items()}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "你好吗?"},
    {"role": "assistant", "content": "很好, thanks."},
]
ROWS = [
    {"text": TEXTS["zh"], "source": "book", "loss": "old", "ifd": 3},  # of an earlier scoring
    {"prompt": "What?", "response": "That."},
    {"messages": [*CHAT, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Sun."}], "id": 7},
    {"messages": [{"role": "assistant", "content": "Hello."}]},
    {"text": " "},
    {"prompt": "Go on.", "response": "word " * 100},
    {"messages": CHAT[:2]},
    "a text by itself",
    {"unknown": 1},
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """model/ and reward/, the texts zh.txt and en.txt, rows.jsonl with one line that is not JSON."""
    folder = tmp_path_factory.mktemp("evaluate")
    tokenizer = train([*WORDS.values(), "What? That. 你好"] * 3, 384)
    cfg = ModelConfig(tokenizer.vocab_size, block_size=BLOCK, n_layer=2, n_head=4, n_kv_head=2, n_embd=32)
    torch.manual_seed(0)
    model = Transformer(cfg)
    model.embed_tokens.weight.data *= 20
    for name, written, of in (("model", huggingface, model), ("reward", reward_model, RewardModel(cfg))):
        (folder / name).mkdir()
        written.write_model(folder / name, of, tokenizer)
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    (folder / "rows.jsonl").write_text("\n".join([*lines, "{broken"]), encoding="utf-8")
    return folder


COMMON = ["--device=cpu", "--dtype=float32"]


@pytest.fixture
def run(base, monkeypatch, capsys):
    """run(*flags) -> (what was printed, the error's line) of evaluate.py in this process."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def start(*flags: str) -> tuple[str, str]:
        flags = (*COMMON, *flags)
        flags = flags if any(f.startswith("--init_from") for f in flags) else (f"--init_from={base}/model", *flags)
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *flags])
        error = ""
        try:
            runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
        except (ValueError, SystemExit) as problem:
            assert isinstance(problem, SystemExit) or isinstance(problem, UserError)
            error = str(problem)
        return capsys.readouterr().out, error

    return start


def perplexity_flags(base: Path) -> list[str]:
    return [f"--data=zh={base}/zh.txt,{base}/en.txt", "--stride=20"]


# ---- perplexity -----------------------------------------------------------------------------------------------------


def test_perplexity_as_a_table_and_as_json(run, base, tmp_path):
    printed, error = run(*perplexity_flags(base), f"--out={tmp_path}/new/scores.json", "--limit=1")
    assert not error
    written = json.loads((tmp_path / "new/scores.json").read_text(encoding="utf-8"))
    found = written["results"]["perplexity"]
    assert set(found["domains"]) == {"zh", "en"}
    for name, of in found["domains"].items():
        line = next(line for line in printed.splitlines() if line.startswith(name))
        assert f"{of['bits_per_byte']:.4f}" in line.split()
        assert of["bytes"] == len(TEXTS[name].encode())
        assert of["bits_per_byte"] * of["bytes"] == pytest.approx(of["bits_per_character"] * of["characters"])
    assert written["settings"]["stride"] == 20
    assert written["model"]["weights"] == huggingface.weights_fingerprint(base / "model")
    assert written["model"]["architecture"]["n_embd"] == 32
    assert written["run"]["versions"]["torch"] == torch.__version__
    assert not list((tmp_path / "new").glob("*.tmp"))


def test_weights_of_8_bits_cost_little(run, base, tmp_path):
    bits = {}
    for weights in ("full", "int8"):
        _, error = run(*perplexity_flags(base), f"--out={tmp_path}/{weights}", f"--weights={weights}")
        assert not error
        written = json.loads((tmp_path / weights).read_text(encoding="utf-8"))
        bits[weights] = written["results"]["perplexity"]["domains"]["zh"]["bits_per_byte"]
    assert bits["int8"] != bits["full"] and bits["int8"] == pytest.approx(bits["full"], rel=0.005)
    assert "score and weights" in run("--score=x.jsonl", "--out=y.jsonl", "--weights=int8")[1]


@pytest.mark.dist
def test_two_ranks_give_the_same_to_the_bit(run, base, tmp_path):
    """Perplexity, and scored rows."""
    jobs = {"scores.json": perplexity_flags(base), "scored.jsonl": [f"--score={base}/rows.jsonl"]}
    for name, flags in jobs.items():
        assert run(*flags, f"--out={tmp_path}/1/{name}", "--batch_size=2")[1] == ""
    code = "import runpy, sys\n" + "".join(
        f"sys.argv = ['evaluate.py', *{[*COMMON, *flags, f'--init_from={base}/model', '--batch_size=2']},"
        f" '--out={tmp_path}/2/{name}']\nrunpy.run_path('evaluate.py', run_name='__main__')\n"
        for name, flags in jobs.items()
    )
    (tmp_path / "both.py").write_text(code, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"}
    done = forks.run([*launcher, tmp_path / "both.py"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, two = (json.loads((tmp_path / k / "scores.json").read_text(encoding="utf-8")) for k in "12")
    assert (one["run"]["ranks"], two["run"]["ranks"]) == (1, 2)
    assert one["results"] == two["results"]
    assert (tmp_path / "1/scored.jsonl").read_bytes() == (tmp_path / "2/scored.jsonl").read_bytes()
    assert done.stdout.count("(all)") == 1  # one rank speaks


# ---- rows -----------------------------------------------------------------------------------------------------------


class ByHand:
    """Sums of minus log-probabilities by transformers."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def nats(self, context: str, text: str) -> tuple[float, int]:
        """(nats, tokens) of `text` after `context`; names of special tokens are special."""
        before, own = self.ids(context), self.ids(text)
        logps = self.model(torch.tensor([before + own])).logits[0].double().log_softmax(-1)
        return -sum(logps[len(before) + i - 1, token].item() for i, token in enumerate(own)), len(own)


def scored_rows(run, base: Path, out: Path, *flags: str) -> list[dict]:
    printed, error = run(f"--score={base}/rows.jsonl", f"--out={out}", *flags)
    assert not error
    assert re.search("rows? scored", printed)
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_rows_keep_their_place_and_their_fields(run, base, tmp_path):
    rows = scored_rows(run, base, tmp_path / "scored.jsonl")
    assert len(rows) == len(ROWS) + 1
    for row, before in zip(rows, ROWS, strict=False):
        before = {"text": before} if isinstance(before, str) else before
        assert {k: v for k, v in row.items() if k not in row_scores.KEYS}.items() <= before.items()
    problems = [row.get("score_problem", "").partition(":")[0] for row in rows]
    assert problems == ["", "", "", "", "empty text", "too long", "answer missing", "", "not understood", "bad_json"]
    assert all((row["loss"] is None) == (row["bpb"] is None) == bool(p) for row, p in zip(rows, problems, strict=True))
    assert "ifd" not in rows[0] and "ifd" not in rows[7]  # documents; the one that was there is gone
    assert "ifd" not in rows[3]  # no prompt
    assert [path.name for path in tmp_path.iterdir()] == ["scored.jsonl"]


def test_older_fields_that_are_replaced_are_counted(run, base, tmp_path):
    rows = [{"text": "one", "loss": 1.0}, {"text": "two"}, {"text": "three", "ifd": 0, "bpb": 0}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    printed, _ = run(f"--score={tmp_path}/rows.jsonl", f"--out={tmp_path}/out.jsonl")
    assert "an older score, or a field of that name, replaced: 2 documents" in printed


def test_why_a_row_is_not_understood_names_what_it_was_taken_for(run, base, tmp_path):
    rows = [{"text": "one"}, {"text": None}, {"foo": 1}, {"messages": 3}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    run(f"--score={tmp_path}/rows.jsonl", f"--out={tmp_path}/out.jsonl")
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    _, null, unknown, bad_turns = [json.loads(line).get("score_problem") for line in lines]
    assert null == "not understood: no text under 'text' (keys text)"
    why = "prepare.py --text_key=KEY reads other names; neither a conversation nor a text"
    assert unknown == f"not understood: unknown format: keys foo; {why}"
    assert bad_turns == "not understood: int, not a list of turns"


def test_scores_are_those_of_transformers(run, base, tmp_path):
    rows = scored_rows(run, base, tmp_path / "scored.jsonl")
    hand = ByHand(base / "model")
    nats, n = hand.nats("<|endoftext|>", "a text by itself")
    assert (rows[7]["loss"], rows[7]["bpb"]) == pytest.approx((nats / n, nats / math.log(2) / 16), rel=1e-4)

    prompt = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    nats, n = hand.nats(prompt, "That.<|im_end|>")
    assert (rows[1]["loss"], rows[1]["bpb"]) == pytest.approx((nats / n, nats / math.log(2) / 5), rel=1e-4)
    ifd = hand.nats(prompt, "That.")[0] / hand.nats("<|endoftext|>", "That.")[0]
    assert rows[1]["ifd"] == pytest.approx(ifd, rel=1e-4)

    first = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT[:2])
    first += "<|im_start|>assistant\n"
    second = f"{first}{CHAT[2]['content']}<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    answers = [hand.nats(first, f"{CHAT[2]['content']}<|im_end|>"), hand.nats(second, "Sun.<|im_end|>")]
    nats, n = (sum(column) for column in zip(*answers, strict=True))
    n_bytes = len((CHAT[2]["content"] + "Sun.").encode())
    assert (rows[2]["loss"], rows[2]["bpb"]) == pytest.approx((nats / n, nats / math.log(2) / n_bytes), rel=1e-4)
    ifd = hand.nats(first, CHAT[2]["content"])[0] / hand.nats("<|endoftext|>", CHAT[2]["content"])[0]
    assert rows[2]["ifd"] == pytest.approx(ifd, rel=1e-4)


def test_a_document_has_the_loss_that_its_domain_has(run, base, tmp_path):
    """A long one, in windows."""
    (row,) = scored_rows(run, base, tmp_path / "scored.jsonl", "--limit=1", "--stride=20")
    run(f"--data={base}/zh.txt", "--stride=20", f"--out={tmp_path}/scores.json")
    of = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))["results"]["perplexity"]["domains"]["zh"]
    assert of["tokens"] > 2 * BLOCK
    assert (row["loss"], row["bpb"]) == pytest.approx((of["nats_per_token"], of["bits_per_byte"]))


def test_a_killed_scoring_goes_on_and_scores_nothing_twice(run, base, tmp_path, monkeypatch):
    whole = scored_rows(run, base, tmp_path / "whole.jsonl", "--batch_size=1")
    monkeypatch.setattr(row_scores, "ROWS", 3)  # at a time
    score_tokens, calls = likelihood.score_tokens, []

    def killed_at_the_third(model, rows, *more):
        calls.append(len(rows))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score_tokens(model, rows, *more)

    monkeypatch.setattr(row_scores, "score_tokens", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        run(f"--score={base}/rows.jsonl", f"--out={tmp_path}/out.jsonl", "--batch_size=1")
    (part,) = tmp_path.glob(".out.jsonl.*.part")
    assert part.read_bytes().count(b"\n") == 6
    with open(part, "ab") as f:
        f.write(b'{"text": "half a li')
    n_before = len(calls)
    printed, error = run(f"--score={base}/rows.jsonl", f"--out={tmp_path}/out.jsonl", "--batch_size=1")
    assert not error
    assert f"{tmp_path}/out.jsonl: done already: 6 rows" in printed
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()] == whole
    assert sum(calls[n_before:]) == sum("loss" in row and row["loss"] is not None for row in whole[6:])
    assert not list(tmp_path.glob(".out*"))
    for flag in ("--block_size=40", "--stride=5", "--text_key=text", "--limit=3"):  # each is another scoring
        assert len({key_of(run, base, flags) for flags in ([], [flag])}) == 2, flag
    assert len({key_of(run, base, flags) for flags in ([], ["--batch_size=3"])}) == 1


def key_of(run, base: Path, flags: list[str]) -> str:
    """Of the settings that flags make."""
    config = {"batch_size": 16, "block_size": 0, "stride": 0, "limit": 0, "text_key": "", "txt_split": "file"}
    config |= {k: type(config[k])(v) for k, v in (flag.removeprefix("--").split("=") for flag in flags)}
    settings = evaluate.text_settings(config, huggingface.load_config(base / "model"))
    tokenizer = evaluate.Tokenizer.load(base / "model")
    return row_scores.loss_key(base / "model", tokenizer, f"{base}/rows.jsonl", settings, torch.float32)


def test_prepare_reads_what_is_written(run, base, tmp_path):
    """prepare.py --score takes rows by these keys."""
    rows = scored_rows(run, base, tmp_path / "scored.jsonl")
    assert [math.isnan(as_score(row, "bpb")) for row in rows] == [row["bpb"] is None for row in rows]
    chat = [row for row in rows if row.get("ifd")]
    least = min(row["ifd"] for row in chat) + 1e-6
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps(row) for row in chat), encoding="utf-8")
    flags = [f"--input={tmp_path}/chat.jsonl", "--kind=chat", f"--score=ifd=..{least}", "--val_fraction=0"]
    flags += [f"--out_dir={tmp_path}/chat", "--workers=1", "--near=0", "--rules=min_length=off"]
    done = forks.run([sys.executable, ROOT / "prepare.py", *flags], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    split = json.loads((tmp_path / "chat/manifest.json").read_text(encoding="utf-8"))["splits"]["train"]
    kept = (tmp_path / "chat" / split["file"]).read_text(encoding="utf-8").splitlines()
    assert len(kept) == 1 < len(chat)


def test_no_row_with_a_score_is_an_error(run, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": ""}\n{"text": " "}', encoding="utf-8")
    error = run(f"--score={tmp_path}/rows.jsonl", f"--out={tmp_path}/out.jsonl")[1]
    assert error == f"score: no row of {tmp_path}/rows.jsonl has a score: empty text 2"
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_gbk_rows_are_read_and_said(run, tmp_path):
    rows = "\n".join(json.dumps({"content": text}, ensure_ascii=False) for text in (TEXTS["zh"], "文字"))
    (tmp_path / "rows.jsonl").write_bytes(rows.encode("gbk"))
    printed, error = run(f"--score={tmp_path}/rows.jsonl", f"--out={tmp_path}/out.jsonl")
    assert not error
    assert "2 of 2 rows scored" in printed
    assert "read as GB18030 (GBK), not UTF-8: 2 documents" in printed
    written = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(written[1])["content"] == "文字"


# ---- settings and mistakes ------------------------------------------------------------------------------------------


def test_data_of_one_and_of_several_tasks():
    assert evaluate.parse_data("perplexity", "a=x;y.txt,b=c:d") == {"perplexity": "a=x;y.txt,b=c:d"}
    assert evaluate.parse_data("mmlu", "mmlu: DIR") == {"mmlu": "DIR"}
    found = evaluate.parse_data("mmlu, perplexity", "perplexity: zh=a.txt,b.txt ; mmlu:C:/D;")
    assert found == {"mmlu": "C:/D", "perplexity": "zh=a.txt,b.txt"}
    assert list(found) == ["mmlu", "perplexity"]


@pytest.mark.parametrize("tasks, data, why", [
    ("mmul", "x", "there is no task 'mmul'; choose from perplexity"),
    ("", "x", "there is no task ''"),
    ("mmlu,ceval", "mmlu: x; ceval: y; mmlu: z", "names a task twice"),
    ("perplexity,perplexity", "x", "tasks='perplexity,perplexity' or data='x' names a task twice"),
    ("perplexity", "", "data must be given for tasks='perplexity'; write --data='FILES'"),
    ("mmlu,perplexity", "mmlu: x", "write --data='mmlu: FILES; perplexity: FILES'"),
    ("mmlu,perplexity", "mmlu: x; ceval: y", "for tasks='mmlu,perplexity', got data='mmlu: x; ceval: y'"),
])  # fmt: skip
def test_tasks_and_data_that_do_not_go_together(tasks, data, why):
    with pytest.raises(UserError, match=re.escape(why)):
        evaluate.parse_data(tasks, data)


@pytest.mark.parametrize("flags, why", [
    (["--data=nowhere.txt"], "no file matches 'nowhere.txt'"),
    (["--data={base}/zh.txt", "--block_size=97"], "block_size=97 must be from 1 to the model's 96"),
    (["--data={base}/zh.txt", "--block_size=20", "--stride=21"], "stride=21 must be from 1 to block_size=20"),
    (["--data={base}/zh.txt", "--batch_size=0"], "batch_size must be at least 1"),
    (["--data={base}/zh.txt", "--init_from={base}/reward"], "holds a reward model, which is for the tasks preference"),
    (["--data={base}/zh.txt", "--init_from=nowhere"], "no such directory"),
    (["--data={base}/zh.txt", "--init_from={base}/bare"], "no tokenizer.json or tokenizer.model in {base}/bare"),
    (["--score={base}/rows.jsonl"], "score needs out, the file for the scored rows"),
    (["--score={base}/rows.jsonl", "--out=x.json"], "for the scored rows, called .jsonl; got 'x.json'"),
    (["--score={base}/rows.jsonl", "--data=x", "--out=x.jsonl"], "score and data are both given"),
    (["--tasks=win_rate", "--data=a", "--judge=m"], "judge, base_url and out belong together"),
    (["--tasks=win_rate", "--data={base}/rows.jsonl", "--init_from={base}/reward"], "needs two files of answers"),
    (["--tasks=perplexity", "--data={base}/zh.txt", "--reference=x"], "reference='x' is only for preference"),
    (["--tasks=preference", "--data={base}/rows.jsonl", "--init_from={base}/reward", "--reference={base}/model"],
     "reference is of a language model"),
    (["--tasks=preference", "--data={base}/rows.jsonl", "--init_from={base}/model", "--reference=out/nope"],
     "reference='out/nope': no such directory"),
    (["--dat=x"], "did you mean 'data'"),
    (["--score={base}/rows.jsonl", "--out=x.jsonl", "--beside=x.json"], "score and beside are both given"),
    (["--score={base}/rows.jsonl", "--out=x.jsonl", "--tasks=generation"], "score and tasks are both given"),
    (["--score=nowhere.jsonl", "--out=x.jsonl", "--init_from=nowhere"], "no file matches 'nowhere.jsonl'"),
    (["--score={base}/*.jsonl", "--out={base}/../{base.name}/rows.jsonl"], "would be written over what is read"),
    (["--data={base}/zh.txt", "--out={base}/zh.txt"], "would be written over what is read"),
    (["--data={base}/zh.txt", "--out={base}"], "is a directory; name a file, such as {base}/scores.json"),
    (["--data={base}/zh.txt", "--out={base}/zh.txt/x.json"], "no directory {base}/zh.txt: "),
    (["--tasks=generation", "--data={base}/rows.jsonl", "--judge=x"], "judge='x' is only for win_rate"),
    (["--tasks=generation", "--data={base}/rows.jsonl", "--stride=7"], "stride=7 is only for perplexity"),
    (["--tasks=generation", "--data={base}/rows.jsonl", "--text_key=question=q"],
     "is only for perplexity; leave it out. Other tasks read what prepare.py writes: prepare.py --kind=chat"),
    (["--data={base}/zh.txt", "--shots=2"], "shots=2 is only for mmlu"),
    (["--data={base}/zh.txt", "--max_new_tokens=2"], "max_new_tokens=2 is only for generation"),
    (["--tasks=preference", "--data={base}/rows.jsonl", "--block_size=9"], "block_size=9 is only for perplexity"),
    (["--tasks=perplexity,preference", "--data=perplexity: {base}/zh.txt; preference: {base}/rows.jsonl",
      "--init_from={base}/reward"],
     "preference measures a reward model, perplexity a language model"),
    (["--tasks=perplexity,mmlu", "--data=perplexity: {base}/zh.txt; mmlu: nowhere"], "no file matches 'nowhere'"),
    (["--tasks=preference", "--data=nowhere", "--init_from={base}/reward"], "no file matches 'nowhere'"),
    (["--tasks=win_rate", "--data=a,nowhere", "--init_from={base}/reward"], "no file matches 'a'"),
])  # fmt: skip
def test_mistakes_are_one_line(run, base, flags, why):
    (base / "bare").mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (base / "bare" / name).write_bytes((base / "model" / name).read_bytes())
    before = {path: path.read_bytes() for path in base.glob("*.*")}
    printed, error = run(*(flag.format(base=base) for flag in flags))
    assert why.format(base=base) in error
    assert "\n" not in error
    assert not printed  # nothing was measured before
    assert {path: path.read_bytes() for path in base.glob("*.*")} == before


def test_a_file_that_cannot_be_written_at_the_end_is_one_line(tmp_path):
    (tmp_path / "x.json.tmp").mkdir()
    with pytest.raises(UserError, match=re.escape(f"cannot write out='{tmp_path}/x.json'")):
        evaluate.write_results(tmp_path / "x.json", {})


def test_figures_that_cannot_be_written_are_printed(run, base, tmp_path):
    (tmp_path / "x.json.tmp").mkdir()
    printed, error = run(*perplexity_flags(base), f"--out={tmp_path}/x.json", "--limit=1")
    assert f"cannot write out='{tmp_path}/x.json'" in error
    assert any(line.startswith("zh ") for line in printed.splitlines())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_file_is_never_replaced(run, base, tmp_path):
    """A rename onto a device or a pipe would remove it."""
    os.mkfifo(tmp_path / "x.jsonl")
    for flags in ([*perplexity_flags(base), "--limit=1"], [f"--score={base}/zh.txt"]):
        printed, error = run(*flags, f"--out={tmp_path}/x.jsonl")
        assert "is no regular file" in error and (tmp_path / "x.jsonl").is_fifo()


@pytest.mark.skipif(sys.platform != "linux", reason="needs names that are not UTF-8")
def test_names_that_are_not_utf8_are_written(run, base, tmp_path):
    """From a zip file, or typed in the locale of GBK."""
    folder = tmp_path / "a\udcb9b"
    folder.mkdir()
    text = folder / "c\udcb9d.txt"
    text.write_bytes((base / "zh.txt").read_bytes())
    printed, error = run(f"--data={text}", f"--out={folder}/x.json", "--limit=1")
    found = json.loads((folder / "x.json").read_text(encoding="utf-8"))["results"]
    assert not error and text.stem in found["perplexity"]["domains"]


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_reader_that_has_gone_costs_no_figures(run, base, tmp_path, monkeypatch, error):
    """Of two tasks the second is measured, too; also where the disk of `> file` is full."""

    def gone(*text, **options):
        raise error

    monkeypatch.setattr("builtins.print", gone)
    (tmp_path / "q.jsonl").write_text('{"prompt": "a", "answer": "b"}\n', encoding="utf-8")
    flags = ["--tasks=perplexity,generation", f"--data=perplexity:{base}/zh.txt;generation:{tmp_path}/q.jsonl"]
    run(*flags, "--max_new_tokens=4", f"--out={tmp_path}/scores.json")
    results = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))["results"]
    assert results.keys() == {"perplexity", "generation"}


def test_a_tokenizer_that_the_model_has_no_embeddings_for_is_refused(run, base, tmp_path):
    cfg = ModelConfig(64, block_size=BLOCK, n_layer=1, n_head=2, n_embd=16)
    tokenizer = evaluate.Tokenizer.load(base / "model")
    huggingface.write_model(tmp_path, Transformer(cfg), tokenizer)
    error = run(f"--data={base}/zh.txt", f"--init_from={tmp_path}")[1]
    assert f"its tokenizer has {tokenizer.vocab_size} ids, the model 64" in error


# ---- tasks of other files -------------------------------------------------------------------------------------------


def test_the_other_tasks_are_reached(base, monkeypatch):
    """Each with its own settings, as its file names them."""
    calls = {}

    def spy(name: str, *names: str):
        def called(*args, **kwargs):
            calls[name] = dict(zip(names, args, strict=False)) | kwargs
            return {}

        return called

    names = ("model", "tokenizer", "task", "directory", "shots", "batch_size", "dtype", "limit", "block_size")
    monkeypatch.setattr(evaluate, "evaluate_choices", spy("choices", *names))
    names = ("model", "tokenizer", "data", "params", "limit", "batch_size")
    monkeypatch.setattr(evaluate, "evaluate_generation", spy("generation", *names))
    names = ("model", "tokenizer", "data", "batch_size", "limit", "dtype")
    monkeypatch.setattr(evaluate.judging, "evaluate_preference", spy("preference", *names))
    config = {"init_from": str(base / "model"), "block_size": 40, "stride": 0, "text_key": "", "txt_split": "file"}
    config |= {"batch_size": 3, "limit": 9, "shots": 2}
    config |= {"max_new_tokens": 11, "chat_template_kwargs": "", "weights": "full", "reference": ""}
    subject = evaluate.load("language model", config, torch.device("cpu"), torch.float32)
    evaluate.measure("ceval_text", "DIR", subject, config)
    assert {"task": "ceval_text", "directory": "DIR", "shots": 2, "batch_size": 3}.items() <= calls["choices"].items()
    assert (calls["choices"]["limit"], calls["choices"]["block_size"]) == (9, 40)
    evaluate.measure("generation", "FILE", subject, config)
    of = calls["generation"]
    assert (of["data"], of["limit"], of["batch_size"]) == ("FILE", 9, 3)
    assert (of["params"].max_new_tokens, of["params"].temperature) == (11, 0)
    assert of["params"].eos_ids == subject.tokenizer.stop_ids
    evaluate.measure("preference", "FILE", subject, config)
    of = calls["preference"]
    assert (of["model"], of["data"], of["batch_size"], of["limit"]) == (subject.model, "FILE", 3, 9)


def test_win_rate_by_a_reward_model(run, base, tmp_path):
    for name, texts in {"a": ["one", "two", "same"], "b": ["1", "22222", "same"]}.items():
        rows = [{"prompt": f"Q{i}", "index": i, "completions": [{"text": t}]} for i, t in enumerate(texts)]
        write_settings(tmp_path / f"{name}.jsonl", {"model": "m"})
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data = f"--data={tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    out = f"--out={tmp_path}/found.json"
    printed, error = run("--tasks=win_rate", data, f"--init_from={base}/reward", out)
    assert not error
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["results"]["win_rate"]
    assert (found["n"], found["ties"], found["win_rate"]) == (3, 3, 0.5)  # its head is zero: all scores are equal
    assert re.search(r"win_rate +0\.5000", printed)
    low, high = found["interval"]
    assert re.search(rf"interval +{low:.4f} to {high:.4f}", printed)
    assert re.search(rf"A +{tmp_path}/a.jsonl\nB +{tmp_path}/b.jsonl", printed)
    assert "settings that differ" not in printed


def test_win_rate_of_the_first_prompts_that_both_answer(run, base, tmp_path):
    """One model has left out a long prompt; the two were sampled with other settings, which is said."""
    for name, numbers, temperature in (("a", (0, 2, 3), 0.0), ("b", (0, 1, 2, 3), 1.0)):
        rows = [{"prompt": f"Q{i}", "index": i, "completions": [{"text": name}]} for i in numbers]
        write_settings(tmp_path / f"{name}.jsonl", {"model": name, "temperature": temperature})
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data, out = f"--data={tmp_path}/a.jsonl,{tmp_path}/b.jsonl", f"--out={tmp_path}/found.json"
    printed, _ = run("--tasks=win_rate", data, f"--init_from={base}/reward", out, "--limit=2")
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["results"]["win_rate"]
    assert [row["prompt"][0]["content"] for row in found["matches"]] == ["Q0", "Q2"]
    assert "settings that differ: temperature 0.0 and 1.0" in printed
    cut = [{"text": "x", "finish_reason": "length"}]
    cut = [{"prompt": f"Q{i}", "index": i, "completions": cut} for i in range(3)]
    write_settings(tmp_path / "c.jsonl", {"model": "m"})
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, cut)), encoding="utf-8")
    run("--tasks=win_rate", f"--data={tmp_path}/c.jsonl,{tmp_path}/b.jsonl", f"--init_from={base}/reward", out)
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["results"]["win_rate"]
    assert (found["wins"], found["losses"], found["ties"]) == (0, 3, 0)  # all of A are cut
    assert found["unfinished"] == {"only A": 3, "only B": 0, "both": 0}


def test_preference_on_a_directory_of_prepare_py_is_on_its_val(run, base, tmp_path):
    lines = [json.dumps({"prompt": f"What is {k}?", "chosen": f"a {k}", "rejected": "b"}) for k in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    keys = {key: value for key, value in vars(prepare).items() if is_key(key, value)}
    settings = {"input": f"{tmp_path}/pairs.jsonl", "out_dir": f"{tmp_path}/pairs", "kind": "preference"}
    assert prepare.main(keys | settings | {"val_fraction": 0.3, "workers": 1}) == 0
    shown = []
    for data in ("pairs", "pairs/val.jsonl"):
        printed, error = run("--tasks=preference", f"--data={tmp_path}/{data}", f"--init_from={base}/reward")
        assert not error, error
        shown.append([line for line in printed.splitlines() if line.startswith("pairs")])
    assert shown[0] == shown[1] and shown[0]
    _, error = run("--tasks=preference", f"--data={tmp_path}/pairs", f"--init_from={base}/reward",
                   f"--out={tmp_path}/pairs/val.jsonl")  # fmt: skip
    assert "would be written over what is read" in error
    _, error = run("--tasks=generation", f"--data={tmp_path}/pairs")
    assert "pairs was prepared with kind='preference', not 'chat'" in error


def test_questions_of_a_prepared_directory_are_its_validation_split(run, base, tmp_path):
    """With the tokens of a tokenizer in it or without, and beside a file; check_files refused it."""
    rows = [{"messages": [{"role": "user", "content": f"What is {k} + {k}?"},
                          {"role": "assistant", "content": str(2 * k)}]} for k in range(12)]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    keys = {key: value for key, value in vars(prepare).items() if is_key(key, value)}
    settings = {"input": str(tmp_path / "chats.jsonl"), "kind": "chat", "val_fraction": 0.3, "workers": 1}
    for name, tokenizer_dir in (("bare", ""), ("tokens", str(base / "model"))):
        more = {"out_dir": str(tmp_path / name), "tokenizer_dir": tokenizer_dir}
        assert prepare.main(keys | settings | more) == 0
    n_val = len((tmp_path / "bare" / "val.jsonl").read_text("utf-8").splitlines())
    shown = []
    for data in ("bare", "tokens", "bare/val.jsonl"):
        flags = ["--tasks=generation", f"--data={tmp_path / data}", "--max_new_tokens=4"]
        printed, error = run(*flags, f"--init_from={base}/model")
        assert not error, error
        shown.append([line for line in printed.splitlines() if line.startswith(("n ", "answers"))])
        assert str(n_val) in printed
    assert shown[0] == shown[1] == shown[2]
    both = f"--data={tmp_path / 'bare'},{tmp_path / 'chats.jsonl'}"
    printed, error = run("--tasks=generation", both, "--max_new_tokens=4", f"--init_from={base}/model")
    assert not error and str(n_val + 12) in printed


def test_a_reward_model_whose_tokenizer_has_no_padding(run, base, tmp_path):
    """As public ones come: what is scored is never padding, so none is needed."""
    shutil.copytree(base / "reward", tmp_path / "bare")
    for path in (tmp_path / "bare").glob("*.json"):
        content = path.read_text(encoding="utf-8").replace("<|pad|>", "<|other|>")
        content = content.replace('"pad_token"', '"other"').replace('"pad_token_id"', '"other_id"')
        path.write_text(content, encoding="utf-8")
    assert Tokenizer.load(tmp_path / "bare").pad_id == -1
    pairs = [{"prompt": "Q", "chosen": "a " * n, "rejected": "b"} for n in (1, 5, 9)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    printed, error = run("--tasks=preference", f"--data={tmp_path}/pairs.jsonl", f"--init_from={tmp_path}/bare")
    assert not error and re.search(r"pairs +3", printed)


def test_a_language_model_prefers_by_log_probability_or_against_its_reference(run, base, tmp_path):
    pairs = [{"prompt": "Q", "chosen": "a " * n, "rejected": "b"} for n in (1, 5, 9)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    flags = ["--tasks=preference", f"--data={tmp_path}/pairs.jsonl"]
    accuracy = {}
    for name, more in (("alone", []), ("itself", [f"--reference={base}/model"])):
        _, error = run(*flags, *more, f"--out={tmp_path}/{name}.json")
        assert not error
        found = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))["results"]["preference"]
        accuracy[name] = found["accuracy"]
        assert found["n"] == 3 and "ece" not in found
    assert accuracy["itself"] == 0  # nothing has become likelier: a tie is wrong


@pytest.mark.parametrize("flags", [("model", "short"), ("short", "model")], ids=" against ".join)
def test_a_pair_must_fit_in_the_model_and_in_its_reference(run, base, tmp_path, flags):
    tokenizer = Tokenizer.load(base / "model")
    (tmp_path / "short").mkdir()
    cfg = ModelConfig(tokenizer.vocab_size, block_size=32, n_layer=1, n_head=2, n_embd=16)
    huggingface.write_model(tmp_path / "short", Transformer(cfg), tokenizer)
    (tmp_path / "model").symlink_to(base / "model")
    pairs = [{"prompt": "Q", "chosen": "a " * n, "rejected": "b"} for n in (1, 3, 40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    models = [f"--{key}={tmp_path}/{name}" for key, name in zip(("init_from", "reference"), flags, strict=True)]
    printed, error = run("--tasks=preference", f"--data={tmp_path}/pairs.jsonl", *models)
    assert not error and re.search(r"pairs +2\n", printed)
    assert "longer than the model's 32 tokens 1" in printed


def test_an_endpoint_that_judges_gets_its_address_and_key(monkeypatch, run, base, tmp_path):
    asked = {}

    def endpoint_judge(matches, endpoint, journal):
        asked.update(endpoint._asdict(), journal=journal, n=len(matches))
        return [evaluate.judging.Verdict("a", orders=("a", "a"))] * len(matches)

    monkeypatch.setattr(evaluate.judging, "endpoint_judge", endpoint_judge)
    monkeypatch.setenv("A_KEY", "secret\n")
    for name in "ab":
        row = {"prompt": "Q", "index": 0, "completions": [{"text": name}]}
        write_settings(tmp_path / f"{name}.jsonl", {"model": "m"})
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row), encoding="utf-8")
    flags = ["--tasks=win_rate", f"--data={tmp_path}/a.jsonl,{tmp_path}/b.jsonl", f"--out={tmp_path}/x.json"]
    flags += ["--judge=big", "--base_url=http://localhost:1/v1", "--api_key_env=A_KEY", "--init_from=nowhere"]
    printed, error = run(*flags)
    assert not error
    assert {"base_url": "http://localhost:1/v1", "model": "big", "key": "secret", "n": 1}.items() <= asked.items()
    assert asked["journal"] == f"{tmp_path}/x.json.judge"
    written = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert (written["results"]["win_rate"]["wins"], written["model"]) == (1, {})
    assert "secret" not in json.dumps(written)
    monkeypatch.setenv("EMPTY", " ")
    for name in ("NO_KEY", "EMPTY"):
        assert f"no environment variable '{name}' with a key" in run(*flags[:-2], f"--api_key_env={name}")[1]


# ---- what is written ------------------------------------------------------------------------------------------------


def test_json_has_no_nan(tmp_path):
    evaluate.write_results(tmp_path / "x.json", {"a": [math.nan, 1.5], "b": {"c": (math.inf, "中")}})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"a": [None, 1.5], "b": {"c": [None, "中"]}}


def test_notes_of_domains_are_shown():
    figures = domains.summarize([domains.Loss(8 * math.log(2), 4, 8, 2)])
    found = {"domains": {"zh": figures | {"notes": ["empty, left out: 1 documents"]}}, "all": figures}
    header, row, note = tables.describe_domains(found).splitlines()
    assert dict(zip(header.split(), row.split(), strict=True)) == {
        "domain": "zh", "documents": "1", "tokens": "4", "nats/token": "1.3863", "perplexity": "4.0000",
        "bits/byte": "1.0000", "bits/char": "4.0000", "nats/doc": "5.5452",
    }  # fmt: skip
    assert note == "zh: empty, left out: 1 documents"


def test_accuracies_are_in_per_cent_with_their_errors():
    score = {"n": 4, "chance": 0.25, "acc": 0.5, "acc_stderr": 0.2887}
    found = {"task": "mmlu", "shots": 0, "notes": ["a note"], "fewer_shots": 0, "cut": 1, "groups": {}}
    found |= {"overall": score, "subjects": {"文": score | {"acc_stderr": None}, "b": score}}
    assert tables.describe_choices(found | {"subject_mean": {"acc": 0.5}}).splitlines() == [
        "mmlu, 0 shots",
        "  a note",
        "  1 prompt lost the beginning to fit",
        "                  n  chance           acc",
        "overall           4    25.0  50.0 +- 28.9",
        "文                4    25.0          50.0",
        "b                 4    25.0  50.0 +- 28.9",
        "mean of subjects                     50.0",
    ]


def test_models_side_by_side(run, base, tmp_path):
    """The file of one run is a column beside the next one; results that do not compare are refused."""
    flags = ["--tasks=perplexity", f"--data=zh={base}/zh.txt,en={base}/en.txt"]
    run(f"--init_from={base}/model", f"--out={tmp_path}/a.json", *flags)
    shown, _ = run(f"--init_from={base}/model", f"--beside={tmp_path}/a.json", *flags)
    own = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["results"]["perplexity"]
    for name, of in (own["domains"] | {"(all)": own["all"]}).items():
        figure = f"{of['bits_per_byte']:.4f}"
        assert re.search(rf"^{re.escape(name)} +{figure} +{figure}$", shown, re.MULTILINE), shown
    _, error = run(f"--init_from={base}/model", f"--beside={tmp_path}/a.json", *flags[:1], f"--data={base}/zh.txt")
    assert "a.json was measured with data=" in error
    same = [f"--beside={tmp_path}/a.json", f"--out={tmp_path}/a.json"]
    _, error = run(f"--init_from={base}/model", *same, *flags)
    assert "a.json' would be written over what is read" in error
    _, error = run(f"--init_from={base}/model", f"--beside={tmp_path}/none.json", *flags)
    assert "none.json" in error
    (tmp_path / "b.json").write_text('{"results": {}}')
    _, error = run(f"--init_from={base}/model", f"--beside={tmp_path}/b.json", *flags)
    assert "b.json has no results of perplexity" in error
