"""sample.py with generate/chat.py and generate/answers.py: what is printed and written, against the engine by hand."""

import dataclasses
import fcntl
import gzip
import io
import json
import os
import random
import re
import runpy
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import forks
import pytest
import saved
import torch
from test_model import as_transformers, random_model, tiny_config

sys.path.insert(0, str(Path(__file__).parent / "generate"))
from test_tools import CALL, FILE, drawn_ids

import sample
from groundup.errors import printable, report
from groundup.generate import chat, sampling
from groundup.generate.answers import Table, parse, read_prompts
from groundup.generate.beam import BeamParams, BeamSearch
from groundup.generate.chat import Chat
from groundup.generate.completion import generate, never_sampled
from groundup.generate.completion import is_tuned as is_tuned_model
from groundup.generate.engine import Engine, Request, Sample, Token
from groundup.generate.sampling import SamplingParams
from groundup.generate.tools import Tools
from groundup.tokens.training import train
from groundup.train import huggingface
from model import Transformer
from tokenizer import Tokenizer

ROOT = Path(sample.__file__).parent
CORPUS = [
    Path(random.__file__).read_text(encoding="utf-8"),
    "从前有一只猫，坐在垫子上。" * 20,
    "🙂👩‍👩‍👧 and 𠮷野家 " * 3,
]


def save_run(out_dir: Path, seed: int, stage: str, block_size: int = 64) -> Path:
    """A random model that likes Chinese, as `stage`.py would have left it -> its checkpoint."""
    tokenizer = train(CORPUS, 512)
    net = random_model(tiny_config(vocab_size=tokenizer.vocab_size, block_size=block_size), seed)
    liked = set(tokenizer.encode(CORPUS[1]))
    with torch.no_grad():
        net.lm_head.weight[sorted(liked | {tokenizer.pad_id, tokenizer.im_start_id})] *= 3  # a ban is needed
    path = saved.save(out_dir, 20, net, tokenizer)
    if stage:
        text = f"'Resolved configuration; re-run with: python {stage}.py {out_dir}/config.py'\nseed = 1\n"
        (out_dir / "config.py").write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A directory with out/older and out/newer, pretrained, and tuned/chat, fine-tuned."""
    root = tmp_path_factory.mktemp("cwd")
    for age, name in ((100, "older"), (0, "newer")):
        for file in save_run(root / "out" / name, seed=age, stage="pretrain").iterdir():
            os.utime(file, (file.stat().st_mtime - age,) * 2)
    save_run(root / "tuned/chat", seed=3, stage="sft", block_size=2048)
    return root


@pytest.fixture(scope="module")
def tuned(runs) -> tuple[Transformer, Tokenizer]:
    path = runs / "tuned/chat/step_000020"
    return huggingface.load_model(path), Tokenizer.load(path)


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def command(*arguments: str) -> list[str]:
    """In float32 unless told otherwise."""
    told = any(argument.startswith("--dtype=") for argument in arguments)
    return [str(ROOT / "sample.py"), "--device=cpu", *arguments, *([] if told else ["--dtype=float32"])]


def environment(home: Path) -> dict[str, str]:
    return dict(os.environ, OMP_NUM_THREADS="1", HOME=str(home), TERM="dumb")


def run(cwd: Path, *arguments: str, said: bytes = b"") -> Ended:
    """What the script does with these arguments and this standard input, in this process (torch is loaded once)."""
    streams = [io.TextIOWrapper(io.BytesIO(content), encoding="ascii") for content in (said, b"", b"")]
    before = sys.argv, sys.stdin, sys.stdout, sys.stderr, sys.excepthook, os.getcwd()
    sys.argv, (sys.stdin, sys.stdout, sys.stderr) = command(*arguments), streams
    sys.stderr.reconfigure(encoding="utf-8")
    os.chdir(cwd)
    code = 0
    try:
        runpy.run_path(str(ROOT / "sample.py"), run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else print(end.code, file=sys.stderr) or 1
    except Exception as error:
        code = report(error, sys.stderr)  # what sys.excepthook does, without the exit
    finally:
        for stream in streams[1:]:
            stream.flush()
        sys.argv, sys.stdin, sys.stdout, sys.stderr, sys.excepthook = before[:5]
        os.chdir(before[5])
    return Ended(code, *(stream.buffer.getvalue().decode("utf-8") for stream in streams[1:]))


def params_of(tokenizer: Tokenizer, net: Transformer, **changes: object) -> SamplingParams:
    """The script's defaults with changes."""
    defaults = {"temperature": sample.temperature, "top_p": sample.top_p, "seed": sample.seed}
    banned = never_sampled(tokenizer, net.cfg.vocab_size)
    return SamplingParams(**(defaults | {"eos_ids": tokenizer.stop_ids, "banned_ids": banned} | changes))


def texts(directory: Path, ids: list[int] | str, **changes: object) -> list[str]:
    """Samples by the engine, decoded at once."""
    tokenizer, net = Tokenizer.load(directory), huggingface.load_model(directory)
    ids = tokenizer.encode(ids) or [tokenizer.eot_id] if isinstance(ids, str) else ids
    result = generate(net, tokenizer, [ids], params_of(tokenizer, net, **changes))[0]
    return [tokenizer.decode(found.ids, skip_special_tokens=True) for found in result.completions]


# ---- samples of one prompt ------------------------------------------------------------------------------------------


def test_without_arguments_continues_nothing_from_the_newest_run(runs):
    ended = run(runs, "--max_new_tokens=20")
    assert (ended.code, ended.err) == (0, "from out/newer/step_000020, the newest run\n")
    assert ended.out == printable(texts(runs / "out/newer/step_000020", "", max_new_tokens=20)[0] + "\n")
    assert ended.out != printable(texts(runs / "out/older/step_000020", "", max_new_tokens=20)[0] + "\n")


@pytest.mark.parametrize("init_from", ["out/older", "out/older/step_000020", "out/older/latest"])
def test_prompt_and_parameters_of_the_command_line(runs, init_from):
    flags = ["--n=3", "--max_new_tokens=12", "--temperature=1.5", "--top_k=50", "--top_p=1", "--seed=5"]
    ended = run(runs, f"--init_from={init_from}", "--prompt=从前 a=b", "--batch_size=2", *flags)
    changes = {"n": 3, "max_new_tokens": 12, "temperature": 1.5, "top_k": 50, "top_p": 1.0, "seed": 5}
    want = texts(runs / "out/older/step_000020", "从前 a=b", **changes)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == printable(("-" * 80 + "\n").join(f"从前 a=b{text}\n" for text in want))
    assert len(set(want)) == 3


