"""configurator.py: precedence, types, mistakes, help, and a resolved configuration that gives the same values again."""

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import configurator
from configurator import configure, resolve, write_config
from groundup.errors import UserError

ROOT = Path(configurator.__file__).parent
KEYS = {
    "learning_rate": 1e-3,
    "max_steps": 100,
    "warmup_steps": 10,
    "compile": True,
    "prompt": "once",
    "out_dir": "out/x",
    "grad_clip": 1.0,
}


@pytest.fixture
def override(tmp_path):
    """Writes an override file and returns its path."""

    def write(source: str, name: str = "config.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return str(path)

    return write


def changed(argv: list[str]) -> dict:
    """The settings that differ from the defaults."""
    config = resolve(KEYS, argv)
    assert list(config) == list(KEYS)
    assert {k: type(v) for k, v in config.items()} == {k: type(v) for k, v in KEYS.items()}
    return {k: v for k, v in config.items() if v != KEYS[k]}


def mistake(argv: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        resolve(KEYS, argv)
    return str(caught.value)


# ---- precedence -----------------------------------------------------------------------------------------------------


def test_defaults_then_files_then_flags_wherever_they_stand(override):
    first = override("learning_rate = 0.1\nmax_steps = 1", "first.py")
    second = override("learning_rate = 0.2\nout_dir = 'second'", "second.py")
    assert changed([]) == {}
    assert changed([first]) == {"learning_rate": 0.1, "max_steps": 1}
    assert changed([first, second]) == {"learning_rate": 0.2, "max_steps": 1, "out_dir": "second"}
    assert changed([second, first]) == {"learning_rate": 0.1, "max_steps": 1, "out_dir": "second"}
    flag, others = "--learning_rate=0.3", {"max_steps": 1, "out_dir": "second"}
    for argv in ([flag, first, second], [first, flag, second], [first, second, flag]):
        assert changed(argv) == {"learning_rate": 0.3} | others


def test_values_are_computed_from_those_so_far(override):
    path = override(
        """
        import math
        from math import ceil
        from pathlib import Path
        _factor = 3  # a helper
        def twice(x):
            return 2 * x
        class Shape:
            width = 7
        max_steps = twice(warmup_steps) * _factor + ceil(math.pi) + Shape.width
        learning_rate = math.sqrt(learning_rate)
        out_dir = str(Path("out") / Path(__file__).stem)
        """
    )
    want = {
        "max_steps": 71,
        "learning_rate": math.sqrt(1e-3),
        "out_dir": os.path.join("out", "config"),
    }
    assert changed([path]) == want
    again = override("max_steps = max_steps + 1", "again.py")
    assert changed([path, again])["max_steps"] == 72


def test_configure_writes_into_the_namespace_and_returns_everything():
    namespace = {
        "__name__": "x", "_private": 1, "SHOUT": 2, "steps": 3, "rate": 0.5, "name": "n", "flag": False,
        "module": os, "function": len, "table": [1], "nothing": None,
    }  # fmt: skip
    before = dict(namespace)
    hook = sys.excepthook
    try:
        config = configure(namespace, ["--steps=4", "--flag=True"])
    finally:
        sys.excepthook = hook
    assert config == {"steps": 4, "rate": 0.5, "name": "n", "flag": True}
    assert namespace == before | {"steps": 4, "flag": True}


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--learning_rate=1", 1.0),
        ("--learning_rate=-1e-30", -1e-30),
        ("--learning_rate=1e999", math.inf),
        ("--max_steps=-1", -1),
        ("--max_steps=1_000_000", 10**6),
        ("--max_steps=0x10", 16),
        ("--compile=False", False),
        ("--prompt=", ""),
        ("--prompt=a=b", "a=b"),
        ("--prompt=--max_steps=5", "--max_steps=5"),
        ("--prompt=从前有座山, 山里有座庙🙂", "从前有座山, 山里有座庙🙂"),
        ("--prompt=1", "1"),
        ("--prompt=True", "True"),
        ("--prompt=None", "None"),
        ('--prompt="a" and "b"', '"a" and "b"'),
        ('--prompt="quoted"', '"quoted"'),
        ("--prompt='it''s'", "'it''s'"),
        ("--prompt=two\nlines\\n", "two\nlines\\n"),
        ("--prompt= spaces  ", " spaces  "),
    ],
)
def test_flag_values(flag, value):
    key = flag[2:].partition("=")[0]
    got = resolve(KEYS, [flag])[key]
    assert got == value and type(got) is type(KEYS[key])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("max_steps=2.5", "max_steps must be a whole number, got 2.5"),
        ("max_steps=1e3", "max_steps must be a whole number, got 1000.0"),
        ("max_steps=True", "max_steps must be a whole number, got True"),
        ("max_steps=None", "max_steps must be a whole number, got None"),
        ("learning_rate=True", "learning_rate must be a number, got True"),
        ("learning_rate=[1]", "learning_rate must be a number, got [1]"),
        ("compile=1", "compile must be True or False, got 1"),
        ("compile=None", "compile must be True or False, got None"),
        ("max_stepz=1", "unknown key 'max_stepz' (did you mean 'max_steps'?)"),
        ("zzz=1", "unknown key 'zzz'"),
        ("zzz=None", "unknown key 'zzz'"),
    ],
)
def test_wrong_types_and_unknown_keys_in_flags_and_files(setting, words, override):
    in_flag, in_file = mistake([f"--{setting}"]), mistake([override(setting)])
    assert in_flag.startswith(f"config: {words} on the command line")
    assert in_file.startswith(f"config: {words} in ") and "config.py" in in_file


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--compile=true", "compile must be True or False, got 'true'"),
        ("--compile=false", "compile must be True or False, got 'false'"),
        ("--compile=", "compile must be True or False, got ''"),
        ("--learning_rate=fast", "learning_rate must be a number, got 'fast'"),
        (
            "--max_steps=2 * 3",
            "max_steps must be a whole number, got '2 * 3'",
        ),  # a flag is a value, not a program
        ("--max_steps=__import__('os')", "max_steps must be a whole number, got \"__import__('os')\""),
        ("--max_steps={[]: 1}", "max_steps must be a whole number, got '{[]: 1}'"),
        ("--max_steps=" + "(" * 500, "max_steps must be a whole number, got '((("),
        ("--learning_rate=" + "9" * 400, "learning_rate must be a number, got 999"),
    ],
)
def test_values_that_are_no_literal_of_the_type(flag, words):
    assert mistake([flag]).startswith("config: " + words)


