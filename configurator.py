"""Configuration for every script: module-level literals, override files, --key=value.

A script writes its settings as plain assignments with a trailing comment, then calls
`config = configure(globals())`:

    python pretrain.py config/small.py --learning_rate=1e-3   # default < files < flags
    python pretrain.py --help                                 # type, default, comment of each key

Keys are the script's public lowercase bool, int, float and str names. A key keeps its type, and its
comment is its check:

    optimizer = "adamw"  # adamw | muon (for matrices)     the first word of each alternative
    batch_size = 8  # sequences, at least 1
    dropout = 0.0  # from 0 to 1                           both are allowed

An override file is Python that you run, so it may compute: `max_steps = 2 * warmup_steps`. Names
that begin with an underscore, modules and functions are its own.
"""

import ast
import contextlib
import difflib
import math
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from groundup.errors import UserError, end_in_one_line, imports_are_done, listed, naming, say

# of settings; None and lists are not allowed
TYPES = {bool: "True or False", int: "a whole number", float: "a number", str: "text in quotes"}
DASHES = ("\u2013", "\u2014", "\uff0d", "\u2212")  # which text programs make of hyphens
TEXTS = {"prompt", "sample_prompts", "stop", "system"}  # words for a model: ~/ is no path there
# Our settings: their names in Hugging Face's Trainer and TRL, nanoGPT, LitGPT, axolotl and
# LLaMA-Factory, but for those that are spelt nearly as ours. Of several the first that the script
# has is meant.
OTHER_NAMES = {
    "learning_rate": "lr peak_lr max_lr",
    "min_lr": "lr_min",
    "schedule": "decay_lr",
    "warmup_steps": "lr_warmup_fraction",
    "grad_clip": "max_grad_norm max_norm",
    "max_steps": "steps num_steps train_steps lr_decay_iters",
    "epochs": "epoch num_epochs num_train_epochs",
    "block_size": "max_length max_seq_length max_seq_len sequence_len seq_len cutoff_len "
    "model_max_length context_length",
    "batch_size": "per_device_train_batch_size per_device_eval_batch_size micro_batch_size "
    "train_batch_size device_batch_size",
    "total_batch_tokens": "gradient_accumulation_steps global_batch_size total_batch_size",
    "total_batch_pairs": "gradient_accumulation_steps global_batch_size total_batch_size",
    "prompts_per_step": "gradient_accumulation_steps global_batch_size total_batch_size",
    "eval_every": "eval_interval eval_steps evaluation_steps",
    "eval_steps": "eval_iters",
    "log_every": "log_interval logging_steps",
    "save_every": "save_steps",
    "keep_last": "save_total_limit",
    "track": "report_to wandb wandb_log wandb_project logger_name",
    "data": "train_file dataset dataset_name dataset_dir datasets data_path data_dir",
    "data_dir": "train_file dataset dataset_name dataset_dir datasets data_path data",
    "input": "train_file dataset dataset_name dataset_dir datasets data_path data data_dir",
    "val_data": "validation_file eval_file test_datasets",
    "val_fraction": "val_size val_set_size val_split_fraction",
    "init_from": "model model_name model_name_or_path model_path base_model checkpoint_dir out_dir",
    "out_dir": "output",
    "resume": "resume_from_checkpoint",
    "trainable": "use_peft finetuning_type adapter lora_target lora_target_modules",
    "dtype": "bf16 fp16 precision",
    "parallel": "fsdp deepspeed",
    "pack": "sample_packing",
    "loss": "pref_loss",
    "beta": "pref_beta dpo_beta",
    "nll_weight": "rpo_alpha pref_ftx",
    "group_size": "num_generations",
    "kl_coef": "beta",
    "max_new_tokens": "max_completion_length max_tokens",
    "n": "num_samples num_return_sequences",
    "prompt": "start",
    "n_layer": "num_layers num_hidden_layers",
    "n_head": "num_heads num_attention_heads",
    "n_kv_head": "n_query_groups",
    "n_embd": "hidden_size",
    "ffn_dim": "intermediate_size",
}
HELP = "; --help lists the keys"
NUMBER = r"(-?\d[\d_]*(?:\.\d+)?(?:e-?\d+)?)"


# ---- the command line ----------------------------------------------------------------