def test_the_best_of_several(runs):
    """best_of is a choice among the samples that n would give, by the sum of their tokens' log-probabilities."""
    directory = runs / "out/older/step_000020"
    tokenizer, net = Tokenizer.load(directory), huggingface.load_model(directory)
    ids = tokenizer.encode("The")
    params = params_of(tokenizer, net, n=4, max_new_tokens=6, top_p=1.0)
    scores = {}
    for found in generate(net, tokenizer, [ids], params)[0].completions:
        with torch.no_grad():
            logprobs = net(torch.tensor([ids + found.ids]))[0, len(ids) - 1 : -1].log_softmax(-1)
        scores[sum(logprobs[k, i].item() for k, i in enumerate(found.ids))] = found.text
    best = sorted(scores, reverse=True)[:2]
    flags = ["--n=2", "--best_of=4", "--max_new_tokens=6", "--top_p=1"]
    ended = run(runs, "--init_from=out/older", "--prompt=The", *flags)
    assert ended.out == ("-" * 80 + "\n").join(f"The{scores[score]}\n" for score in best)


def test_beams(runs):
    flags = ["--num_beams=3", "--n=2", "--temperature=0", "--max_new_tokens=8", "--prompt=The"]
    ended = run(runs, "--init_from=out/older", *flags)
    tokenizer, net = (kind(runs / "out/older/step_000020") for kind in (Tokenizer.load, huggingface.load_model))
    own = {"eos_ids": tokenizer.stop_ids, "banned_ids": never_sampled(tokenizer, net.cfg.vocab_size)}
    params = BeamParams(num_beams=3, n=2, temperature=0, max_new_tokens=8, top_p=0.95, **own)
    _, result = next(BeamSearch(net, tokenizer, params.num_beams).answer([tokenizer.encode("The")], params))
    want = [found.text for found in result.completions]
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == ("-" * 80 + "\n").join(f"The{text}\n" for text in want)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        ("", ()),
        (r"\nUser:|###", ("\nUser:", "###")),
        (r"a\|b|c", ("a|b", "c")),
        (r"\\n|\\", ("\\n", "\\")),
        ("||猫||", ("猫",)),
        ("a\nb", ("a\nb",)),
        ("end\\", ("end\\",)),
        (r"\t\d", ("\t\\d",)),
    ],
)
def test_stop_texts(value, want):
    assert sample.stop_texts(value) == want


def test_stop_text_and_ids_of_the_command_line(runs):
    directory = runs / "out/older/step_000020"
    tokenizer = Tokenizer.load(directory)
    free = texts(directory, "The", max_new_tokens=40)[0]
    ended = run(runs, "--init_from=out/older", "--prompt=The", "--max_new_tokens=40", f"--stop=%%|{free[5:8]}")
    assert ended.out == f"The{free[: free.index(free[5:8])]}\n"
    net = huggingface.load_model(directory)
    ids = generate(net, tokenizer, [tokenizer.encode("The")], params_of(tokenizer, net, max_new_tokens=40))[0][1][0].ids
    other = next(i for i in range(500) if i not in ids)
    stops = f"--stop_token_ids={other}, {ids[9]}"
    ended = run(runs, "--init_from=out/older", "--prompt=The", "--max_new_tokens=40", stops)
    assert ended.out == f"The{tokenizer.decode(ids[: ids.index(ids[9])])}\n"


# ---- which model, chat or continuation ------------------------------------------------------------------------------


def test_hugging_face_directory_without_a_run(runs, tmp_path):
    """As transformers itself writes it, with our tokenizer beside the weights."""
    source = runs / "out/older/step_000020"
    as_transformers(huggingface.load_model(source)).save_pretrained(tmp_path / "hf")
    Tokenizer.load(source).save(tmp_path / "hf")
    ended = run(tmp_path, "--init_from=hf", "--prompt=The", "--temperature=0", "--max_new_tokens=8")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == printable("The" + texts(source, "The", max_new_tokens=8, temperature=0.0)[0] + "\n")


def is_tuned(directory: Path) -> bool:
    return is_tuned_model(directory, Tokenizer.load(directory))


def test_what_counts_as_tuned(runs, tmp_path):
    assert not is_tuned(runs / "out/newer/step_000020")
    assert not is_tuned(runs / "out/newer/latest")
    assert is_tuned(runs / "tuned/chat/latest")
    tokenizer = Tokenizer.load(runs / "tuned/chat/latest")
    tokenizer.save(tmp_path)
    assert not is_tuned(tmp_path)  # our template alone says nothing
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for template, want in [
        ("{{ '<|im_start|>' + messages[0]['role'] }}", True),
        ("{{ '<|start_header_id|>' }}", True),
        ([{"name": "default", "template": "<|im_start|>"}], True),
        (None, False),
    ]:
        path.write_text(json.dumps(config | {"chat_template": template}), encoding="utf-8")
        assert is_tuned(tmp_path) == want, template
    path.unlink()
    assert not is_tuned(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("<|im_start|>", encoding="utf-8")
    assert is_tuned(tmp_path)


def test_a_prompt_to_a_tuned_model_is_a_question(runs, tuned):
    net, tokenizer = tuned
    messages = [{"role": "system", "content": "短"}, {"role": "user", "content": "猫?"}]
    asked, _ = tokenizer.render(messages, add_generation_prompt=True)
    directory = runs / "tuned/chat/step_000020"
    flags = ["--init_from=tuned/chat", "--prompt=猫?", "--max_new_tokens=9"]
    ended = run(runs, *flags, "--system=短")
    assert ended.out == printable(texts(directory, asked, max_new_tokens=9)[0] + "\n")
    ended = run(runs, *flags, "--chat=no")
    assert ended.out == printable("猫?" + texts(directory, "猫?", max_new_tokens=9)[0] + "\n")
    ended = run(runs, "--init_from=out/older", "--prompt=猫?", "--max_new_tokens=9", "--chat=yes", "--system=短")
    assert ended.out == printable(texts(runs / "out/older/step_000020", asked, max_new_tokens=9)[0] + "\n")


# ---- chat -----------------------------------------------------------------------------------------------------------


def by_hand(
    tuned: tuple[Transformer, Tokenizer], messages: list[str], seed: int, system: str = "", **changes: object
) -> list[str]:
    """The answers of a conversation, each generated from its whole prompt without a session."""
    net, tokenizer = tuned
    talk = [{"role": "system", "content": system}] if system else []
    answers = []
    for message in messages:
        talk.append({"role": "user", "content": message})
        ids, _ = tokenizer.render(talk, add_generation_prompt=True)
        found = generate(net, tokenizer, [ids], params_of(tokenizer, net, seed=seed, **changes))[0].completions[0]
        talk.append({"role": "assistant", "content": found.text})
        answers.append(found.text)
    return answers


def lines(*texts: str) -> bytes:
    return "".join(text + "\n" for text in texts).encode()


def test_a_scripted_chat_equals_generation_from_whole_prompts(runs, tuned):
    said = ["从前有一只猫", "and then?", "🙂" * 3]
    want = by_hand(tuned, said, 7, system="答", max_new_tokens=30)
    flags = ["--init_from=tuned/chat", "--max_new_tokens=30", "--seed=7"]
    ended = run(runs, *flags, "--system=答", said=lines(*said))
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == printable("".join(text + "\n" for text in want))
    assert any("\u4e00" <= character <= "\u9fff" for character in ended.out)
    assert run(runs, *flags, said=lines(*said)).out != ended.out


def test_commands_of_a_chat(runs, tuned):
    options = {"max_new_tokens": 12}
    said = ["one", "/temp 0", "two", "/system 短", "/reset", "three", "/forget", "/exit", "never asked"]
    ended = run(runs, "--init_from=tuned/chat", "--max_new_tokens=12", "--seed=1", said=lines(*said))
    net, tokenizer = tuned
    kept = Chat(Engine(net, tokenizer, 1), params_of(tokenizer, net, seed=1, **options))
    first = "".join(kept.ask("one"))
    assert [first] == by_hand(tuned, ["one"], 1, **options)
    kept.params = dataclasses.replace(kept.params, temperature=0.0)
    second = "".join(kept.ask("two"))
    third = by_hand(tuned, ["three"], 0, system="短", temperature=0.0, **options)[0]
    assert ended.code == 0 and ended.out == printable("".join(text + "\n" for text in (first, second, third)))
    for words in ("temperature is 0", "system message is set", "forgotten", "/reset"):
        assert words in ended.err


@pytest.mark.parametrize("word", ["/exit", "/quit", " /quit ", "／exit"])
def test_words_that_end_a_chat(runs, word):
    ended = run(runs, "--init_from=tuned/chat", "--max_new_tokens=5", said=lines(word, "never asked"))
    assert (ended.code, ended.out, ended.err) == (0, "", "")


def test_help_in_a_chat_names_its_commands_and_each_exists(runs):
    ended = run(runs, "--init_from=tuned/chat", "--max_new_tokens=5", said=lines("/help"))
    assert (ended.code, ended.out, ended.err.count("\n")) == (0, "", 1)
    named = re.findall(r"/\w+", ended.err)
    assert set(named) == {"/reset", "/system", "/temp", "/help", "/exit", "/quit"}
    ended = run(runs, "--init_from=tuned/chat", said=lines(*(name + " 1" for name in named)))
    assert ended.code == 0 and "no command" not in ended.err


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("/temp warm", "number"), ("/temp -1", "temperature"), ("/temp", "number"),
        ("/forget", "/forget"), ("好" * 3000, "2048"), ("／temp 热", "number"), (" ／帮助", "no command /帮助. /reset"),
        ("/?", "no command /?. /reset"),
    ],
)  # fmt: skip
def test_mistakes_in_a_chat_are_one_line_and_it_goes_on(runs, tuned, said, words):
    ended = run(runs, "--init_from=tuned/chat", "--max_new_tokens=5", said=lines("", said, "  ", "hello"))
    [want] = by_hand(tuned, ["hello"], sample.seed, max_new_tokens=5)
    assert (ended.code, ended.out) == (0, printable(want) + "\n")
    assert ended.err.count("\n") == 1 and words in ended.err


