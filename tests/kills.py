"""kill -9 at a random file operation of a run, then the same command again: nothing may differ.

python tests/kills.py --kills=240               # over all KINDS of runs; about ten minutes on a core
python tests/kills.py --kills=5 --kinds=rl_ppo,dpo_2 --seed=7

A run that was killed and continued must leave what one without a kill leaves: the same steps with
the same weights and training state, to the bit, the same losses in the log, and the same links.
With several ranks either dies, while rank 0 works on its files. prepare.py and tokenizer.py must
leave the same files, and nothing beside them. test_kills.py does a few of these.
"""

import argparse
import builtins
import io
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
OUT = Path("out")  # of each run, in a directory of its own: so all have the same settings
WORK = Path(".out")  # prepare.py and tokenizer.py work in directories beside OUT, whose names begin so
MOMENTS = Path("moments")  # how many file operations a run has made so far

# ---- the runs --------------------------------------------------------------------------------------------------------

COMMON = "--device=cpu --dtype=float32 --compile=False --log_every=1 --save_every=2 --eval_every=2 --keep_last=1"
COMMON += " --max_steps=6 --warmup_steps=1 --learning_rate=1e-1 --timeout_s=30 --block_size=64"
TUNED = f"{COMMON} --init_from={GOLDEN}/model --val_fraction=0.1"
PAIRS = f"{TUNED} --data={GOLDEN}/data/pairs.jsonl --eval_steps=2 --batch_size=2 --total_batch_pairs=4 --dropout=0.1"
TRAINERS = {
    "pretrain": f"{COMMON} --data_dir={GOLDEN}/data --n_layer=2 --n_head=2 --n_embd=32 --eval_steps=2 --batch_size=2 "
    "--total_batch_tokens=256 --dropout=0.1",
    "sft": f"{TUNED} --data={GOLDEN}/data/chat.jsonl --eval_steps=2 --batch_size=2 --total_batch_tokens=256 "
    "--dropout=0.1",
    "dpo": PAIRS,
    "reward": PAIRS,
    "rl": f"{TUNED} --data={GOLDEN}/data/rl.jsonl --reward={ROOT}/config/debug_rl.py:_brief --max_new_tokens=8 "
    "--prompts_per_step=2 --group_size=4 --batch_size=4 --eval_prompts=4 --value_learning_rate=1e-2",
    "prepare": "--workers=1 --val_fraction=0.1",
    "tokenizer": f"--input={ROOT}/docs/*.md --vocab_size=512",
}
# {name: (trainer, number of ranks, flags)}
KINDS = {
    "pretrain": ("pretrain", 1, ""),
    "pretrain_adamw": ("pretrain", 1, "--optimizer=adamw --overlap_step=forward --learning_rate=1"),
    "pretrain_zero1": ("pretrain", 2, "--zero1=True"),
    "pretrain_powersgd": ("pretrain", 2, "--compress=powersgd"),
    "pretrain_backward": ("pretrain", 2, "--overlap_step=backward --grad_clip=0"),
    "pretrain_fsdp": ("pretrain", 2, "--parallel=fsdp --optimizer=adamw"),
    "sft": ("sft", 1, ""),
    "sft_lora_2": ("sft", 2, "--trainable=lora --zero1=True"),
    "dpo": ("dpo", 1, ""),
    "dpo_kto": ("dpo", 1, "--loss=kto"),
    "dpo_lora": ("dpo", 1, "--trainable=lora --reference=adapter_off"),
    "dpo_2": ("dpo", 2, "--zero1=True"),
    "reward": ("reward", 1, ""),
    "reward_lora": ("reward", 1, "--trainable=lora"),
    "reward_2": ("reward", 2, "--zero1=True"),
    "rl": ("rl", 1, "--minibatches=2"),
    "rl_lora": ("rl", 1, "--trainable=lora"),
    "rl_ppo": ("rl", 1, "--algorithm=ppo --normalise_rewards=True"),
    "rl_ppo_2": ("rl", 2, "--algorithm=ppo --zero1=True"),
    "prepare": ("prepare", 1, f"--input={ROOT}/docs/*.md --vocab_size=512 --near=0.8"),
    "prepare_chat": ("prepare", 1, f"--kind=chat --input={GOLDEN}/data/chat.jsonl --tokenizer_dir={GOLDEN}/model"),
    "prepare_pairs": ("prepare", 1, f"--kind=preference --input={GOLDEN}/data/pairs.jsonl"),
    "tokenizer_bpe": ("tokenizer", 1, ""),
    "tokenizer_sentencepiece": ("tokenizer", 1, "--backend=sentencepiece"),
}