def configure(namespace: dict, argv: list[str] | None = None) -> dict:
    """Apply override files and flags to `namespace`, a script's globals(). Return {key: value}."""
    end_in_one_line()
    imports_are_done()
    argv = sys.argv[1:] if argv is None else argv
    # What the script has assigned so far are its defaults.
    keys = {name: value for name, value in namespace.items() if is_key(name, value)}
    path = namespace.get("__file__", "")
    comments = comments_of(path) if os.path.isfile(path) else {}
    if "--help" in argv or "-h" in argv:
        print(help_text(namespace.get("__doc__") or "", keys, comments))
        raise SystemExit(0)
    # The script reads its settings as plain global names.
    config = resolve(keys, argv, comments)
    prompts = config.get("sample_prompts", "")  # separated by |
    if "\uff5c" in prompts and "|" not in prompts:  # the wide mark of Chinese typing
        say(f"warning     {prompts!r} is one prompt (is \uff5c for | intended?)")
    namespace.update(config)
    return config


def resolve(keys: Mapping, argv: list[str], comments: Mapping[str, str] | None = None) -> dict:
    """Return the defaults `keys`, overridden by the files and then by the flags of `argv`."""
    config = dict(keys)
    for word in argv:
        # A shell script with Windows line ends leaves it on the last word of a line.
        if word.endswith("\r"):
            hint = "save the script that starts this with Unix line ends"
            raise UserError(f"config: {word!r} ends with a carriage return; {hint}")
    # Some launchers (torch.distributed.launch, deepspeed) say it twice.
    if "LOCAL_RANK" in os.environ:
        argv = [word for word in argv if not re.match("--local[-_]rank=", word)]
    # Before the files: the 5 of "--max_steps 5" looks like one.
    flags = [parse_flag(flag, keys) for flag in argv if flag.startswith("-")]
    for path in argv:
        if not path.startswith("-"):
            config.update(read_file(path, config, comments))
    # A flag wins over a file, also over a file that comes after it.
    where = "on the command line"
    check_known([key for key, _ in flags], keys, where)
    for key, value in flags:
        config[key] = checked(key, value, keys, comments, where)
    return config


def read_file(path: str, config: Mapping, comments: Mapping[str, str] | None = None) -> dict:
    """Return the checked values that an override file sets. It can use the values of `config`."""
    # An argument that is no flag is taken for an override file. Many a row of JSON is Python, too.
    if not path.endswith(".py"):
        hint = "an override file ends in .py; settings are written --key=value, without spaces"
        hint += " except in quotes: --key='a b'"
        if path[:1] in DASHES:
            hint = "a setting begins with two hyphens, --, not with a dash"
        raise UserError(f"config: cannot use {path!r}: {hint}")
    try:
        source = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        there = {other.stem: str(other) for other in Path(path).parent.glob("*.py")}
        similar = difflib.get_close_matches(Path(path).stem, there, n=1)
        meant = f"; did you mean {there[similar[0]]!r}?" if similar else ""
        raise UserError(f"config: cannot read {path!r}: {reason}{meant}") from None

    # What looks like a setting must be one, or a misspelt key would change nothing.
    found, names = {}, run_file(path, source, config)
    for name, value in names.items():
        is_helper = name.startswith("_") or callable(value) or isinstance(value, ModuleType)
        if name in config or not is_helper:
            found[name] = value

    where, hint = f"in {path}", f"{HELP}; names of the file's own begin with _"
    # The docstring of a config says how it is run.
    command = r"python (\w+\.py) \S*" + re.escape(os.path.basename(path))
    scripts = re.findall(command, names.get("__doc__") or "")
    script = os.path.basename(sys.argv[0])
    if scripts and script not in scripts:
        check_known(found, config, f"{where}, which is for {scripts[-1]}, not {script}", "")
    check_known(found, config, where, hint)
    return {name: checked(name, value, config, comments, where) for name, value in found.items()}


def run_file(path: str, source: str, config: Mapping) -> dict:
    """Return the names of an override file after it ran, those of `config` among them."""
    # It runs in a copy, so that nothing is applied when something is wrong.
    names = dict(config) | {"__file__": path, "__name__": "__config__"}
    try:
        exec(compile(source, path, "exec"), names)  # noqa: S102 - the user runs this file
    except SyntaxError as error:
        where = f"{path}:{error.lineno or 1}"
        raise UserError(f"config: {where}: SyntaxError: {error.msg}") from None
    except (Exception, SystemExit) as error:
        # The last line of this file that ran; the error may be in a library that it calls.
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path] or [0]
        raise UserError(f"config: {path}:{lines[-1]}: {type(error).__name__}: {error}") from None
    return names