def test_a_path_is_not_a_command_and_bad_bytes_are_replaced(runs, tuned):
    ended = run(runs, "--init_from=tuned/chat", "--max_new_tokens=5", said=b"/etc/passwd is\n\xe7\x8c\n")
    want = by_hand(tuned, ["/etc/passwd is", "\ufffd"], 1337, max_new_tokens=5)
    assert (ended.err, ended.out) == ("", printable("".join(text + "\n" for text in want)))


FULL = "The context is full, as 30 of 160 tokens are kept for the answer (max_new_tokens): the oldest turn is "
FULL += "forgotten.\n"


def test_the_oldest_turns_make_room_and_the_system_message_stays(tuned, capsys):
    net, tokenizer = tuned
    net = random_model(dataclasses.replace(net.cfg, block_size=160), seed=5)
    talk = Chat(Engine(net, tokenizer, 1), params_of(tokenizer, net, max_new_tokens=30), system="短")
    [a], prompts = tokenizer.encode("a"), []

    def run(requests: list[Request]) -> Iterator[tuple[None, Token]]:
        prompts.append(requests[0].ids)
        return iter([(None, Token(a, "a", "", {}))] * 30)

    talk.engine.run = run
    ids = [tokenizer.render([{"role": "user", "content": f"{i}"}], add_generation_prompt=True)[0] for i in range(9)]
    answer = tokenizer.encode("a" * 30)
    turns = [[*asked, *answer, tokenizer.im_end_id, *tokenizer.encode("\n")] for asked in ids]
    head = tokenizer.render([{"role": "system", "content": "短"}])[0]
    fit = (160 - 30 - len(head) - len(ids[0])) // len(turns[0])
    assert 1 <= fit < 8
    for i in range(9):
        chat.show(talk, talk.ask(f"{i}"))
        assert prompts[-1] == head + sum(turns[max(0, i - fit) : i], []) + ids[i], i
        shown = capsys.readouterr()
        assert shown.out == "a" * 30 + "\n"
        assert shown.err == (FULL if i > fit else "")


def test_an_answer_longer_than_the_context_leaves_half_of_it_to_the_history(tuned):
    net, tokenizer = tuned
    net = random_model(dataclasses.replace(net.cfg, block_size=160), seed=5)
    talk = Chat(Engine(net, tokenizer, 1), params_of(tokenizer, net, max_new_tokens=1000))
    talk.turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    list(talk.ask("?"))
    assert len(talk.turns) == 4 and talk.dropped == 0


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_only(tuned, capsys):
    net, tokenizer = tuned
    params = params_of(tokenizer, net, max_new_tokens=200, ignore_eos=True, seed=1)
    talk = Chat(Engine(net, tokenizer, 1), params)
    real, stop_after = talk.engine.run, 11

    def run(requests: list[Request]) -> Iterator[tuple[Sample, Token]]:
        for count, drawn in enumerate(real(requests), 1):
            if count == stop_after:
                os.kill(os.getpid(), signal.SIGINT)
            yield drawn

    talk.engine.run = run
    before = signal.getsignal(signal.SIGINT)
    chat.show(talk, talk.ask("one"))
    assert signal.getsignal(signal.SIGINT) is before
    shown = capsys.readouterr().out
    assert by_hand(tuned, ["one"], 1, max_new_tokens=200, ignore_eos=True)[0].startswith(shown[:-1])
    assert len(shown) > 1 and shown[-1] == "\n"
    stop_after = 0
    assert talk.turns == [{"role": "user", "content": "one"}, {"role": "assistant", "content": shown[:-1]}]
    ids, _ = tokenizer.render([*talk.turns, {"role": "user", "content": "two"}], add_generation_prompt=True)
    want = generate(net, tokenizer, [ids], params)[0].completions[0].text
    chat.show(talk, talk.ask("two"))
    assert capsys.readouterr().out == want + "\n"


@pytest.mark.parametrize("flag", ["--n=2", "--num_beams=2", "--best_of=2", "--logprobs=1", "--out=x.jsonl"])
def test_what_a_chat_cannot_do_is_refused(runs, flag):
    ended = run(runs, "--init_from=tuned/chat", flag, *(["--temperature=0"] if "beams" in flag else []))
    assert ended.code == 1 and ended.out == "" and ended.err.count("\n") == 1
    assert flag[2:].partition("=")[0] in ended.err
    assert not (runs / "x.jsonl").exists()


