"""What a GPU does with this project, in two parts of at most five minutes, the most valuable first:
make gpu.

    python tools/gpu_check.py --sections=first               # tests, speed of training and decoding
    python tools/gpu_check.py --sections=second --nanogpt=../nanoGPT  # beside others, the trainers
    python tools/gpu_check.py --sections=training,decode     # only these

Each section has a time limit; what takes long in it is a process of its own. What it finds is
written as it comes to out_dir/first.md and .json (second.md; gpu_check.md for a list of sections).
A section that fails leaves the end of its output there, and the next one begins. Without a GPU
everything runs on tiny shapes, which tests the tool, and the figures mean nothing. The exit status
is 1 if a section failed on a GPU.
"""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import bench_model
import timing
from machine import ROOT, commit, run_script

from configurator import configure
from groundup.errors import UserError, end_in_one_line, refuse
from groundup.tokens.token_files import TokenData
from groundup.train import device as devices

# ---- config --------------------------------------------------------------------------------------
out_dir = "out/gpu_check"  # what was found; the runs, which are deleted
sections = "first"  # first, second, or some of the names in PARTS, comma-separated
shapes = "124M,350M,1.1B"  # training: models; decode measures the last
nanogpt = ""  # beside and peers: checkout of karpathy/nanoGPT; "" = without

PARTS = {  # seconds of each section
    "first": {"machine": 20, "tests": 90, "training": 100, "decode": 60},
    "second": {"beside": 90, "peers": 75, "tuning": 75, "cpu": 30, "resume": 25},
}
LIMIT_S = PARTS["first"] | PARTS["second"]
# Settings that give pretrain.py the shape of a model
SIZES = "n_layer n_head n_kv_head n_embd ffn_dim block_size vocab_size tie_embeddings".split()
PRETRAIN = ("pretrain.py", "config/debug.py", "--sample_prompts=")
RARELY = ("--eval_every=1000000", "--save_every=1000000")  # only at the beginning and the end


@dataclass
class Section:
    name: str
    seconds: float = 0.0
    text: list[str] = field(default_factory=list)  # Markdown
    figures: list[dict] = field(default_factory=list)
    failed: str = ""  # why