def parse_flag(flag: str, keys: Mapping) -> tuple[str, object]:
    """Return (key, value) of '--key=value'."""
    key, equals, text = flag.removeprefix("--").partition("=")
    if not flag.startswith("--") or not equals:
        meant = nearest(key.lstrip("-"), keys)
        hint = f"; did you mean {meant!r}?" if meant else HELP
        if flag == f"--{key}" and key in keys:
            hint = f", without spaces: --{key}=VALUE"
        raise UserError(f"config: cannot read {flag!r}; settings are written --key=value{hint}")
    # Text needs no quotes. Other values are Python literals; what is none has the wrong type, which
    # `checked` reports.
    if type(keys.get(key)) is str:
        # curly ones are of a word processor, or of a Chinese file name
        is_quoted = re.fullmatch(r"""(['"]).*\1|[\u201c\u2018].*[\u201d\u2019'"]""", text)
        if key not in TEXTS and is_quoted and not os.path.exists(text):
            raise UserError(f"config: {flag} has quotes that no shell took off; leave them out")
        return key, as_utf8(text) if key in TEXTS else text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return key, text
    # The message about 1,000 should not speak of (1, 0).
    return key, text if type(value) is tuple else value


def as_utf8(text: str) -> str:
    """Return words of the command line, which are UTF-8 whatever the locale says."""
    # Not of paths: the system wants them as they came.
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        return text


def nearest(key: str, keys: Mapping) -> str:
    """Return the one of `keys` that was probably meant, or ""."""
    key = key.lower().replace("-", "_")
    if key in keys:
        return key
    ours = [name for name, others in OTHER_NAMES.items() if key in others.split()]
    if ours:  # a name of another program: what looks like it does something else
        return next((name for name in ours if name in keys), "")
    similar = difflib.get_close_matches(key, keys, n=1)
    return similar[0] if similar else ""


def help_text(doc: str, keys: Mapping, comments: Mapping[str, str]) -> str:
    """Return the script's docstring, then a line per key: type, default, comment."""
    width = max(map(len, keys), default=0)
    heading = "keys (with the script's defaults; override files first, then --key=value):"
    lines = [doc.strip(), "", heading]
    for key, default in keys.items():
        kind, comment = type(default).__name__, comments.get(key, "")
        lines.append(f"  {key:<{width}}  {kind:<5}  {default!r:<20}  {comment}".rstrip())
    return "\n".join(lines)


# ---- checks --------------------------------------------------------------------------


def check_known(names: Iterable[str], keys: Mapping, where: str, hint: str = HELP) -> None:
    """Raise UserError that names all unknown keys, each with the one that was probably meant.

    hint: what to say if one is like no key."""
    meant = {name: nearest(name, keys) for name in names if name not in keys}
    if not meant:
        return
    shown = [
        f"{name!r} (did you mean {key!r}?)" if key else repr(name) for name, key in meant.items()
    ]
    what = f"unknown key{'s' * (len(meant) > 1)} {', '.join(shown)} {where}"
    raise UserError(f"config: {what}{'' if all(meant.values()) else hint}")


def checked(
    key: str, value: object, keys: Mapping, comments: Mapping[str, str] | None, where: str
) -> object:
    """Return the value of `key`: an int as a float where one is wanted, ~/ expanded.

    where: "in FILE" or "on the command line", for the message of an error.
    """
    # `type(value) is`, because isinstance(True, int) holds. A float may be written as 1.
    want = type(keys[key])
    if want is float and type(value) is int and abs(value) <= sys.float_info.max:
        value = float(value)
    if type(value) is not want:
        raise UserError(f"config: {key} must be {TYPES[want]}, got {value!r} {where}")

    # The shell leaves --key=~/x as it is. Also in lists: "~/a=0.7,~/b=0.3", "0: ~/a; 8: ~/b".
    if want is str and key not in TEXTS:
        home = os.path.expanduser("~")
        value, n = re.subn(r"(^|[,;:=]\s*)~(?=/)", lambda m: m[1] + home, value)
        # Of a user whom the system does not know, without HOME: a folder would be called "~".
        if n and home == "~":
            raise UserError(f"config: {key}={value!r}: there is no home directory; set HOME")
    if words := violated(value, (comments or {}).get(key, "")):
        raise UserError(f"config: {key} must be {words}, got {value!r} {where}")
    return value