class Terminal:
    """The script on a terminal of its own."""

    def __init__(self, cwd: Path, *arguments: str) -> None:
        self.fd, end = os.openpty()
        code = "import fcntl, runpy, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); del sys.argv[0]; "
        code += "runpy.run_path(sys.argv[0], run_name='__main__')"
        self.process = forks.Popen(
            [sys.executable, "-c", code, *command(*arguments)], stdin=end, stdout=end, stderr=end, cwd=cwd,
            env=environment(cwd), start_new_session=True,
        )  # fmt: skip
        os.close(end)
        self.seen = b""
        self.output = select.poll()  # select() takes no file above 1,023
        self.output.register(self.fd, select.POLLIN)

    def until(self, end: str) -> str:
        """What is shown before `end`; all that is left, if it ends without."""
        deadline = time.monotonic() + 120
        while end.encode() not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if self.output.poll(200):
                try:
                    self.seen += os.read(self.fd, 65536)
                except OSError:  # the other end is closed
                    break
        text, _, self.seen = self.seen.partition(end.encode())
        return text.decode("utf-8").replace("\r", "")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def ctrl_c_at_prompt(self) -> None:
        """Python passes over a signal between showing the prompt and waiting for a key, until there is a key."""
        time.sleep(0.5)
        self.type("\x03")

    def close(self) -> int:
        """Exit status."""
        self.until("never shown")
        os.close(self.fd)
        return self.process.wait()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_chat_on_a_terminal(runs, tuned):
    """Chinese, and Ctrl-D."""
    flags = ["--init_from=tuned/chat", "--temperature=0", "--max_new_tokens=150", "--ignore_eos=True", "--stop=只"]
    options = {"temperature": 0.0, "max_new_tokens": 150, "ignore_eos": True, "stop": ("只",)}
    terminal = Terminal(runs, *flags)
    assert "2,048" in terminal.until("> ")
    terminal.type("从前有一只猫\n")
    assert terminal.until("\n") == "从前有一只猫"  # the terminal's echo
    want = by_hand(tuned, ["从前有一只猫", "one"], 1337, **options)
    assert "> " not in want[0] + want[1]
    assert terminal.until("> ") == printable(want[0]) + "\n"
    terminal.type("one\n")
    assert terminal.until("> ").endswith(printable(want[1]) + "\n")
    terminal.type("\x04")
    assert terminal.close() == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_on_a_terminal(runs, tuned):
    """In an answer, which it stops, and then at the prompt, where it leaves."""
    flags = ["--init_from=tuned/chat", "--temperature=0", "--max_new_tokens=1900", "--ignore_eos=True"]
    whole = printable(by_hand(tuned, ["从前"], 1337, temperature=0.0, max_new_tokens=300, ignore_eos=True)[0])
    terminal = Terminal(runs, *flags)
    terminal.until("> ")
    terminal.type("从前\n")
    terminal.until("\n")
    begin = terminal.until(whole[:5]) + whole[:5]
    terminal.type("\x03")
    shown = begin + terminal.until("^C")
    assert shown[:300] == whole[: len(shown)][:300] and len(shown) < 1500
    terminal.until("> ")
    terminal.ctrl_c_at_prompt()
    assert terminal.close() == 0


# ---- a file of prompts ----------------------------------------------------------------------------------------------


