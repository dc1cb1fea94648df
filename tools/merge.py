"""Adapters into their weights: a plain Hugging Face directory from a run with LoRA, or from an
adapter of peft's.

python tools/merge.py --init_from=out/lora --out_dir=out/merged
python tools/merge.py --init_from=out/lora --out_dir=out/merged --dtype=bfloat16   # half the size

The sum W + alpha/r B A is computed in float32. The directory appears whole or not at all. From a
checkpoint without adapters the same command makes a directory of the model alone, without the
training state.
"""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

if __name__ == "__main__":  # before the imports of packages: one that is missing is one line
    from groundup.errors import end_in_one_line

    end_in_one_line()

import torch
from safetensors import SafetensorError

from configurator import configure
from groundup.errors import UserError, reason_of
from groundup.files.directories import whole_directory
from groundup.train import checkpoint, huggingface
from tokenizer import Tokenizer

# ---- config: override with a config file or --key=value; see --help ------------------------------
init_from = ""  # run, checkpoint or Hugging Face directory with an adapter
out_dir = ""  # directory to write, new or empty
dtype = "float32"  # float32 | bfloat16 | float16: of the written weights


def write(init_from: str, out_dir: str, dtype: str) -> tuple[Path, Path, int]:
    """Write the merged model; return (directory it was read from, directory written, number of
    parameters).
    """
    if not init_from:
        raise UserError("config: init_from is empty; give the run or directory with the adapter")
    source, out = checkpoint.resolve(init_from), Path(out_dir)
    if not out_dir:
        raise UserError(f"config: out_dir={out_dir!r} is not a directory")
    try:
        with whole_directory(out) as temp:
            tokenizer = Tokenizer.load(huggingface.tokenizer_dir(source))
            model = huggingface.load_model(source)
            huggingface.write_model(temp, model, tokenizer, dtype=getattr(torch, dtype))
            # Of the run, if it is one of ours: how the model came about
            settings = source.parent / "config.py"
            if checkpoint.STEP_NAME.fullmatch(source.name) and settings.exists():
                shutil.copy(settings, temp)
    except (OSError, SafetensorError) as error:
        raise UserError(f"checkpoint: cannot write {out}: {reason_of(error)}") from None
    return source, out, sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    config = configure(globals())
    read, written, n_parameters = write(init_from, out_dir, dtype)
    print(f"{read}: {n_parameters:,} parameters, merged, in {dtype}, in {written}")
