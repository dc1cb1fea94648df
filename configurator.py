"""Configuration for every script: module-level literals, override files, --key=value.

A script writes its settings as plain assignments with a trailing comment, then calls `config = configure(globals())`:

    python pretrain.py config/small.py --learning_rate=1e-3        # default < files < flags, wherever they stand
    python pretrain.py --help                                      # every key: type, default and its comment

Keys are the script's public lowercase bool, int, float and str names, and each keeps its type: for an unknown key or a
value of another type the script prints one line on standard error and exits with status 1. An override file is Python
that you run, so it may compute (`max_steps = 2 * warmup_steps`); names that begin with an underscore, modules and
functions stay its own.
"""

import ast
import contextlib
import difflib
import importlib.util
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from groundup.errors import UserError, end_in_one_line, imports_are_done, naming, printable

TYPES = (bool, int, float, str)


def configure(namespace: dict, argv: list[str] | None = None) -> dict:
    """Apply override files and flags to `namespace` (a script's globals()); return {key: value}, defaults included.
    Print help and exit with status 0 on --help; print one line and exit with 1 on a mistake."""
    end_in_one_line()
    imports_are_done()
    argv = sys.argv[1:] if argv is None else argv
    keys = {k: v for k, v in namespace.items() if is_key(k, v)}
    try:
        if "--help" in argv or "-h" in argv:
            print(help_text(namespace, keys))
            raise SystemExit(0)
        config = resolve(keys, argv, namespace.get("REMOVED", {}))
    except UserError as error:
        line = printable(" ".join(str(error).splitlines()))  # a value or another's message may hold line breaks
        raise SystemExit(line) from None  # SystemExit with a text: the text on stderr, exit status 1
    namespace.update(config)
    return config


def resolve(keys: Mapping[str, object], argv: list[str], removed: Mapping[str, object] | None = None) -> dict:
    """Return the defaults `keys` overridden by the files and then the flags of `argv`. Raise UserError for a mistake.
    removed: {former key: the value that meant off}; a file may still set this value."""
    files = [arg for arg in argv if not arg.startswith("-")]
    flags = [arg for arg in argv if arg.startswith("-")]
    config = dict(keys)
    for path in files:
        config.update(read_file(path, config, removed))
    seen = set()
    for flag in flags:
        key, value = parse_flag(flag, keys)
        if key in seen:
            raise UserError(f"config: --{key} is given twice in command line; give it once")
        seen.add(key)
        config[key] = value
    return config


def read_file(path: str, config: Mapping[str, object], removed: Mapping[str, object] | None = None) -> dict:
    """Return the checked values that the override file `path` sets. The file can use the current values by name."""
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"config: cannot read {path!r}: {reason}; settings are written --key=value") from None
    scratch = dict(config) | {"__file__": path, "__name__": "__config__"}
    try:
        exec(compile(source, path, "exec"), scratch)  # noqa: S102 - an override file is Python that the user runs
    except SyntaxError as error:
        raise UserError(f"config: {path}:{error.lineno or 1}: SyntaxError: {error.msg}") from None
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path] or [0]
        raise UserError(f"config: {path}:{lines[-1]}: {type(error).__name__}: {error}") from None
    own = {k for k, v in scratch.items() if k.startswith("_") or callable(v) or isinstance(v, ModuleType)}
    found = {k: v for k, v in scratch.items() if k in config or k not in own}
    for key in (removed or {}).keys() & found.keys() - config.keys():
        value = found.pop(key)
        if value != removed[key]:
            raise UserError(f"config: {key}={value!r} in {path}: there is no such setting any more; remove the line")
    return {k: checked(k, v, config, path) for k, v in found.items()}


def parse_flag(flag: str, keys: Mapping[str, object]) -> tuple[str, object]:
    """Return (key, value) of '--key=value'. A str key takes the text as it is, others a Python literal."""
    key, equals, text = flag.removeprefix("--").partition("=")
    if not flag.startswith("--") or not equals:
        hint = nearest(key.lstrip("-"), keys)
        raise UserError(f"config: cannot read {flag!r}; settings are written --key=value{hint}")
    if type(keys.get(key)) is str:
        return key, text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # all that literal_eval may raise
        value = text
    return key, checked(key, value, keys, "command line")