def write_prompts(path: Path, n: int) -> list[dict]:
    rows = [{"prompt": f"row {i} 猫" * (1 + i % 4), "id": f"q{i}", "level": i % 3} for i in range(n)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return rows


def read_answers(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def head(n_prompts: int, n_done: int, block_size: int = 64, batch_size: int = 16) -> str:
    """What is said first. The tiny models have 2 layers and 4 heads of 16 features in 4 bytes."""
    gib = 2 * 2 * 4 * 16 * 4 * batch_size * (block_size + 1) / 2**30
    prompts, rows = (f"{n} {what}" + "s" * (n > 1) for n, what in ((n_prompts, "prompt"), (batch_size, "row")))
    done = f"{prompts}, {n_done} answered already"
    return f"{done}; cache up to {rows} of {block_size} tokens, {gib:.2f} GiB\n"


FILE_FLAGS = ["--prompts=q.jsonl", "--out=a.jsonl", "--max_new_tokens=12", "--n=2"]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_file_of_prompts_equals_one_by_one(runs, tmp_path, batch_size):
    rows = write_prompts(tmp_path / "q.jsonl", 7)
    directory = runs / "out/newer/step_000020"
    ended = run(tmp_path, f"--init_from={directory}", *FILE_FLAGS, f"--batch_size={batch_size}")
    assert ended == Ended(0, "", head(7, 0, batch_size=batch_size))
    answers = sorted(read_answers(tmp_path / "a.jsonl"), key=lambda answer: answer["index"])
    assert [answer["index"] for answer in answers] == list(range(7))
    for row, answer in zip(rows, answers, strict=True):
        assert {key: answer[key] for key in row} == row
        want = texts(directory, row["prompt"], max_new_tokens=12, n=2)
        assert [found["text"] for found in answer["completions"]] == want
        assert {found["finish_reason"] for found in answer["completions"]} <= {"stop", "length"}


def test_kinds_of_rows(runs, tuned, tmp_path):
    net, tokenizer = tuned
    said = [("user", "猫?"), ("assistant", "喵"), ("user", "狗?")]
    turns = [{"role": role, "content": content} for role, content in said]
    system = [{"role": "system", "content": "短"}]
    rows = ["猫?", {"prompt": "猫?"}, {"text": "猫?"}, {"messages": turns}, {"prompt": system + turns, "id": 3}]
    (tmp_path / "q.jsonl").write_text("\ufeff" + "\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    directory = runs / "tuned/chat/latest"
    flags = [f"--init_from={directory}", "--prompts=q.jsonl", "--max_new_tokens=9", "--system=长"]
    ended = run(tmp_path, *flags, "--out=a.jsonl")
    assert (ended.code, ended.err) == (0, head(5, 0, 2048))
    answers = {answer["index"]: answer for answer in read_answers(tmp_path / "a.jsonl")}
    long = [{"role": "system", "content": "长"}]
    asked = long + turns[:1], long + turns[:1], None, long + turns, system + turns
    for i, messages in enumerate(asked):
        ids = tokenizer.render(messages, add_generation_prompt=True)[0] if messages else tokenizer.encode("猫?")
        answer = answers.pop(2 * i)  # every other line is empty
        assert [found["text"] for found in answer["completions"]] == texts(directory, ids, max_new_tokens=9)
        assert {key: answer[key] for key in answer if key not in ("index", "completions")} == (
            {"prompt": "猫?"} if i == 0 else rows[i]
        )
    assert not answers


def test_thoughts_that_the_prompt_opens_are_written_with_their_mark(runs, tuned, tmp_path):
    """Also where the limit cuts them, and no other mark tells them from words."""
    net, tokenizer = tuned
    directory = shutil.copytree(runs / "tuned/chat/step_000020", tmp_path / "thinks")
    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] += "{% if add_generation_prompt %}<think>\n{% endif %}"
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "checksums.json").unlink()
    rows = [{"prompt": "猫?"}, {"text": "a <think>\n"}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = [f"--init_from={directory}", "--chat=yes", "--max_new_tokens=9"]
    assert run(tmp_path, *flags, "--prompts=q.jsonl", "--out=a.jsonl").code == 0
    asked, _ = tokenizer.render([{"role": "user", "content": rows[0]["prompt"]}], add_generation_prompt=True)
    [drawn] = texts(directory, asked + tokenizer.encode("<think>\n"), max_new_tokens=9)
    [continued] = texts(directory, "a <think>\n", max_new_tokens=9)
    found = {answer["index"]: answer["completions"][0]["text"] for answer in read_answers(tmp_path / "a.jsonl")}
    assert found == {0: "<think>\n" + drawn, 1: continued}
    assert run(tmp_path, *flags, "--prompt=猫?").out == printable(f"<think>\n{drawn}\n")


def test_without_a_file_for_them_answers_are_printed_in_order_beside_the_expected(runs, tmp_path):
    directory, n = runs / "tuned/chat/latest", 6
    flags = [f"--init_from={directory}", "--prompts=q.jsonl", "--max_new_tokens=9", "--temperature=0"]
    rows = [{"question": "猫?\n" * (n - i), "answer": ""} for i in range(n)]
    (tmp_path / "q.jsonl").write_text("\n".join(json.dumps({"prompt": row["question"]}) for row in rows), "utf-8")
    run(tmp_path, *flags, "--out=a.jsonl")
    for answer in read_answers(tmp_path / "a.jsonl"):
        rows[answer["index"]]["answer"] = answer["completions"][0]["text"]
    rows[2]["answer"] = "不对"
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    ended = run(tmp_path, *flags, "--batch_size=4")
    assert ended.code == 0
    header, *lines, summary = ended.out.splitlines()
    assert header.split(" | ") == [f"{name:40}" for name in ("question", "expected")] + ["answer"]
    for i, (row, line) in enumerate(zip(rows, lines, strict=True)):
        question, expected, _, right = (cell.strip() for cell in line.split(" | "))
        assert question == row["question"].replace("\n", "\\n")
        assert (expected, right) == ("不对", "wrong") if i == 2 else right == "right"
    assert summary == f"{n - 1} of {n} answers are the expected ones"


def test_long_expected_answers_are_cut_and_not_judged():
    """Nobody expects a model to give the same sentences."""
    table = Table({})
    long, question = "很长的回答。" * 200, "why? " * 100
    lines = [table.add(0, {"question": "sum?", "answer": "4"}, "sum?", ["5"])]
    lines += [table.add(1, {"question": question, "answer": long}, question, ["No."])]
    header, short, cut = "".join(lines).splitlines()
    assert short.split(" | ")[1].strip() == "4" and short.endswith("| wrong")
    asked, expected, answer = cut.split(" | ")
    assert asked.startswith("why? why?") and asked.endswith("...") and len(asked) == 60
    assert expected == long[:28] + "..." and answer == "No."
    assert table.summary() == "0 of 1 answers are the expected ones (1 is too long to compare)\n"
    table.add(2, {"question": question, "answer": long}, question, ["No."])
    assert table.summary() == "0 of 1 answers are the expected ones (2 are too long to compare)\n"


def test_a_model_without_tuning_says_what_it_cannot_do(runs):
    """It answers only if it is asked to, and reads no standard input."""
    ended = run(runs, "--init_from=out/newer", "--chat=yes", "--prompt=A", "--max_new_tokens=2")
    assert ended.code == 0 and "was not tuned on conversations, so it continues the text" in ended.err
    flags = ["--max_new_tokens=2", "--seed=3"]
    assert "not tuned" not in run(runs, "--init_from=tuned/chat", "--prompt=A", *flags).err
    read, write = os.pipe()
    before = os.dup(0)
    try:
        os.dup2(read, 0)
        ended = run(runs, "--init_from=out/newer", *flags)
        assert "this model continues texts, and standard input is read in a chat only; give --prompt=" in ended.err
        assert "standard input" not in run(runs, "--init_from=out/newer", "--prompt=A", *flags).err
    finally:
        os.dup2(before, 0)
        for number in (read, write, before):
            os.close(number)
    assert "standard input" not in run(runs, "--init_from=out/newer", *flags).err


def test_the_end_of_the_context_is_said(runs, tmp_path):
    flags = ["--init_from=out/newer", "--ignore_eos=True", "--max_new_tokens=500"]
    longer = "for longer ones train with --block_size=256 and a smaller --batch_size"
    for more in (["--prompt=The"], ["--prompt=The", "--n=2"], ["--prompt=The", "--num_beams=2", "--temperature=0"]):
        ended = run(runs, *flags, *more)
        assert (ended.code, ended.err) == (0, f"sample: the model's context of 64 tokens ended the text; {longer}\n")
    assert run(runs, *flags[:2], "--prompt=The", "--max_new_tokens=9").err == ""
    (tmp_path / "q.jsonl").write_text('"The"\n"A"\n', encoding="utf-8")
    ended = run(runs, *flags, f"--prompts={tmp_path}/q.jsonl", f"--out={tmp_path}/a.jsonl")
    end = f"sample: the model's context of 64 tokens ended the answers to 2 of 2 prompts; {longer}\n"
    assert ended.err.endswith(end)


def test_texts_that_a_model_continues_are_printed_without_a_file_for_them(runs, tmp_path):
    directory = runs / "out/newer/step_000020"
    (tmp_path / "q.jsonl").write_text('{"prompt": "猫"}\n"a\\nb"\n{"text": "c"}\n', encoding="utf-8")
    flags = [f"--init_from={directory}", "--prompts=q.jsonl", "--max_new_tokens=9", "--temperature=0"]
    ended = run(tmp_path, *flags)
    assert ended.code == 0
    for text, line in zip(("猫", "a\nb", "c"), ended.out.splitlines(), strict=True):
        (answer,) = texts(directory, text, max_new_tokens=9, temperature=0)
        shown = f"{text}  ->  {answer}".replace("\n", "\\n")  # else nobody sees where a line ends
        assert line == printable(shown)


def test_a_conversation_that_ends_with_its_answer_is_answered_from_what_precedes(runs, tuned, tmp_path):
    """And keeps its own answer, which pairs are made of."""
    _, tokenizer = tuned
    said = [("user", "猫?"), ("assistant", "喵"), ("user", "狗?"), ("assistant", "汪汪")]
    turns = [{"role": role, "content": content} for role, content in said]
    system = [{"role": "system", "content": "短"}]
    rows = [{"messages": turns, "id": 7}, {"messages": turns[:2]}, {"prompt": system + turns}]
    nothing = [{"messages": turns[1:2]}, {"messages": system + turns[1:2]}, {"messages": turns[:2] + turns[1:2]}]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows + nothing]
    (tmp_path / "q.jsonl").write_text("".join(lines), encoding="utf-8")
    directory = runs / "tuned/chat/latest"
    flags = [f"--init_from={directory}", "--prompts=q.jsonl", "--out=a.jsonl", "--max_new_tokens=9"]
    ended = run(tmp_path, *flags)
    assert ended.code == 0
    _, *problems, summary = ended.err.splitlines()
    assert [line.partition(": ")[0] for line in problems] == [f"q.jsonl:{number}" for number in (4, 5, 6)]
    assert all("no question before the answer" in line for line in problems) and "3 of 6 prompts" in summary
    answers = sorted(read_answers(tmp_path / "a.jsonl"), key=lambda answer: answer["index"])
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    for answer, row, messages in zip(answers, rows, (turns[:3], turns[:1], system + turns[:3]), strict=True):
        assert {key: answer[key] for key in answer if key not in ("index", "completions")} == row
        asked = tokenizer.render(messages, add_generation_prompt=True)[0]
        assert [found["text"] for found in answer["completions"]] == texts(directory, asked, max_new_tokens=9)
    assert run(tmp_path, *flags).err.splitlines()[0] == head(6, 3, 2048).strip()  # continued


def test_rows_that_cannot_be_answered_are_named_and_counted(runs, tmp_path):
    bad = [
        (b"{'prompt': 1}", "property name"),
        (b"What is a cat?", 'write "a prompt" or {"prompt": "..."} in each line'),
        (b'{"prompt": "\xff"}', "utf-8"),
        (b'{"query": "?"}', "give prompt, messages or text"),
        (b"[1]", "must be a text or an object, got [1]"),
        (b'{"prompt": 3}', "int, not text"),
        (b'{"messages": "hi"}', "not a list of turns"),
        (b'{"messages": []}', "no turns"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "a turn (user) holds int, not text"),
        (b'{"messages": [{"role": "robot", "content": "a"}]}', "robot"),
        (b'{"messages": ["hi"]}', "not a list of turns"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "no question before the answer"),
        (b'{"prompt": "a", "index": 3}', "'index'"),
        (json.dumps({"text": "猫 " * 100}).encode(), "the context 64"),
        (b"[" * 100_000, "nests too deep"),
    ]
    # Good ones in UTF-8: beside ASCII alone a byte that is not would put the encoding in doubt.
    good, init_from = '{"prompt": "猫"}'.encode(), f"--init_from={runs / 'out/newer'}"
    for k in range(0, len(bad), 3):  # three are named
        lines = [line for pair in bad[k : k + 3] for line in (pair[0], good, good)]
        (tmp_path / "q.jsonl").write_bytes(b"\n".join(lines))
        ended = run(tmp_path, init_from, "--prompts=q.jsonl", f"--out={k}.jsonl", "--max_new_tokens=3")
        assert ended.code == 0 and ended.out == ""
        _, *problems, summary = ended.err.splitlines()
        assert len(problems) == 3 and summary == "sample: 3 of 9 prompts are not answered, see above"
        for number, (problem, (_, words)) in enumerate(zip(problems, bad[k : k + 3], strict=True)):
            assert problem.startswith(f"q.jsonl:{3 * number + 1}: ") and words in problem, problem
        answers = read_answers(tmp_path / f"{k}.jsonl")
        assert sorted(answer["index"] for answer in answers) == [1, 2, 4, 5, 7, 8]
        assert len({answer["completions"][0]["text"] for answer in answers}) == 1
    (tmp_path / "q.jsonl").write_bytes(b"\n".join(line for line, _ in bad if line.isascii()))
    ended = run(tmp_path, init_from, "--prompts=q.jsonl")
    assert ended.code == 1 and len(ended.err.splitlines()) == 5  # none is answered, of which three are named
    assert ended.err.splitlines()[-1] == "sample: 14 of 14 prompts are not answered, the first 3 are above"


@pytest.mark.parametrize("encoding", ["gbk", "utf-16", "utf-8-sig"])
def test_prompts_are_read_in_the_encoding_of_their_file(runs, tmp_path, encoding):
    """As prepare.py and evaluate.py read it."""
    rows = [{"question": f"请问第{n}题的答案是什么？", "answer": f"答案是{n}。"} for n in range(40)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "q.jsonl").write_bytes(text.encode(encoding))
    flags = ["--prompts=q.jsonl", "--out=a.jsonl", "--max_new_tokens=3"]
    ended = run(tmp_path, f"--init_from={runs / 'tuned/chat'}", *flags)
    assert ended.code == 0 and "not answered" not in ended.err, ended.err
    answers = sorted(read_answers(tmp_path / "a.jsonl"), key=lambda answer: answer["index"])
    assert [{key: answer[key] for key in rows[0]} for answer in answers] == rows


def test_prompts_in_an_unknown_encoding_are_one_line_with_advice(runs, tmp_path):
    lines = [json.dumps({"prompt": f"d\u00e9j\u00e0 vu {n}"}, ensure_ascii=False) for n in range(9)]
    (tmp_path / "q.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    ended = run(tmp_path, f"--init_from={runs / 'tuned/chat'}", "--prompts=q.jsonl")
    assert ended.code == 1 and "iconv" in ended.err and ended.err.count("\n") == 1, ended.err


def test_half_a_surrogate_pair_survives(runs, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"prompt": "a\\ud800b"}\n', encoding="utf-8")
    for done in range(2):
        assert run(tmp_path, f"--init_from={runs / 'out/newer'}", *FILE_FLAGS) == Ended(0, "", head(1, done))
    [answer] = read_answers(tmp_path / "a.jsonl")
    assert answer["prompt"] == "a\ud800b"


@pytest.mark.slow
def test_continued_after_a_kill_and_an_interruption(runs, tmp_path):
    rows = write_prompts(tmp_path / "q.jsonl", 40)
    flags = ["--prompts=q.jsonl", "--max_new_tokens=8", f"--init_from={runs / 'tuned/chat'}"]
    line = [sys.executable, *command(*flags, "--out=a.jsonl", "--batch_size=2")]
    out, complete = tmp_path / "a.jsonl", b""
    for number, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        n_before = complete.count(b"\n")
        with forks.Popen(line, cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE) as process:
            while not out.exists() or out.read_bytes().count(b"\n") < n_before + 3:
                assert process.poll() is None
                time.sleep(0.002)
            process.send_signal(number)
            said = "" if number == signal.SIGKILL else "sample: interrupted; run the same command again\n"
            assert process.stderr.read().decode() == head(40, n_before, 2048, batch_size=2) + said
            assert process.wait() == code
        before = out.read_bytes()
        assert before.startswith(complete) and n_before + 3 <= before.count(b"\n") < len(rows)
        complete = before[: before.rfind(b"\n") + 1]
        with open(out, "ab") as f:
            f.write(b'{"index": 39, "prompt": "ro')  # cut short
    ended = run(tmp_path, *flags, "--out=a.jsonl", "--batch_size=5")
    assert ended == Ended(0, "", head(40, complete.count(b"\n"), 2048, batch_size=5))
    assert out.read_bytes().startswith(complete)
    assert run(tmp_path, *flags, "--out=whole.jsonl") == Ended(0, "", head(40, 0, 2048))
    by_index = sorted(read_answers(out), key=lambda answer: answer["index"])
    assert [answer["index"] for answer in by_index] == list(range(40))
    assert by_index == sorted(read_answers(tmp_path / "whole.jsonl"), key=lambda answer: answer["index"])


def test_answers_of_other_settings_or_prompts_are_not_mixed(runs, tmp_path):
    rows = write_prompts(tmp_path / "q.jsonl", 3)
    init = f"--init_from={runs / 'out/newer'}"
    assert run(tmp_path, init, *FILE_FLAGS).code == 0
    before = (tmp_path / "a.jsonl").read_bytes()
    for flag, words in [
        ("--temperature=0.5", ["temperature=0.8", "0.5"]),
        ("--seed=2", ["seed=1337", "2"]),
        ("--stop=x", ["stop=''", "'x'"]),
        ("--system=x", ["system"]),
        ("--chat=yes", ["chat=False", "True"]),
        ("--dtype=bfloat16", ["dtype='float32'"]),
        (f"--init_from={runs / 'out/older'}", ["model="]),
    ]:
        key = flag.partition("=")[0]
        ended = run(tmp_path, *[old for old in (init, *FILE_FLAGS) if not old.startswith(key)], flag)
        assert ended.code == 1 and ended.err.count("\n") == 1, ended
        assert all(word in ended.err for word in ["a.jsonl", *words]), ended.err
    ended = run(tmp_path, init, *FILE_FLAGS, "--batch_size=1")  # decides nothing
    assert ended == Ended(0, "", head(3, 3, batch_size=1))
    assert (tmp_path / "a.jsonl").read_bytes() == before
    with open(tmp_path / "q.jsonl", "a", encoding="utf-8") as f:
        f.write('"one more"\n')
    assert run(tmp_path, init, *FILE_FLAGS).code == 0
    assert [answer["index"] for answer in read_answers(tmp_path / "a.jsonl")][3:] == [3]
    rows[1]["prompt"] = "another"
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    ended = run(tmp_path, init, *FILE_FLAGS)
    assert ended.code == 1 and "line 2 of q.jsonl" in ended.err and ended.err.count("\n") == 1


def test_a_file_that_is_not_ours_is_left_alone(runs, tmp_path):
    write_prompts(tmp_path / "q.jsonl", 2)
    flags = [f"--init_from={runs / 'out/newer'}", *FILE_FLAGS]
    (tmp_path / "a.jsonl").write_text("precious", encoding="utf-8")
    ended = run(tmp_path, *flags)
    assert ended.code == 1 and "a.jsonl.config.json" in ended.err and ended.err.count("\n") == 1
    assert (tmp_path / "a.jsonl").read_text(encoding="utf-8") == "precious"
    (tmp_path / "a.jsonl").unlink()
    assert run(tmp_path, *flags).code == 0
    lines = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "a.jsonl").write_text("\n".join([lines[0], "half a li", ""]), encoding="utf-8")
    ended = run(tmp_path, *flags)
    assert ended.code == 1 and "a.jsonl:2 is damaged" in ended.err and ended.err.count("\n") == 1


def test_two_processes_do_not_write_the_same_answers(runs, tmp_path):
    write_prompts(tmp_path / "q.jsonl", 2)
    flags = [f"--init_from={runs / 'out/newer'}", *FILE_FLAGS]
    with open(tmp_path / "a.jsonl", "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ended = run(tmp_path, *flags)
    assert ended.code == 1 and "another process is writing a.jsonl" in ended.err, ended.err
    assert run(tmp_path, *flags).code == 0 and len(read_answers(tmp_path / "a.jsonl")) == 2


# ---- tools -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tuned, tmp_path, monkeypatch):
    """Let the model "draw" these texts, one after another; own.py has a tool that adds."""
    (tmp_path / "own.py").write_text(FILE[: FILE.index("def hang")], encoding="utf-8")

    def write(*texts: str) -> None:
        left = deque(token for text in texts for token in drawn_ids(tuned[1], text))
        monkeypatch.setattr(sampling, "choose", lambda logits, *_: torch.tensor([left.popleft() for _ in logits]))

    return write


@pytest.mark.parametrize("piped", (True, False))
def test_an_answer_calls_a_tool_and_goes_on(runs, tmp_path, script, piped):
    script(CALL + "<|im_end|>", "It is 5.<|im_end|>", "No.<|im_end|>")
    flags = ["--init_from=tuned/chat", f"--tools={tmp_path / 'own.py'}", "--max_new_tokens=300"]
    said = f"{CALL}\n-> 5\nIt is 5.\n"
    if piped:
        found = run(runs, *flags, said="2 + 3?\n再见\n".encode())
        assert found.out == said + "No.\n", found
    else:
        assert run(runs, *flags, "--prompt=2 + 3?").out == said


def test_a_chat_remembers_turns_of_tools_and_forgets_them_together(tuned, tmp_path, script):
    net, tokenizer = tuned
    script(CALL + "<|im_end|>", "It is 5.<|im_end|>", *["No.<|im_end|>"] * 9)
    tools = Tools(str(tmp_path / "own.py"))
    talk = Chat(Engine(net, tokenizer, 1), params_of(tokenizer, net, max_new_tokens=300), tools=tools)
    list(talk.ask("2 + 3?"))
    assert [turn["role"] for turn in talk.turns] == ["user", "assistant", "tool", "assistant"]
    assert talk.turns[1]["content"] == CALL and talk.turns[2]["content"] == "5"
    while not talk.dropped:
        list(talk.ask("no" * 200))
    tools.close()
    assert talk.turns[0] == {"role": "user", "content": "no" * 200}


def test_a_file_of_prompts_whose_answers_call_tools(runs, tmp_path, script):
    script(CALL + "<|im_end|>", "No.<|im_end|>", "It is 5.<|im_end|>")
    rows = [{"question": "2 + 3?", "answer": "It is 5."}, {"question": "And?", "answer": "Yes."}]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--init_from=tuned/chat", f"--tools={tmp_path / 'own.py'}", "--batch_size=1"]
    found = run(runs, *flags, f"--prompts={tmp_path / 'asked.jsonl'}", "--max_new_tokens=300")
    rows = [[cell.strip() for cell in line.split(" | ")] for line in found.out.splitlines()]
    assert rows[1:3] == [["2 + 3?", "It is 5.", "It is 5.", "right"], ["And?", "Yes.", "No.", "wrong"]], found


def test_logprobs_are_printed_as_json(runs):
    """Of the tokens and of the prompt, against the logits of one pass over both."""
    directory = runs / "out/newer/step_000020"
    tokenizer, net = Tokenizer.load(directory), huggingface.load_model(directory)
    flags = ["--prompt=The 猫", "--max_new_tokens=5", "--logprobs=2", "--prompt_logprobs=0", "--temperature=0.5"]
    ended = run(runs, "--init_from=out/newer", *flags)
    assert (ended.code, ended.err) == (0, "")
    answer = json.loads(ended.out)
    [found] = answer["completions"]
    ids = tokenizer.encode("The 猫")
    with torch.no_grad():
        want = net(torch.tensor([ids + found["ids"]]))[0].log_softmax(-1)
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == len(ids)
    for k, [entry] in enumerate(answer["prompt_logprobs"][1:]):
        assert entry["id"] == ids[k + 1] and entry["logprob"] == pytest.approx(want[k, ids[k + 1]].item(), abs=1e-5)
    assert len(found["logprobs"]) == 5
    for k, entries in enumerate(found["logprobs"]):
        row = want[len(ids) - 1 + k]
        likeliest = {found["ids"][k], *row.topk(2).indices.tolist()}
        assert {entry["id"] for entry in entries} == likeliest
        for entry in entries:
            assert entry["logprob"] == pytest.approx(row[entry["id"]].item(), abs=1e-5)
            piece = tokenizer.decode_bytes([entry["id"]]).decode("utf-8", "replace")
            assert entry["token"] == piece


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature=-1"], ["sample: temperature", "-1.0"]),
        (["--n=0"], ["sample: n must be", "0"]),
        (["--prompt=" + "猫 " * 100], ["tokens", "64"]),
        (["--prompt=" + "猫 " * 100, "--logprobs=1"], ["tokens", "64"]),
        (["--init_from=out/nothing"], ["out/nothing"]),
        (["--temprature=1"], ["'temprature'", "'temperature'"]),
        (["--chat=maybe"], ["chat", "maybe"]),
        (["--system=短"], ["system", "--chat=yes"]),
        (["--batch_size=0"], ["batch_size", "0"]),
        (["--stop_token_ids=1,x"], ["stop_token_ids", "1,x"]),
        ([f"--stop_token_ids={'9' * 5000}"], ["stop_token_ids must be ids separated by commas"]),
        (["--prompt=a", "--prompts=b.jsonl"], ["both"]),
        (["--prompts=nowhere.jsonl"], ["nowhere.jsonl", "No such file"]),
        (["--prompts=empty.jsonl"], ["empty.jsonl", "no prompts"]),
        (["--prompt=a", "--out=empty.jsonl/a.jsonl"], ["empty.jsonl"]),
        (["--best_of_by=reward", "--best_of=2"], ["best_of_by", "reward"]),
        (["--tools=own.py"], ["tools", "--chat=yes"]),
        (["--tools=own.py", "--chat=yes", "--n=2"], ["tools", "n, best_of"]),
        (["--tools=own.py", "--chat=yes", "--prompt=a"], ["tools='own.py'", "no such Python file"]),
    ],
)
def test_mistakes_are_one_line(runs, arguments, words):
    (runs / "empty.jsonl").touch()
    ended = run(runs, *arguments)
    assert ended.code == 1
    assert ended.out == ""
    said = ended.err.removeprefix("from out/newer/step_000020, the newest run\n")
    assert said.count("\n") == 1 and all(word in said for word in words), said