def test_text_for_a_number_in_a_file(override):
    assert "learning_rate must be a number, got '0.1' in " in mistake([
        override("learning_rate = '0.1'")
    ])
    assert "prompt must be text in quotes, got 5 in " in mistake([override("prompt = 5")])


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--learing_rate=1", "learning_rate"),
        ("--learning-rate=1", "learning_rate"),
        ("-max_steps=3", "max_steps"),
        ("--no-compile", "compile"),
        ("--lr=3", "learning_rate"),
        ("--max_iters=3", "max_steps"),
        ("--MAX_STEPS=3", "max_steps"),
    ],
)
def test_the_nearest_key_is_named(wrong, right):
    assert f"did you mean '{right}'?" in mistake([wrong])


def hints(script: str, *flags: str) -> str:
    keys = configurator.defaults_of(ROOT / script)
    with pytest.raises(UserError) as caught:
        resolve(keys, [f"--{flag}=1" for flag in flags])
    return str(caught.value)


@pytest.mark.parametrize(
    ("script", "foreign", "ours"),
    [
        ("sft.py", "num_train_epochs", "epochs"),
        ("dpo.py", "num_epochs", "epochs"),
        ("sft.py", "max_seq_length", "block_size"),
        ("sft.py", "save_steps", "save_every"),
        ("sft.py", "logging_steps", "log_every"),
        ("sft.py", "train_file", "data"),
        ("prepare.py", "dataset_name", "input"),
        ("pretrain.py", "dataset", "data_dir"),
        ("sft.py", "per_device_train_batch_size", "batch_size"),
        ("sft.py", "gradient_accumulation_steps", "total_batch_tokens"),
        ("dpo.py", "gradient-accumulation-steps", "total_batch_pairs"),
        ("sft.py", "model_name_or_path", "init_from"),
        ("sft.py", "report_to", "track"),
        ("sample.py", "out_dir", "init_from"),
    ],
)
def test_a_name_of_another_program(script, foreign, ours):
    assert f"{foreign!r} (did you mean {ours!r}?) on the command line" in hints(script, foreign)