class Check:
    """Runs the sections. gpu: False = tiny shapes on a CPU."""

    def __init__(self, out: Path, gpu: bool, shapes: str, nanogpt: str = "") -> None:
        self.out, self.gpu, self.nanogpt = out, gpu, nanogpt
        self.device, self.dtype = ("cuda", "bfloat16") if gpu else ("cpu", "float32")
        self.on_device = [f"--device={self.device}", f"--compile={gpu}"]
        self.shapes = shapes.split(",") if gpu else ["tiny"]
        self.section, self.end = Section(""), 0.0  # end: of the section's time, by the clock

    def run(self, *command: str, directory: str | Path = ROOT) -> str:
        """Return what a Python script prints. Raise UserError with the end of its output if it
        fails.
        """
        left = self.end - time.monotonic()
        if left <= 1:
            raise UserError("no time left")
        lines = run_script([sys.executable, *command], directory, left)
        return "".join(line for _, line in lines)

    def train(self, name: str, *flags: str, log_every: int = 1) -> tuple[list[dict], str]:
        """Return the training events of a run and what it printed. flags: a script, its config,
        --key=value.
        """
        out = self.out / "runs" / name
        text = self.run(*flags, *RARELY, f"--out_dir={out}", f"--log_every={log_every}")
        events = map(json.loads, (out / "log.jsonl").read_text("utf-8").splitlines())
        return [event for event in events if event["event"] == "train"], text

    def tried(self, name: str, *flags: str, log_every: int = 1) -> tuple[list[dict], str]:
        """`train`, but a run that fails is noted and the section goes on."""
        try:
            return self.train(name, *flags, log_every=log_every)
        except UserError as error:
            self.section.failed += f"{name}: {error}\n"
            return [], ""

    def table(self, rows: list[dict]) -> None:
        """Add a Markdown table, whose columns are the keys of the first row."""
        if rows:
            keys = list(rows[0])
            lines = [keys, ["---"] * len(keys)]
            lines += [[str(row.get(key, "")) for key in keys] for row in rows]
            self.section.text += [f"| {' | '.join(line)} |" for line in lines]
            self.section.figures += rows

    def block(self, lines: list[str]) -> None:
        """Add lines as they are."""
        self.section.text += ["```", *lines, "```"]

    # ---- sections: the docstring is the text below the heading -----------------------------------

    def machine(self) -> None:
        """Versions; the measured ceilings."""
        device = torch.device(self.device)
        found = {"device": devices.hardware(device)} | timing.versions()
        for dtype in (torch.bfloat16, torch.float32):
            rate = timing.matmul(device, dtype)() / 1e12
            found[f"matrix product, {str(dtype)[6:]}"] = f"{rate:.2f} TFLOP/s"
        rate = timing.reading(2**30 if self.gpu else 2**24, device)() / 1e9
        found["reading memory"] = f"{rate:.0f} GB/s"
        self.table([{"what": name, "found": value} for name, value in found.items()])

    def tests(self) -> None:
        """Every test that is marked gpu; a failure stops none of the others."""
        where, processes = ["tests/generate/test_sampling.py"], []
        if self.gpu:
            files = sorted(ROOT.glob("tests/**/test_*.py"))
            where = [str(file) for file in files if "mark.gpu\n" in file.read_text("utf-8")]
            processes = ["-n", "8"]
        options = ["-q", "-m", "gpu", "-rfs", "--show-capture=no", "--tb=short", "--timeout=70"]
        said = self.run("-m", "pytest", *options, *processes, *where)
        self.block(said.splitlines()[-40:])

    def training(self) -> None:
        """pretrain.py itself, compiled: tokens/s, share of the data sheet's FLOP/s, memory beside
        the plan.
        """
        pairs = [(shape, kind) for kind in ("adamw", "muon") for shape in self.shapes]
        rows = [self.training_row(*pair, steps=30 if self.gpu else 3) for pair in pairs]
        self.table([row for row in rows if row])

    def training_row(self, shape: str, optimizer: str, steps: int) -> dict:
        """Return a line of `training`; {} if the run fails."""
        cfg = bench_model.SHAPES[shape]
        batch = {"124M": 32, "350M": 16, "1.1B": 4}.get(shape, 2)
        flags = [f"--{key}={getattr(cfg, key)}" for key in SIZES]
        flags += [f"--batch_size={batch}", f"--total_batch_tokens={batch * cfg.block_size}"]
        flags += [f"--optimizer={optimizer}", f"--max_steps={steps}", "--eval_steps=1"]
        flags += [f"--warmup_steps={min(5, steps)}"]
        flags += ["--dtype=bfloat16"] if self.gpu else []
        command = [*PRETRAIN, *flags, *self.on_device]
        events, said = self.tried(f"{shape}_{optimizer}", *command, log_every=max(1, steps // 3))
        if not events:
            return {}
        last, plan = events[-1], re.search(r"memory +([\d.]+) GiB", said)
        return {
            "model": shape,
            "optimizer": optimizer,
            "batch": f"{batch} x {cfg.block_size}",
            "tokens/s": f"{last['tokens_per_s']:,.0f}",
            "MFU": f"{100 * last['mfu']:.1f} %" if "mfu" in last else "",
            "GiB": f"{last['memory_gib']:.1f}",
            "GiB planned": plan[1] if plan else "",
            "loss": f"{events[0]['loss']:.3f} to {last['loss']:.3f}",
        }

    def beside(self) -> None:
        """nanoGPT's train.py and pretrain.py as they are started, on the same tokens, shape and
        batch: 124M AdamW.
        """
        cfg = bench_model.SHAPES["124M" if self.gpu else "tiny"]
        batch, steps = (16, 100) if self.gpu else (2, 4)
        sizes = ("n_layer", "n_head", "n_embd", "block_size")
        both = [f"--{key}={getattr(cfg, key)}" for key in sizes]
        both += [f"--batch_size={batch}", f"--dtype={self.dtype}", *self.on_device]
        ours = [f"--vocab_size={cfg.vocab_size}", "--n_kv_head=0", f"--max_steps={steps}"]
        ours += [f"--total_batch_tokens={batch * cfg.block_size}", "--optimizer=adamw"]
        ours += ["--warmup_steps=2", "--eval_steps=1"]

        begin = time.monotonic()
        command = [*PRETRAIN, *ours, *both]
        events, _ = self.train("beside", *command, log_every=max(1, steps // 20))
        ms, loss = [event["step_ms"] for event in events], events[-1]["loss"]
        self.script_row("pretrain.py", steps, begin, ms, loss)
        if self.nanogpt:
            begin = time.monotonic()
            ms, loss = self.train_nanogpt(steps, *both)
            self.script_row("nanoGPT's train.py", steps, begin, ms, loss)

    def train_nanogpt(self, steps: int, *flags: str) -> tuple[list[float], float]:
        """Return the milliseconds of each step of nanoGPT's train.py, and its last loss."""
        theirs = [f"--max_iters={steps}", "--gradient_accumulation_steps=1", "--log_interval=1"]
        theirs += ["--eval_interval=1000000", "--eval_iters=1"]
        theirs += [f"--out_dir={self.out}/runs/nanogpt", f"--dataset={self.tokens_for_nanogpt()}"]
        said = self.run("train.py", *theirs, *flags, directory=self.nanogpt)
        found = re.findall(r"iter \d+: loss ([\d.]+), time ([\d.]+)ms", said)
        return [float(ms) for _, ms in found], float(found[-1][0])

    def script_row(
        self, script: str, steps: int, begin: float, ms: list[float], loss: float
    ) -> None:
        """Add a line of `beside`: a script that began at `begin` and has ended."""
        seconds = f"{time.monotonic() - begin:.1f}"
        row = {"script": script, "steps": steps, "process, s": seconds}
        self.table([row | {"ms a step": f"{median(ms):.1f}", "loss": f"{loss:.3f}"}])

    def tokens_for_nanogpt(self) -> Path:
        """Write the token file of config/debug.py as nanoGPT reads it; return its directory."""
        directory = self.out / "runs" / "tokens"
        directory.mkdir(parents=True, exist_ok=True)
        for split, name in (("train", "train.bin"), ("val", "val.bin")):
            tokens = TokenData(ROOT / "data" / "debug", split)
            tokens.window(0, tokens.n_tokens).astype("uint16").tofile(directory / name)
        return directory

    def peers(self) -> None:
        """transformers' and nanoGPT's training steps on the same shape, in turns with ours."""
        more = [f"--nanogpt={self.nanogpt}"] if self.nanogpt else []
        more += ["--tokens=16384" if self.gpu else "--tokens=128", "--apart=False"]
        self.bench("train", self.shapes[0], *more)

    def decode(self) -> None:
        """Tokens/s of generation, and the share of reading weights and cache once per token."""
        for batch in (8, 64) if self.gpu else (2,):  # beside 1
            more = [] if self.gpu else ["--new_tokens=4"]
            self.bench("generate", self.shapes[-1], f"--batch_size={batch}", *more)

    def bench(self, row: str, shape: str, *flags: str) -> None:
        """Add the lines of a row of tools/bench.py."""
        out, rows = self.out / f"{row}.json", []
        way = "blocks" if self.gpu else "none"
        command = ["tools/bench.py", f"--rows={row}", f"--shapes={shape}", f"--compile={way}"]
        self.run(*command, "--repeats=3", f"--out={out}", f"--device={self.device}", *flags)
        for line in json.loads(out.read_text("utf-8"))["lines"]:
            found, share = line["note"], ""  # why it could not be measured
            if line["samples"]:
                found = f"{line['median']:,.0f} {line['unit']}"
                if line["limit"]:
                    share = f"{100 * line['median'] / line['limit']:.0f} %"
            ratios = [f"{ratio[0]:.2f} x {peer}" for peer, ratio in line["ratios"].items()]
            row = {"case": line["case"], "side": line["side"], "found": found}
            rows.append(row | {"of the limit": share, "": "; ".join(ratios)})
        self.table(rows)
        out.unlink()

    def tuning(self) -> None:
        """sft packed, dpo and GRPO on the debug data, compiled."""
        rows, steps = [], 20 if self.gpu else 2
        for stage, more in (("sft", "--pack=yes"), ("dpo", ""), ("rl", "--eval_prompts=1")):
            command = [f"{stage}.py", f"config/debug_{stage}.py", *more.split(), *self.on_device]
            command += [f"--max_steps={steps}", "--warmup_steps=2"]
            events, _ = self.tried(stage, *command)
            if events:
                loss, ms = (f"{events[-1][key]:.4g}" for key in ("loss", "step_ms"))
                rows.append({"stage": stage, "steps": steps, "loss": loss, "ms": ms})
        self.table(rows)

    def cpu(self) -> None:
        """The losses of config/debug.py on both, in float32."""
        steps, found = (200 if self.gpu else 4), {}
        for device in ("cpu", self.device):
            flags = [f"--max_steps={steps}", f"--warmup_steps={min(5, steps)}"]
            flags += [f"--device={device}"]
            found[device], _ = self.train(f"debug_{device}", *PRETRAIN, *flags)
        rows = []
        for i in sorted({0, steps // 4 - 1, steps // 2 - 1, steps - 1}):
            losses = {device: f"{events[i]['loss']:.5f}" for device, events in found.items()}
            rows.append({"step": i + 1} | losses)
        self.table(rows)

    def resume(self) -> None:
        """Eight steps at once, and four with four more after a restart."""
        flags = [*PRETRAIN, "--schedule=constant", f"--device={self.device}", "--warmup_steps=4"]
        straight, _ = self.train("straight", *flags, "--max_steps=8")
        self.train("resumed", *flags, "--max_steps=4")
        resumed, _ = self.train("resumed", *flags, "--max_steps=8")
        pairs = list(zip(straight, resumed, strict=True))[4:]
        rows = [{"step": a["step"], "straight": a["loss"], "resumed": b["loss"]} for a, b in pairs]
        self.table(rows)


def results(check: Check, names: list[str]) -> Iterator[Section]:
    for name in names:
        begin, check.section = time.monotonic(), Section(name)
        check.end = begin + LIMIT_S[name]
        try:
            getattr(check, name)()
        except Exception as error:  # whatever it is, the next section may work
            check.section.failed = f"{type(error).__name__}: {error}"
        check.section.seconds = round(time.monotonic() - begin, 1)
        yield check.section


def markdown(section: Section) -> str:
    what = getattr(Check, section.name).__doc__ or ""
    failed = ["", "Failed:", "```", section.failed, "```"] if section.failed else []
    title = f"## {section.name}, {section.seconds} s"
    return "\n".join(["", title, "", what, "", *section.text, *failed, ""])


def main(config: dict) -> int:
    part = config["sections"]
    names = list(PARTS[part]) if part in PARTS else part.split(",")
    unknown = [name for name in names if name not in LIMIT_S]
    known = ", ".join([*PARTS, *LIMIT_S])
    refuse(unknown, f"sections={''.join(unknown[:1])!r} is none of {known}")
    part = part if part in PARTS else "gpu_check"
    out, gpu, found = Path(config["out_dir"]).absolute(), torch.cuda.is_available(), []
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "runs", ignore_errors=True)
    hardware = devices.hardware(torch.device("cuda" if gpu else "cpu"))
    head = f"# {hardware}, {time.strftime('%Y-%m-%d')}, commit {commit()}\n"
    if not gpu:
        head += "\nThere is no GPU: every section ran on tiny shapes on the CPU, and the figures"
        head += " mean nothing.\n"
    (out / f"{part}.md").write_text(head, "utf-8")
    print(head)
    for section in results(Check(out, gpu, config["shapes"], config["nanogpt"]), names):
        text = markdown(section)
        print(text, flush=True)
        with open(out / f"{part}.md", "a", encoding="utf-8") as f:
            f.write(text)
        found.append(vars(section))
        (out / f"{part}.json").write_text(json.dumps(found, indent=1), "utf-8")
    shutil.rmtree(out / "runs", ignore_errors=True)
    print(f"gpu_check: {out}/{part}.md and .json")
    return int(gpu and any(section["failed"] for section in found))


if __name__ == "__main__":
    end_in_one_line()
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main(configure(globals())))