@pytest.mark.slow
def test_a_mistake_on_a_real_command_line(runs):
    line = [sys.executable, *command("--prompt=The", "--top_p=2")]
    done = forks.run(line, cwd=runs, env=environment(runs), capture_output=True, encoding="utf-8", timeout=120)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("sample: top_p")


def test_no_run_yet_is_one_line(tmp_path):
    ended = run(tmp_path)
    assert ended.code == 1
    assert ended.err.count("\n") == 1 and "--init_from" in ended.err
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(runs):
    line = [sys.executable, *command("--init_from=out/newer", "--n=20", "--ignore_eos=True")]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with forks.Popen(line, cwd=runs, env=environment(runs), **pipe) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 141


def test_every_key_has_a_comment(runs):
    """And every parameter of the engine that a user can choose is a key."""
    source = (ROOT / "sample.py").read_text(encoding="utf-8").partition("# ---- config")[2].partition("FREE_KEYS")[0]
    keys = {line.partition(" = ")[0]: line.partition("  # ")[2] for line in source.splitlines() if " = " in line}
    assert all(keys.values()) and len(keys) > 25
    derived = {"eos_ids", "banned_ids", "json_object"}  # the last: of requests to the server
    assert {field.name for field in dataclasses.fields(SamplingParams)} - derived <= set(keys)