def violated(value: object, comment: str) -> str:
    """Return what the comment of a setting demands if `value` differs from it, else ""."""
    # A text has a list of allowed values, a number has bounds.
    if type(value) is str:
        allowed = choices(comment)
        if not allowed or value in allowed:
            return ""
        return f"one of {listed([word or repr(word) for word in allowed], most=20)}"
    if comment and type(value) is int and not -(2**63) <= value < 2**63:
        return "a number of 64 bits"
    # NaN passes neither comparison.
    if found := re.search(f"at least {NUMBER}", comment):
        if value == math.inf:
            return "finite"
        return "" if value >= float(found[1]) else found[0]
    if found := re.search(f"from {NUMBER} to {NUMBER}", comment):
        return "" if float(found[1]) <= value <= float(found[2]) else found[0]
    return ""


def choices(comment: str) -> list[str]:
    """Return the allowed values: 'adamw | muon (slow) | "" (none): text' -> adamw, muon, ""."""
    # An alternative may carry a remark, the last one a text about the setting.
    if " | " not in comment:
        return []
    return [part.split()[0].rstrip(":;,").strip('"') for part in comment.split(" | ")]


# ---- reading scripts as text ---------------------------------------------------------


def is_key(name: str, value: object) -> bool:
    """Return whether a script's name is a setting: public, lowercase, of a plain type."""
    return not name.startswith("_") and name == name.lower() and type(value) in TYPES


def defaults_of(path: str | Path) -> dict:
    """Return {name: value} of the literals that a script assigns at its left margin."""
    found = {}
    for node in ast.parse(Path(path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):  # an expression
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def comments_of(path: str | Path) -> dict[str, str]:
    """Return {name: trailing comment} of the assignments at the left margin of a script."""
    # The syntax tree has no comments; a setting is one line.
    lines = Path(path).read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z]\w*)(?:: \w+)? = .*?  # (.*)$", lines, re.MULTILINE))


# ---- lists in a setting --------------------------------------------------------------

# 'a.jsonl=0.7,b/*.jsonl=0.3': names of files or directories, each with a weight if it has one. A
# comma or "=" may also be part of a name: if a file of that name exists, it is meant.
MOST_COMMAS = 8  # in one name


def split_names(names: str) -> list[str]:
    """Return the parts between commas, without white space around them; "" is a part, too."""
    # join pieces again, the most first, as long as they make the name of a file
    pieces, parts = names.split(","), []
    while pieces:
        tried = range(min(len(pieces), MOST_COMMAS + 1), 1, -1)
        n = next((n for n in tried if names_file(",".join(pieces[:n]).strip())), 1)
        parts.append(",".join(pieces[:n]).strip())
        del pieces[:n]  # the next part begins behind them
    return parts


def names_file(part: str) -> bool:
    """Return whether a part that holds commas names a file, with or without its weight."""
    name, _, weight = part.rpartition("=")  # "=" may be in the name, too
    return os.path.exists(part) or ("," not in weight and os.path.exists(name.strip()))


def split_weight(part: str) -> tuple[str, str]:
    """Return (name, what stands behind the last "=" or ""); "=" in a folder's name is no weight."""
    name, equals, weight = part.rpartition("=")
    if not equals or os.path.exists(part) or re.search(r"[/\\*?]", weight):
        return part, ""
    return name.strip(), weight.strip()


def parse_number(text: str) -> float | None:
    """Return the finite number above 0 that `text` is, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


# ---- the settings of a run -----------------------------------------------------------


def script_of(config_file: Path) -> str:
    """Return the script that `write_config` names in a file, such as sft.py, or ""."""
    if not config_file.is_file():
        return ""
    with open(config_file, encoding="utf-8", errors="replace") as file:
        # A copy may be called pretrain-zh.py, or "pretrain 2.py".
        found = re.search(r"re-run with: python (?:\S*/)?([^/]*?\.py)\b", file.readline(10_000))
    return found[1] if found else ""


def write_config(config: Mapping, path: str, command: str = "") -> None:
    """Write the resolved settings as an override file, whole or not at all."""
    # A string, because a comment could not hold every command.
    title = f"; re-run with: {command}" if command else "."
    lines = [repr("Resolved configuration" + title)]
    # The repr of infinity and NaN is no Python.
    for key, value in config.items():
        is_literal = type(value) is not float or math.isfinite(value)
        lines.append(f"{key} = {value!r}" if is_literal else f"{key} = float('{value}')")
    # Renamed when complete. If the temporary name is a link, its target must stay.
    with naming(path):
        temp = Path(path + ".tmp")
        temp.unlink(missing_ok=True)
        temp.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(temp, path)
