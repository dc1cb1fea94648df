"""Run the commands of pages in their order, with small shapes: python tests/readme.py EMPTY_DIRECTORY README.md ...

Each command runs as `python SCRIPT ARGUMENTS` does, in a fork of one process that has imported torch already: most of
the time of so small a run is imports. What torchrun would start runs as one process.
"""

import ast
import gc
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import socket
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from itertools import islice
from pathlib import Path
from signal import SIGTERM

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
SCRIPTS = ("tokenizer", "prepare", "pretrain", "sft", "reward", "dpo", "rl", "sample", "serve", "evaluate")
TRAINERS = ("pretrain", "sft", "reward", "dpo", "rl")
PROGRAM = r"(?:[A-Z_]+=\S+ )?(?:python|torchrun|make|git|source|pip|apt|for) |\w+\.py "  # a command in a text
OUTPUTS = (" ", "step  ", "raw text ->")  # how a block begins that is not of commands
NOT_RUN = {  # what is in a command: why it is not run
    "source .venv": "of the shell",
    "pip install": "an installation",
    "=...": "the same",
    "make install": "an installation",
    "make demo": "minutes; what it runs stands in the Makefile, and .ci does not run it either",
    "make serve": "serves until it is stopped; tests/test_browser.py looks at its page",
    "make race": "minutes of two idle cores",
    "make gpu": "minutes of a GPU; tests/tools/test_gpu_check.py runs it on tiny shapes",
    "curl -LO": "a download",
    "hf download": "a download",
    "curl http": "the server is asked when its own command is run",
    "make test": "runs this",
    "python tools/bench.py": "a minute, and its figures mean nothing on a busy machine",
}
FIRST = [  # of which the stand-ins are copies
    "python prepare.py --input=corpus/ --out_dir=data/demo",
    "python pretrain.py --data_dir=data/demo --out_dir=out/demo",
]
STAND_INS = {  # what the reader has already, or has from make demo
    "out": ("demo", "demo_sft", "other", "smollm2"),
    ".": ("DIR", "Qwen3-0.6B", "path/to/Qwen3-0.6B", "path/to/llama"),
}
# ---- overrides: an argument of the README with the same key is replaced ----------------------------------------------
TRAINING = {
    "max_steps": 2, "warmup_steps": 1, "batch_size": 2, "block_size": 64, "device": "cpu", "dtype": "float32",
    "compile": False, "peak_tflops": 1, "eval_every": 2, "log_every": 1, "eval_steps": 1, "resume": "never",
    "overwrite": True,
}  # fmt: skip
ANSWERS = {"device": "cpu", "dtype": "float32", "batch_size": 4, "max_new_tokens": 4}
SMALL = {
    "tokenizer": {"vocab_size": 512},
    "prepare": {"vocab_size": 512, "workers": 1},
    "pretrain": TRAINING | {"total_batch_tokens": 0},
    "sft": TRAINING | {"total_batch_tokens": 0, "eval_answers": 1, "eval_new_tokens": 4, "block_size": 128},
    "reward": TRAINING | {"total_batch_pairs": 0, "block_size": 128},
    "dpo": TRAINING | {"total_batch_pairs": 0, "block_size": 128},
    "rl": TRAINING | {
        "max_new_tokens": 4, "prompts_per_step": 4, "group_size": 2, "draw_batch_size": 8, "eval_prompts": 2,
        "filter_groups": 0, "block_size": 128,
    },
    "sample": ANSWERS,
    "serve": {"device": "cpu", "dtype": "float32", "host": "127.0.0.1"},
    "evaluate": {"device": "cpu", "dtype": "float32", "batch_size": 16, "limit": 2},
}  # fmt: skip
del SMALL["rl"]["eval_steps"], SMALL["rl"]["peak_tflops"]  # which it does not have
NEW_MODEL = {"n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 32}


def commands(readme: str) -> list[str]:
    """Return the commands of a README in their order: lines of blocks, and between backticks in the text."""
    found = []
    for text, language, block in re.findall(r"(.*?)(?:^```(\w*)\n(.*?)^```$|\Z)", readme, re.DOTALL | re.MULTILINE):
        found += [span for span in re.findall(r"`([^`\n]+)`", text) if re.match(PROGRAM, span)]
        found += lines_of(block) if not language and not block.startswith(OUTPUTS) else []
    return found


def lines_of(block: str) -> list[str]:
    """Return the commands of a block, each with the lines on which it goes on."""
    found, line = [], ""
    for more in block.splitlines():
        line += more
        if line.endswith("\\"):
            line = line[:-1]
            continue
        try:
            if shlex.split(line, comments=True):
                found.append(line)
            line = ""
        except ValueError:  # a quotation that is open
            line += "\n"
    assert not line, f"this does not end: {line}"
    return found


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def settings_of(script: Path) -> set[str]:
    """Return the names in small letters that a script assigns literals to at its top level: its settings."""
    found = set()
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.UnaryOp):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name) and target.id.islower()}
    return found