def test_a_prompt_on_each_line_of_a_txt_file(tmp_path):
    """JSON lines stay JSON; a file of another name must hold JSON."""
    lines = ["你好，世界", "", ' {"prompt": "a"}', '"b"', "12", '{"broken', "[1, 2]"]
    for name in ("a.txt", "a.txt.gz", "a.jsonl"):
        raw = "\n".join(lines).encode()
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    for name in ("a.txt", "a.txt.gz"):
        found = read_prompts(str(tmp_path / name))
        prompts = [parse(found[k])["prompt"] for k in (0, 2, 3, 4, 5, 6)]
        assert prompts == ["你好，世界", "a", '"b"', "12", '{"broken', "[1, 2]"]
    plain = ['"To be or not"', '{"a":1}', '{"name": "x", "age": 3}', "null", "{}", '["prompt"]']
    (tmp_path / "b.txt").write_text("\n".join(plain), "utf-8")
    assert [parse(line)["prompt"] for line in read_prompts(str(tmp_path / "b.txt")).values()] == plain
    asked = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}, {"text": "a"}]
    asked += [{"question": "a", "answer": "b"}, {"instruction": "a"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    (tmp_path / "b.txt").write_text("\n".join(map(json.dumps, asked)), "utf-8")
    assert [parse(line) for line in read_prompts(str(tmp_path / "b.txt")).values()] == asked
    with pytest.raises(ValueError, match="not JSON: .* or plain text in a .txt"):
        parse(read_prompts(str(tmp_path / "a.jsonl"))[0])


def test_an_array_or_a_table_of_prompts_is_read_as_lines_are(tmp_path):
    asked = ["你好", {"prompt": "a"}, {"question": "b\nc", "answer": "d"}, {"text": "e"}]
    as_rows = [{"prompt": "你好"}, *asked[1:]]
    for text in (json.dumps(asked), json.dumps(asked, ensure_ascii=False, indent=2), "\n".join(map(json.dumps, asked))):
        (tmp_path / "a.json").write_text(text, "utf-8")
        assert [parse(line) for line in read_prompts(str(tmp_path / "a.json")).values()] == as_rows
    (tmp_path / "a.json").write_text("[\n" + ",\n".join(['"好"', '{"prompt": 1,}', '"b"']) + "\n]", "utf-8")
    found = read_prompts(str(tmp_path / "a.json"))
    assert [parse(found[k])["prompt"] for k in (0, 2)] == ["好", "b"]
    with pytest.raises(ValueError):  # costs its element alone
        parse(found[1])
    (tmp_path / "a.csv").write_text('question,answer\n你好,a\n"b\nc",d\n', "utf-8")
    rows = [{"question": "你好", "answer": "a"}, {"question": "b\nc", "answer": "d"}]
    assert [parse(line) for line in read_prompts(str(tmp_path / "a.csv")).values()] == rows