def test_a_name_without_a_counterpart_gets_no_guess():
    """num_train_epochs looks like pretrain.py's max_epochs, which is a limit."""
    said = hints("pretrain.py", "num_train_epochs")
    assert said == "config: unknown key 'num_train_epochs' on the command line; --help lists the keys"


def test_the_table_names_settings_that_exist():
    known = {key for path in SCRIPTS for key in configurator.defaults_of(path)}
    assert configurator.OTHER_NAMES.keys() <= known


def test_all_unknown_keys_are_named(override):
    words = "unknown keys 'lr' (did you mean 'learning_rate'?), 'zzz'"
    assert hints("sft.py", "lr", "seed", "zzz") == (
        f"config: {words} on the command line; --help lists the keys"
    )
    path = override("lr = 1\nzzz = 2")
    assert mistake([path]).startswith(f"config: {words} in {path}; --help lists the keys; names of")


def test_a_value_behind_a_space_and_dashes_of_a_text_program():
    for argv in (["--max_steps", "5"], ["--max_steps"]):
        assert mistake(argv).endswith("settings are written --key=value, without spaces: --max_steps=VALUE")
    for flag in ("\u2014max_steps=5", "\u2013-max_steps=5", "\uff0d\uff0dmax_steps=5", "\u2212max_steps=5"):
        assert "begins with two hyphens, --, not with a dash" in mistake([flag])


@pytest.mark.parametrize("word", ["config/debug.py", "--out_dir=out/x", "--max_steps=5", "--prompt=a"])
def test_a_line_end_of_windows_behind_the_last_word(word):
    """Of a shell script: a directory 'out/x\\r' would look right wherever it is printed."""
    said = mistake(["--grad_clip=2.0", word + "\r"])
    assert f"{word}\\r' ends with a carriage return" in said and "Unix line ends" in said


def test_a_rank_that_a_launcher_gives_twice(monkeypatch):
    """As torch.distributed.launch and deepspeed do. Without them it is an unknown key."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert "unknown key 'local_rank'" in mistake(["--local_rank=1"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    for flag in ("--local_rank=1", "--local-rank=1"):
        assert changed([flag, "--max_steps=5"]) == {"max_steps": 5}


def test_quotes_that_no_shell_took_off():
    """As cmd.exe, the lists of a container's arguments and word processors leave them."""
    for quoted in ("'out/x'", '"out/x"', "“out/x”", "‘out/x’", "“out/x\""):
        assert f"--out_dir={quoted} has quotes that no shell took off" in mistake([f"--out_dir={quoted}"])
    assert resolve(KEYS, ["--prompt='a'"])["prompt"] == "'a'"
    assert resolve(KEYS, ["--prompt=“a”"])["prompt"] == "“a”"


def test_a_name_may_have_quotes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "“红楼梦”").mkdir()
    assert changed(["--out_dir=“红楼梦”"]) == {"out_dir": "“红楼梦”"}
    assert changed(["--out_dir=“红楼梦”.txt"]) == {"out_dir": "“红楼梦”.txt"}


def test_a_misspelt_override_file_is_guessed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    for name in ("config/shakespeare.py", "config/ppo.py", "model.py"):
        (tmp_path / name).touch()
    said = "cannot read 'config/shakespear.py': No such file or directory; did you mean 'config/shakespeare.py'?"
    assert said in mistake(["config/shakespear.py"])
    for other in ("config/zzz.py", "config/nope.py", "mine.py"):
        assert mistake([other]).endswith("No such file or directory")
    assert mistake(["nowhere/shakespeare.py"]).endswith("No such file or directory")


def test_a_number_is_named_as_it_was_written():
    assert "must be a whole number, got '1,000' on" in mistake(["--max_steps=1,000"])
    assert "must be a number, got '0,001' on" in mistake(["--learning_rate=0,001"])