def reason_not_run(command: str) -> str:
    return next((why for part, why in NOT_RUN.items() if part in command), "")


def arguments(command: str) -> tuple[str, list[str]]:
    """Return (script, its arguments with small shapes) of a command."""
    words = shlex.split(command, comments=True)
    at = next((k for k, word in enumerate(words) if word.endswith(".py")), -1)
    assert at >= 0 and (at == 0 or words[0] in ("python", "torchrun")), f"neither run nor in NOT_RUN: {command}"
    script, given = words[at], words[at + 1 :]
    if "--plan_only=True" in given:
        return script, given
    small = dict(SMALL.get(script.removesuffix(".py"), {}))
    if script == "pretrain.py" and not any(word.startswith("--init_from") for word in given):
        small |= NEW_MODEL
    if {"--kind=chat", "--kind=preference"} & set(given):  # these train no tokenizer
        small.pop("vocab_size", None)
    if any(word.startswith("--extend") for word in given):
        small["vocab_size"] = 640
    if script == "evaluate.py" and "--tasks=generation" in given:
        small["max_new_tokens"] = 4
    if script == "sample.py" and any(word.startswith("--prompts") for word in given):
        small |= {"max_new_tokens": 64, "stop": "e|a|t|n|s|o| |\ufffd"}  # pairs are of whole answers
    kept = [word for word in given if word.lstrip("-").partition("=")[0] not in small]
    return script, kept + [f"--{key}={value}" for key, value in small.items()]


# ---- what the reader has ---------------------------------------------------------------------------------------------


def write_rows(path: str, rows: list) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def make_data() -> None:
    """Write, under the names that the READMEs use, files such as their reader has."""
    from groundup.demo.debug_data import debug_pairs
    from groundup.demo.python_docs import debug_texts
    from groundup.demo.python_talks import docs_conversations

    english = ["\n".join(lines[k : k + 12]) for lines in map(str.splitlines, debug_texts()) for k in range(0, 60, 12)]
    english = [text for text in english if len(text) > 300]
    chinese = (ROOT / "groundup/demo/zh_sample.txt").read_text(encoding="utf-8").split("\n\n")
    conversations = list(islice(docs_conversations(), 1200))
    talks = conversations[::30]
    asked = [{"messages": talk} for talk in talks]
    both = ("corpus/a.jsonl", "corpus/b.jsonl", "field.jsonl", "wiki.jsonl")
    texts = both + ("wiki/a.json", "web/a.jsonl", "wiki_zh/a.jsonl", "en/a.jsonl", "wudao/a.json", "baike/a.json")
    for k, path in enumerate(texts):  # each with documents of its own: copies would be dropped
        rows = [{"text": text} for text in english[k :: len(texts)]]
        if path in both or path.startswith(("wudao", "baike")):
            of_zh = [{"text": text} for text in chinese[k :: len(texts)]]
            rows = rows + of_zh if path in both else of_zh
        if path == "wudao/a.json":
            rows = [{"title": row["text"][:8], "content": row["text"]} for row in rows]
        if path == "baike/a.json":
            rows = [{"title": row["text"][:8], "summary": row["text"], "sections": []} for row in rows]
        write_rows(path, rows)
    Path("input.txt").write_text("\n\n".join(english), encoding="utf-8")
    Path("corpus/zh.txt").write_text("\n\n".join(chinese), encoding="gb18030")
    for path in ("zh/a.txt", "code/a.py"):
        Path(path).parent.mkdir()
        Path(path).write_text("\n\n".join((chinese if path == "zh/a.txt" else english)[:9]), encoding="utf-8")
    for path in ("chat.jsonl", "chats.jsonl", "questions.jsonl", "a.jsonl", "b.json"):
        write_rows(path, asked)
    write_rows("zhihu/a.jsonl", [{"INSTRUCTION": t[0]["content"], "RESPONSE": t[1]["content"]} for t in talks])
    write_rows("pairs.jsonl", debug_pairs(talks))
    many = enumerate(conversations[::6])  # some of them are for validation
    write_rows("labelled.jsonl", [{"messages": talk, "label": k % 2 == 0} for k, talk in many])
    answers = [row | {"index": k, "completions": [{"text": "A list.", "finish_reason": "stop"}]}
               for k, row in enumerate(asked)]  # fmt: skip
    for name in ("dpo", "sft"):
        write_rows(f"{name}_answers.jsonl", answers)
        Path(f"{name}_answers.jsonl.config.json").write_text(json.dumps({"model": name}), encoding="utf-8")
    Path("rules.py").write_text(
        "def exact(prompt, answer, row):\n    return float(answer.strip() == row['messages'][-1]['content'])\n\n\n"
        "def brief(prompt, answer, row):\n    return -len(answer) / 100\n",
        encoding="utf-8",
    )
    Path("mine.py").write_text("weight_decay = 0.0\n", encoding="utf-8")
    rows = "".join(f"{k},咳嗽{k}天怎么办,吃什么药？,多喝水,不宜吃辣,少说话,A\n" for k in range(9))
    for path, header in (
        ("CMMLU/dev/anatomy.csv", ",Question,A,B,C,D,Answer"), ("CMMLU/test/anatomy.csv", ",Question,A,B,C,D,Answer"),
        ("ceval/dev/law_dev.csv", "id,question,A,B,C,D,answer"),
        ("ceval/val/law_val.csv", "id,question,A,B,C,D,answer"),
        ("qa/a.csv", "id,title,ask,answer,department,x,y"), ("内科.csv", "id,title,ask,answer,department,x,y"),
    ):  # fmt: skip
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(f"{header}\n{rows}", encoding="gb18030" if path == "内科.csv" else "utf-8")
    shutil.copytree("ceval", "C-Eval")