def checked(key: str, value: object, keys: Mapping[str, object], where: str) -> object:
    """Return `value`, an int as a float where one is wanted. Raise UserError for an unknown key or another type."""
    if key not in keys:
        raise UserError(f"config: unknown key {key!r} in {where}{nearest(key, keys)}")
    want = type(keys[key])
    if want is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if want is str and isinstance(value, str) and value.startswith("~/"):
        return os.path.expanduser(value)  # the shell leaves --key=~/x as it is
    if type(value) is not want:
        name = "True or False" if want is bool else want.__name__
        raise UserError(f"config: {key} must be {name}, got {value!r} in {where}")
    return value


def is_key(name: str, value: object) -> bool:
    """Return whether a script's name is a setting: public, lowercase and of a plain type."""
    return not name.startswith("_") and name == name.lower() and type(value) in TYPES


def nearest(key: str, keys: Mapping[str, object]) -> str:
    match = difflib.get_close_matches(key, keys, n=1)
    return f"; did you mean {match[0]!r}?" if match else "; --help lists the keys"


def load_function(name: str, key: str) -> Callable:
    """Run the file of "file.py:function", the value of setting `key`, and return the function. Raise UserError."""
    path, _, function = name.rpartition(":") if ":" in name else (name, "", "")
    spec = importlib.util.spec_from_file_location(f"{key}_" + re.sub(r"\W", "_", path), path)
    if spec is None or not os.path.isfile(path):
        problem = f"{path!r} is not a Python file" if os.path.isfile(path) else f"there is no file {path!r}"
        raise UserError(f"config: {key}={name!r}: {problem}; give file.py:function")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # of code that is not ours
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"config: {key}={name!r}: {path} fails: {said}") from error
    if not callable(getattr(module, function, None)):
        raise UserError(f"config: {key}={name!r}: {path} has no function {function!r}; give file.py:function")
    return getattr(module, function)


def help_text(namespace: Mapping[str, object], keys: Mapping[str, object]) -> str:
    """Return the script's docstring, then one line per key: type, default, trailing comment. Keys that come from
    `from FILE import *` stand under a heading of their own."""
    path = namespace.get("__file__", "")
    own, shared = trailing_comments(path), {}
    for source in star_imports(path):
        shared |= trailing_comments(source)
    width = max((len(key) for key in keys), default=0)

    def lines_of(names: list[str]) -> list[str]:
        shown = [(key, type(keys[key]).__name__, keys[key], own.get(key) or shared.get(key, "")) for key in names]
        return [f"  {key:<{width}}  {kind:<5}  {default!r:<20}  {text}".rstrip() for key, kind, default, text in shown]

    lines = [(namespace.get("__doc__") or "").strip(), "", "keys (override files first, then --key=value):"]
    lines += lines_of([key for key in keys if key not in shared])
    if shared:
        lines += ["", "shared keys, same meaning in every trainer:", *lines_of([k for k in keys if k in shared])]
    return "\n".join(lines)


def star_imports(path: str) -> list[str]:
    """Return the files that a Python file imports with a *: `from groundup.train.settings import *`."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8")) if os.path.isfile(path) else ast.Module([])
    stars = [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    return [importlib.util.find_spec(name).origin for name in stars]


def defaults_of(path: str | Path) -> dict:
    """Return {name: value} of the literals that a script assigns at its left margin or imports with a *."""
    found = {}
    for source in [*star_imports(str(path)), path]:
        for node in ast.parse(Path(source).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                with contextlib.suppress(ValueError):  # an expression
                    found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def trailing_comments(path: str) -> dict[str, str]:
    """Return {name: comment} of the `name = value  # comment` lines at the left margin of a Python file."""
    source = Path(path).read_text(encoding="utf-8") if os.path.isfile(path) else ""
    string = r""" "[^"\n]*"|'[^'\n]*' """.strip()
    return dict(re.findall(rf"^(\w+)(?:: \w+)? = (?:\(\s*)?(?:{string}|[^\"'#\n])*# *(.*)$", source, re.MULTILINE))


def write_config(config: Mapping[str, object], path: str, command: str = "") -> None:
    """Write the resolved settings as an override file, whole or not at all."""
    lines = [repr(f"Resolved configuration; re-run with: {command}" if command else "Resolved configuration.")]
    for key, value in config.items():  # repr of infinity and NaN is no Python
        odd = type(value) is float and not math.isfinite(value)
        lines.append(f"{key} = float('{value}')" if odd else f"{key} = {value!r}")
    with naming(path):
        Path(path + ".tmp").unlink(missing_ok=True)  # a link there would be written through
        Path(path + ".tmp").write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(path + ".tmp", path)