def test_without_a_near_key_help_is_named():
    assert (
        mistake(["--zzz=1"]) == "config: unknown key 'zzz' on the command line; --help lists the keys"
    )


def test_a_misspelt_key_in_a_file_is_not_a_new_variable(override):
    path = override("learing_rate = 0.5")
    assert (
        mistake([path])
        == f"config: unknown key 'learing_rate' (did you mean 'learning_rate'?) in {path}"
    )
    assert "unknown key 'MAX_STEPS'" in mistake([override("MAX_STEPS = 5")])
    for line in ("from math import pi", "for i in range(3): pass", "from __future__ import annotations"):
        assert mistake([override(line)]).endswith("; names of the file's own begin with _")


def test_of_two_equal_flags_the_last_wins(override):
    path = override("max_steps = 3")
    assert changed(["--max_steps=1", path, "--max_steps=2"]) == {"max_steps": 2}


# ---- the comment is the check ---------------------------------------------------------------------------------------

COMMENTS = {
    "prompt": 'once = as it comes | one, (of two) | two: what is written | "" (nothing)',
    "max_steps": "steps; at least 1",
    "warmup_steps": "from 0 to 1_000 of them",
    "learning_rate": "at least 1e-5, usually",
    "grad_clip": "from -0.5 to 2.5",
    "out_dir": "one of at least this size, separated by |",
    "compile": "from one to another",
}


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--prompt=three", "prompt must be one of once, one, two, '', got 'three' on the command line"),
        ("--prompt=Once", "prompt must be one of once, one, two, '', got 'Once' on the command line"),
        ("--max_steps=0", "max_steps must be at least 1, got 0 on the command line"),
        (f"--max_steps={10**30}", f"max_steps must be a number of 64 bits, got {10**30} on the command line"),
        ("--learning_rate=1e999", "learning_rate must be finite, got inf on the command line"),
        ("--warmup_steps=-1", "warmup_steps must be from 0 to 1_000, got -1 on the command line"),
        ("--warmup_steps=1001", "warmup_steps must be from 0 to 1_000, got 1001 on the command line"),
        ("--learning_rate=0", "learning_rate must be at least 1e-5, got 0.0 on the command line"),
        ("--grad_clip=2.6", "grad_clip must be from -0.5 to 2.5, got 2.6 on the command line"),
    ],
)
def test_a_value_that_the_comment_excludes(flag, words, override):
    with pytest.raises(UserError) as caught:
        resolve(KEYS, [flag], COMMENTS)
    assert str(caught.value) == f"config: {words}"
    key, _, value = flag[2:].partition("=")
    path = override(f"{key} = {value!r}" if key == "prompt" else f"{key} = {value}")
    with pytest.raises(UserError, match=words.partition(" on the ")[0].replace("'", ".")) as caught:
        resolve(KEYS, [path], COMMENTS)
    assert str(caught.value).endswith(path)


def test_not_a_number_is_in_no_range(override):
    for key in ("learning_rate", "grad_clip"):
        with pytest.raises(UserError, match=f"{key} must be .*, got nan"):
            resolve(KEYS, [override(f"{key} = float('nan')")], COMMENTS)


@pytest.mark.parametrize(
    "flag",
    ["--prompt=once", "--prompt=one", "--prompt=two", "--prompt=", "--max_steps=1", "--warmup_steps=0",
     "--warmup_steps=1000", "--learning_rate=1e-5", "--grad_clip=2.5", "--out_dir=x", "--compile=False"],
)  # fmt: skip
def test_a_value_that_the_comment_allows(flag):
    resolve(KEYS, [flag], COMMENTS)