def command(kind: str, moment: int = 0, victim: int = 0) -> list[str]:
    """A run of a kind, that kills its rank `victim` at the moment; 0: not at all."""
    trainer, n_ranks, flags = KINDS[kind]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n_ranks}"]
    script = [str(ROOT / f"{trainer}.py"), *TRAINERS[trainer].split(), *flags.split(), f"--out_dir={OUT}"]
    return [sys.executable, *(launcher if n_ranks > 1 else []), __file__, "inside", str(moment), str(victim), *script]


def start(run: Callable, kind: str, folder: Path, moment: int = 0, victim: int = 0) -> subprocess.CompletedProcess:
    """Run the command in a directory, to its end. run: subprocess.run or forks.run."""
    folder.mkdir(exist_ok=True)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return run(command(kind, moment, victim), cwd=folder, env=env, capture_output=True, text=True, timeout=200)


# ---- within a run ----------------------------------------------------------------------------------------------------

TOUCH = ("open", "os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")


def kill_at(moment: int, victim: int) -> Callable[[], int]:
    """Have rank 0 count what it does to files of OUT, and kill the victim just before the moment, or in a write.

    Return a function that tells the count so far."""
    rank = int(os.environ.get("RANK", 0))
    Path(f"pid{rank}").write_text(str(os.getpid()), encoding="utf-8")
    if rank:
        return lambda: 0
    inside, n_seen, plain_open = (str(OUT.absolute()), str(WORK.absolute())), 0, builtins.open

    def next_moment(write_half: Callable = lambda: None) -> None:
        nonlocal n_seen
        n_seen += 1
        if n_seen == moment:
            if victim == 0:  # else this rank goes on, and writes the whole
                write_half()
            os.kill(int(Path(f"pid{victim}").read_text(encoding="utf-8")), signal.SIGKILL)

    def hook(event: str, args: tuple) -> None:
        if event in TOUCH and isinstance(args[0], str | Path) and os.path.abspath(args[0]).startswith(inside):
            next_moment()

    def counted_open(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> io.IOBase:
        file = plain_open(path, mode, *args, **kwargs)
        if isinstance(path, str | Path) and os.path.abspath(path).startswith(inside) and mode != "r":
            plain_write = file.write

            def write(data: Any) -> int:
                next_moment(lambda: (plain_write(data[: len(data) // 2]), file.flush()))
                return plain_write(data)

            file.write = write
        return file

    sys.addaudithook(hook)
    builtins.open = io.open = counted_open
    return lambda: n_seen


# ---- what a run leaves -----------------------------------------------------------------------------------------------


def depends_on_the_clock(key: str) -> bool:
    """Return whether a value of the log is a time or a speed, or the checksum of lines that hold such."""
    return key.endswith(("_s", "_ms", "_gib")) or key in ("mfu", "crc32")


def left(out: Path) -> dict[str, Any]:
    """Return what must not depend on a kill, by a name for messages."""
    from groundup.train import checkpoint

    if not (out / "log.jsonl").exists():  # of prepare.py or tokenizer.py
        beside = [path.name for path in out.parent.glob(f"{WORK}*")]
        return {"beside": beside} | {path.name: path.read_bytes() for path in out.iterdir()}
    found: dict[str, Any] = {"files": sorted(path.name for path in out.iterdir() if path.name != ".lock")}
    for link in ("latest", "best", "best2"):
        found[link] = os.readlink(out / link)
    for step in checkpoint.step_dirs(out):
        checkpoint.check_bytes(step)
        for path in step.iterdir():
            name = f"{step.name}/{path.name}"
            if path.suffix == ".pt":
                found[name] = plain(checkpoint.read_state(path))
            elif path.name != "checksums.json":  # of .pt files: their bytes depend on what was pickled how
                found[name] = path.read_bytes()
    lines = (out / "log.jsonl").read_text(encoding="utf-8").splitlines()
    events = [{k: v for k, v in json.loads(line).items() if not depends_on_the_clock(k)} for line in lines]
    # a save is logged by a thread: before or after the evaluation
    found["log"] = sorted(events, key=lambda event: (event["step"], event["event"]))
    found["card"] = (out / "README.md").read_text(encoding="utf-8").count("Complete: step 6 of 6")
    if (out / "reference.safetensors").exists():
        found["reference"] = (out / "reference.safetensors").read_bytes()
    return found


def plain(state: Any) -> Any:
    """Return a training state with bytes in place of tensors, so that == compares them to the bit."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [plain(value) for value in state]
    return (tuple(state.shape), state.numpy().tobytes()) if hasattr(state, "numpy") else state


def differences(mine: dict, theirs: dict) -> list[str]:
    return [name for name in sorted(mine | theirs) if mine.get(name) != theirs.get(name)]


def try_kills(kind: str, folder: Path, n_kills: int, rng: random.Random, run: Callable) -> list[str]:
    """Kill runs of a kind, one after the other, and continue each; return what went wrong."""
    straight = start(run, kind, folder / "straight")
    if straight.returncode:
        return [f"{kind}: {straight.stderr[-2000:]}"]
    n_moments = int((folder / "straight" / MOMENTS).read_text(encoding="utf-8"))
    usual = left(folder / "straight" / OUT)
    wrong = []
    for number in range(n_kills):
        killed = folder / f"killed{number}"
        victim = rng.randrange(KINDS[kind][1])
        # a third of the runs are killed a second time while they continue
        moments = [rng.randint(1, n_moments)] + [rng.randint(1, n_moments)] * (rng.random() < 1 / 3)
        where = f"{kind}, killed rank {victim} at {moments} of {n_moments}"
        endings = [start(run, kind, killed, moment, victim) for moment in moments]
        done = start(run, kind, killed)
        first = endings[0].returncode
        if first == 0 or "Traceback" in done.stderr or done.returncode:
            wrong.append(f"{where}: exit {first}, then {done.returncode}: {done.stderr[-2000:]}")
            continue
        try:
            differ = differences(usual, left(killed / OUT))
        except (ValueError, OSError) as error:  # a line or a file that cannot be read
            differ = [repr(error)]
        if differ:
            wrong.append(f"{where}: {', '.join(differ)} differ; see {killed}")
        else:
            shutil.rmtree(killed)
    return wrong


def main() -> None:
    import forks

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=190)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    kinds, rng, wrong = options.kinds.split(","), random.Random(options.seed), []
    folder = Path(tempfile.mkdtemp(prefix="kills"))
    for number, kind in enumerate(kinds):
        n_kills = options.kills * (number + 1) // len(kinds) - options.kills * number // len(kinds)
        (folder / kind).mkdir()
        found = try_kills(kind, folder / kind, n_kills, rng, forks.run)
        print(f"{kind}: {n_kills} kills, {len(found)} failures", *found, sep="\n", flush=True)
        wrong += found
    print(f"{options.kills} kills, {len(wrong)} failures")
    sys.exit(bool(wrong))


if __name__ == "__main__" and sys.argv[1:2] == ["inside"]:
    n_moments = kill_at(int(sys.argv[2]), int(sys.argv[3]))
    sys.argv = sys.argv[4:]
    sys.path[0] = str(ROOT)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        if count := n_moments():
            MOMENTS.write_text(str(count), encoding="utf-8")
elif __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
