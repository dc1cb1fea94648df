"""Functions of a user's Python file, which a setting names as "file.py:function"."""

import importlib.util
import os
import re
import sys
from collections.abc import Callable

from groundup.errors import UserError


def load_function(name: str, key: str) -> Callable:
    """Return the function of "file.py:function", the value of setting `key`. Runs the file."""
    # ":" may be in a path on Windows, so the last one counts.
    wrong = f"config: {key}={name!r}"
    path, function = name.rsplit(":", 1) if ":" in name else (name, "")
    if not path.endswith(".py") or not os.path.isfile(path):
        raise UserError(f"{wrong}: there is no file {path!r}; give file.py:function")
    # Import the file under a name of its own. dataclasses look for their module in sys.modules.
    spec = importlib.util.spec_from_file_location(f"{key}_" + re.sub(r"\W", "_", path), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # It may import files beside it, now or when it is called. Ours come first.
    sys.path.append(os.path.dirname(os.path.abspath(path)))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{wrong}: {path} fails: {reason}") from error
    if not callable(getattr(module, function, None)):
        raise UserError(f"{wrong}: {path} has no function {function!r}; give file.py:function")
    return getattr(module, function)