FILES = sorted([*ROOT.glob("*.py"), *ROOT.glob("tools/*.py")])
SCRIPTS = [path for path in FILES if "configure(globals())" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_default_passes_the_check_of_its_comment(path):
    keys = {
        key: value
        for key, value in configurator.defaults_of(path).items()
        if configurator.is_key(key, value)
    }
    comments = configurator.comments_of(path)
    for key, value in keys.items():
        configurator.checked(key, value, keys, comments, path.name)


# ---- files that cannot be used --------------------------------------------------------------------------------------


def test_unreadable_files(tmp_path, override):
    missing = str(tmp_path / "nope.py")
    assert mistake([missing]).startswith(
        f"config: cannot read {missing!r}: No such file or directory"
    )
    (tmp_path / "made.py").mkdir()
    assert "Is a directory" in mistake([str(tmp_path / "made.py")])
    (tmp_path / "gbk.py").write_bytes("prompt = '从前'\n".encode("gbk"))
    assert "it is not UTF-8 text" in mistake([str(tmp_path / "gbk.py")])
    assert "settings are written --key=value" in mistake(["max_steps=5"])


def test_a_config_of_another_script_is_named(tmp_path, monkeypatch):
    path = tmp_path / "demo.py"
    doc = "'python pretrain.py config/demo.py'"
    path.write_text(f"{doc}\nn_layer = 4\n", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["sft.py"])
    error = mistake([str(path)])
    assert error == f"config: unknown key 'n_layer' in {path}, which is for pretrain.py, not sft.py"
    monkeypatch.setattr("sys.argv", ["pretrain.py"])
    assert "which is for" not in mistake([str(path)])


def test_a_file_from_windows(tmp_path):
    path = tmp_path / "windows.py"
    path.write_bytes(b"\xef\xbb\xbfmax_steps = 5\r\nprompt = 'a'\r\n")
    config = configurator.resolve({"max_steps": 1, "prompt": ""}, [str(path)])
    assert config == {"max_steps": 5, "prompt": "a"}
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n', encoding="utf-8")  # valid Python
    for path in (str(rows), str(tmp_path), ""):
        said = mistake([path])
        assert said.startswith(f"config: cannot use {path!r}: an override file ends in .py")


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        ("max_steps = 1\n\nmax_steps = = 2\n", 3, "SyntaxError: invalid syntax"),
        ("max_steps = 1\nif True:\nmax_steps = 2\n", 3, "SyntaxError: expected an indented block"),
        (
            "max_steps = 1\nlearning_rate = max_stepz\n",
            2,
            "NameError: name 'max_stepz' is not defined",
        ),
        (
            "def f():\n    return 1 / 0\n\nmax_steps = f()\n",
            2,
            "ZeroDivisionError: division by zero",
        ),
        ("import json\nmax_steps = json.loads('x')\n", 2, "JSONDecodeError"),
        ("max_steps = 1\nraise ValueError('two\\nlines')\n", 2, "ValueError: two"),
        ("max_steps = 1\nexit(0)\n", 2, "SystemExit: 0"),
    ],
)
def test_errors_in_a_file_name_its_line(source, line, words, override):
    path = override(source)
    assert mistake([path]).startswith(f"config: {path}:{line}: {words}")


def test_nothing_is_applied_when_something_is_wrong(override, capsys):
    namespace, hook = dict(KEYS), sys.excepthook
    try:
        with pytest.raises(UserError) as caught:
            configure(
                namespace, [override("max_steps = 5\nprompt = '中文'"), "--learning_rate=fast"]
            )
    finally:
        sys.excepthook = hook
    assert str(caught.value) == "config: learning_rate must be a number, got 'fast' on the command line"
    assert namespace == KEYS


# ---- the resolved configuration -------------------------------------------------------------------------------------


def reread(config: dict, path: Path, command: str = "") -> dict:
    write_config(config, str(path), command)
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing temporary is left
    blank = {key: type(value)() for key, value in config.items()}
    return resolve(blank, [str(path)])


def same(a: dict, b: dict) -> bool:
    """Equal with types, signs of zero and NaN."""
    return [(k, type(v), repr(v)) for k, v in a.items()] == [
        (k, type(v), repr(v)) for k, v in b.items()
    ]