# ---- running ---------------------------------------------------------------------------------------------------------


def run(script: str, argv: list[str]) -> tuple[int, float, str]:
    """Return (exit status, CPU seconds, output) of a script in a fork. A server gets one request, then SIGTERM."""
    port = 0
    if script == "serve.py":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        argv = [*argv, f"--port={port}"]
    sys.stdout.flush()
    log = Path("output.txt")
    if (child := os.fork()) == 0:
        start(log, script, argv)
    if port:
        threading.Thread(target=ask, args=(child, port), daemon=True).start()
    _, status, usage = os.wait4(child, 0)
    status = os.waitstatus_to_exitcode(status)
    status = 0 if port and status == -SIGTERM else status
    return status, usage.ru_utime + usage.ru_stime, log.read_text(encoding="utf-8", errors="replace")


def start(log: Path, script: str, argv: list[str]) -> None:
    """Be `python script argv` in this process, with no input and the output in `log`. It does not return."""
    status = 1
    try:
        for fd, file in ((0, os.devnull), (1, log), (2, log)):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if fd == 1 else os.O_APPEND)), fd)
        sys.argv = [script, *argv]
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # a script's own: one line for a mistake of the user
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ask(child: int, port: int) -> None:
    """Wait for the server on this port, then end it."""
    for _ in range(200):
        try:
            assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200
            break
        except OSError:
            time.sleep(0.05)
    with suppress(ProcessLookupError):  # it has ended by itself, and its status says why
        os.kill(child, SIGTERM)


def main(top: Path, *pages: Path) -> int:
    """Run all commands of these pages in the empty directory `top`; return how many failed."""
    for name in (*SCRIPTS, "datasketch", "matplotlib.pyplot", "uvicorn", "starlette.applications"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy what it walks
    os.chdir(top)
    Path("docs").mkdir()
    few = ["docs/curves", "docs/help.md"]  # of its pages: their perplexity is asked for
    for name in [f"{script}.py" for script in SCRIPTS] + ["config", "groundup", "tools", *few]:
        Path(name).symlink_to(ROOT / name)
    make_data()
    failed = 0
    of_pages = [command for page in pages for command in commands(page.read_text(encoding="utf-8"))]
    # What two pages have is run once, whatever their comments
    for command in {tuple(words_of(command)): command for command in [*FIRST, *of_pages]}.values():
        if reason_not_run(command):
            continue
        status, seconds, output = run(*arguments(command))
        print(f"{seconds:5.1f} s  status {status}  {' '.join(command.split())[:150]}", flush=True)
        if status:
            failed += 1
            print(output[-1500:], flush=True)
        if command == FIRST[-1]:
            stand_in()
    return failed


def stand_in() -> None:
    for where, names in STAND_INS.items():
        for name in names:
            path = Path(where, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                shutil.copytree("out/demo" if where == "out" else "out/demo/latest", path, symlinks=True)
    for name in ("gpt2", "debug"):
        shutil.copytree("data/demo", f"data/{name}")
    for name, rows in (("chat", "chat"), ("rl", "chat"), ("dpo", "pairs"), ("reward", "pairs")):
        shutil.copy(f"{rows}.jsonl", f"data/debug/{name}.jsonl")


if __name__ == "__main__":
    sys.exit(main(*(Path(arg).resolve() for arg in sys.argv[1:])) > 0)