def test_resolved_configuration_gives_the_same_values(tmp_path):
    config = {
        "compile": True, "input": "a,b", "float_": 1.0, "max_steps": -(10**30), "off": False,  # builtins' names too
        "tiny": 5e-324, "third": 1 / 3, "minus": -0.0, "endless": math.inf, "down": -math.inf, "nan": math.nan,
        "quotes": "it's \"so\" '''", "lines": "a\nb\r\n\tc\\", "chinese": "从前有座山🙂\u2028",
        "byte": "\udcff", "empty": "",
    }  # fmt: skip
    for command in (
        "",
        "python pretrain.py out/x/config.py",
        'x "quoted"',
        "C:\\new\\users",
        '"""',
        "a\nb",
    ):
        assert same(reread(config, tmp_path / "config.py", command), config)


VALUES = st.booleans() | st.integers() | st.floats() | st.text()


def test_words_are_utf_8_whatever_the_locale_says(tmp_path):
    """And ~ is expanded in flags and files, as a script sees it."""
    (tmp_path / "override.py").write_text("out_dir = '~/x'\n", encoding="utf-8")
    script = tmp_path / "script.py"
    body = "prompt = ''\nout_dir = ''\ninit_from = ''\nconfigure(globals())\n"
    body += "print(ascii((prompt, out_dir, init_from)))\n"
    script.write_text(f"import sys\nsys.path.append({str(ROOT)!r})\nfrom configurator import configure\n{body}")
    ascii_only = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "HOME": "/home/me"}
    done = subprocess.run(
        [sys.executable, script, "override.py", "--prompt=\u6625\u7720".encode(), "--init_from=a=~/a,b=~/b"],
        cwd=tmp_path, env=os.environ | ascii_only, capture_output=True, encoding="utf-8",
    )  # fmt: skip
    assert done.stdout == ascii(("\u6625\u7720", "/home/me/x", "a=/home/me/a,b=/home/me/b")) + "\n", done.stderr


def test_prompts_that_the_wide_mark_of_chinese_typing_separates_are_asked_about(override, capsys):
    file = override('sample_prompts = "从前｜你好"')
    configure({"sample_prompts": ""}, [file])
    assert capsys.readouterr().err == "warning     '从前｜你好' is one prompt (is ｜ for | intended?)\n"
    for text in ("从前|你好", "a｜b|c", "｜", ""):
        namespace = {"sample_prompts": "", "prompt": ""}
        configure(namespace, [f"--sample_prompts={text}", "--prompt=从前｜你好"])
        assert namespace["sample_prompts"] == text
        assert ("intended" in capsys.readouterr().err) == (text == "｜")


def test_a_path_in_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for written, read in (
        ("~/out", "/home/me/out"),
        ("~/a=0.7,~/b=0.3", "/home/me/a=0.7,/home/me/b=0.3"),
        ("0: ~/a; 8000: ~/b=1, ~/c", "0: /home/me/a; 8000: /home/me/b=1, /home/me/c"),
        ("sft=~/sft,dpo=~/dpo", "sft=/home/me/sft,dpo=/home/me/dpo"),
        ("~/rules.py:reward", "/home/me/rules.py:reward"),
        ("a~/b", "a~/b"),
        ("a/~/b", "a/~/b"),
        ("~", "~"),
    ):
        assert resolve(KEYS, [f"--out_dir={written}"])["out_dir"] == read
    assert resolve(KEYS, ["--prompt=see: ~/x"])["prompt"] == "see: ~/x"  # words, no path


def test_without_a_home_no_folder_is_called_so(monkeypatch):
    """A container's user of a number alone."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert mistake(["--out_dir=~/x"]) == "config: out_dir='~/x': there is no home directory; set HOME"
    assert resolve(KEYS, ["--out_dir=x~/y"])["out_dir"] == "x~/y"


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdefgh"), VALUES, min_size=1))
def test_any_configuration_gives_the_same_values(tmp_path_factory, config):
    assert same(reread(config, tmp_path_factory.mktemp("resolved") / "config.py"), config)


def test_flags_win_over_a_resolved_configuration(tmp_path):
    write_config(KEYS | {"learning_rate": 0.5, "max_steps": 7}, str(tmp_path / "config.py"))
    path = str(tmp_path / "config.py")
    assert changed([path, "--max_steps=8"]) == {"learning_rate": 0.5, "max_steps": 8}


def test_a_failed_write_leaves_the_old_file(tmp_path):
    class Broken:
        def __repr__(self) -> str:
            raise OSError("no space left")

    path = tmp_path / "config.py"
    write_config(KEYS, str(path))
    before = path.read_bytes()
    with pytest.raises(OSError, match="no space"):
        write_config(KEYS | {"prompt": Broken()}, str(path))
    assert path.read_bytes() == before


# ---- as a script ----------------------------------------------------------------------------------------------------

SCRIPT = '''
"""Trains nothing.

python script.py --max_steps=5
"""

import os

from configurator import configure
from groundup.errors import UserError

# ---- config
learning_rate = 1e-3  # peak; 0 = off
max_steps: int = 100  # number of steps # all of them
prompt = "a # b"  # 提示: text to continue
untold = False
choice = "a"  # a | b (of two)
CONSTANT = 5  # no key


def helper():
    inner = 1  # not this
    return inner


if __name__ == "__main__":
    config = configure(globals())
    os.makedirs("out")
    if max_steps == 13:
        raise UserError("script: 13 步 is unlucky; take 14")
    if max_steps == 14:
        raise ValueError("a bug")
    print(sorted(config.items()) == sorted((k, globals()[k]) for k in config), learning_rate, max_steps, prompt)
'''


@pytest.fixture
def script(tmp_path):
    """Runs the script above in an empty directory and returns (process, names of the files that it made)."""
    (tmp_path / "script.py").write_text(SCRIPT.lstrip(), encoding="utf-8")
    cwd = tmp_path / "cwd"
    cwd.mkdir()

    def run(*argv: str) -> tuple[subprocess.CompletedProcess, list[str]]:
        env = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONIOENCODING="utf-8")
        command = [sys.executable, str(tmp_path / "script.py"), *argv]
        done = subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, encoding="utf-8"
        )
        return done, [path.name for path in cwd.iterdir()]

    return run


def test_script_runs_with_the_values(script, override):
    done, made = script("--prompt=山=庙", override("max_steps = 7"))
    assert (done.returncode, done.stderr, made) == (0, "", ["out"])
    assert done.stdout == "True 0.001 7 山=庙\n"


def test_help_comes_from_the_comments(script):
    for flag in ("--help", "-h"):
        done, made = script("--max_steps=5", flag)
        assert (done.returncode, done.stderr, made) == (0, "", [])
        doc, _, keys = done.stdout.partition("\n\nkeys")
        assert doc == "Trains nothing.\n\npython script.py --max_steps=5"
        assert [" ".join(line.split()) for line in keys.splitlines()[1:]] == [
            "learning_rate float 0.001 peak; 0 = off",
            "max_steps int 100 number of steps # all of them",
            "prompt str 'a # b' 提示: text to continue",
            "untold bool False",
            "choice str 'a' a | b (of two)",
        ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--max_step=1"],
            "config: unknown key 'max_step' (did you mean 'max_steps'?) on the command line",
        ),
        (["--max_steps=中"], "config: max_steps must be a whole number, got '中' on the command line"),
        (["nope.py"], "config: cannot read 'nope.py': No such file or directory"),
        (["--choice=c"], "config: choice must be one of a, b, got 'c' on the command line"),
        (["--untold=true"], "config: untold must be True or False, got 'true' on the command line"),
    ],
)
def test_a_mistake_is_one_line_and_status_1_and_makes_nothing(script, argv, words):
    done, made = script(*argv)
    assert (done.returncode, done.stdout, made) == (1, "", [])
    assert done.stderr.startswith(words) and done.stderr.count("\n") == 1


def test_a_message_of_several_lines_becomes_one(script, override):
    done, made = script(override("raise ValueError('first\\nsecond')"))
    assert (done.returncode, made) == (1, [])
    assert done.stderr.endswith("ValueError: first second\n") and done.stderr.count("\n") == 1


def test_users_mistakes_later_are_one_line_but_bugs_keep_their_traceback(script):
    done, _ = script("--max_steps=13")
    assert (done.returncode, done.stderr) == (1, "script: 13 步 is unlucky; take 14\n")
    os.rmdir(Path(done.args[1]).parent / "cwd" / "out")
    done, _ = script("--max_steps=14")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("ValueError: a bug\n")
