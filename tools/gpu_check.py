"""What a GPU does with this project, in two parts of at most five minutes, the most valuable first:
make gpu.

    python tools/gpu_check.py --sections=first                      # tests, speed of training and decoding
    python tools/gpu_check.py --sections=second --nanogpt=../nanoGPT    # beside others, the other trainers
    python tools/gpu_check.py --sections=training,decode            # only these

Each section has a limit of time; what takes long in it is a process of its own. What it finds is
written as it comes to out_dir/first.md and .json (second.md; gpu_check.md for a list of sections);
a section that fails leaves the end of its output there, and the next one begins. Without a GPU all
of it runs on tiny shapes, which tests the tool, and the figures mean nothing. The exit status is 1
if a section failed on a GPU.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import bench_model
import curves
import timing

from configurator import configure
from groundup.errors import UserError, end_in_one_line
from groundup.tokens.token_files import TokenData
from groundup.train import device as devices

# ---- config --------------------------------------------------------------------------------------
out_dir = "out/gpu_check"  # what was found; the runs, which are deleted
sections = "first"  # first, second, or some of machine,tests,training,profile,decode,beside,peers,tuning,cpu,resume
shapes = "124M,350M,1.1B"  # training: models; decode measures the last
nanogpt = ""  # beside and peers: checkout of karpathy/nanoGPT; "" = without

ROOT = Path(__file__).parent.parent
PARTS = {  # seconds of each section
    "first": {"machine": 20, "tests": 90, "training": 100, "profile": 25, "decode": 60},
    "second": {"beside": 90, "peers": 75, "tuning": 75, "cpu": 30, "resume": 25},
}
LIMIT_S = PARTS["first"] | PARTS["second"]


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
        self.device, self.compiles, self.dtype = (
            ("cuda", "True", "bfloat16") if gpu else ("cpu", "False", "float32")
        )
        self.shapes = shapes.split(",") if gpu else ["tiny"]
        self.section, self.end = Section(""), 0.0

    def run(self, *command: str, directory: str | Path = ROOT) -> str:
        """Return what a Python script prints. Raise UserError with the end of its output if it
        fails.
        """
        left = self.end - time.monotonic()
        if left <= 1:
            raise UserError("no time left")
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=directory,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                timeout=left,
            )
        except subprocess.TimeoutExpired as error:
            said = (error.stdout or b"").decode("utf-8", "replace")[-1500:]
            raise UserError(f"{' '.join(command)}: no end after {left:.0f} s\n{said}") from None
        if done.returncode:
            raise UserError(
                f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-9000:]}"
            )
        return done.stdout

    def train(self, name: str, *flags: str, log_every: int = 1) -> tuple[list[dict], str]:
        """Return the events of a run and what it printed. flags: a script, its config,
        --key=value.
        """
        out = self.out / "runs" / name
        text = self.run(
            *flags, f"--out_dir={out}", f"--log_every={log_every}", "--save_every=1000000"
        )
        lines = (out / "log.jsonl").read_text("utf-8").splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == "train"], text

    def tried(self, name: str, *flags: str, log_every: int = 1) -> tuple[list[dict], str]:
        """`train`, but a run that fails is noted and the section goes on."""
        try:
            return self.train(name, *flags, log_every=log_every)
        except UserError as error:
            self.section.failed += f"{name}: {error}\n"
            return [], ""

    def table(self, rows: list[dict]) -> None:
        if rows:
            keys = list(rows[0])
            lines = [
                keys,
                ["---"] * len(keys),
                *([str(row.get(key, "")) for key in keys] for row in rows),
            ]
            self.section.text += [f"| {' | '.join(line)} |" for line in lines]
            self.section.figures += rows

    # ---- sections --------------------------------------------------------------------------------

    def machine(self) -> None:
        """Versions; the measured ceilings."""
        device = torch.device(self.device)
        rows = [{"what": name, "found": version} for name, version in timing.versions().items()]
        rows.insert(0, {"what": "device", "found": devices.hardware(device)})
        for dtype in (torch.bfloat16, torch.float32):
            found = timing.matmul(device, dtype)()
            rows.append({
                "what": f"matrix product, {str(dtype)[6:]}",
                "found": f"{found / 1e12:.2f} TFLOP/s",
            })
        found = timing.reading(2**30 if self.gpu else 2**24, device)()
        self.table([*rows, {"what": "reading memory", "found": f"{found / 1e9:.0f} GB/s"}])

    def tests(self) -> None:
        """Every test that is marked gpu; a failure stops none of the others."""
        where, processes = ["tests/generate/test_sampling.py"], []
        if self.gpu:
            files = sorted(ROOT.glob("tests/**/test_*.py"))
            where = [str(file) for file in files if "mark.gpu\n" in file.read_text("utf-8")]
            processes = ["-n", "8"]
        options = ["-q", "-m", "gpu", "-rfs", "--show-capture=no", "--tb=short", "--timeout=70"]
        said = self.run("-m", "pytest", *options, *processes, *where)
        self.section.text += ["```", *said.splitlines()[-40:], "```"]

    def training(self) -> None:
        """pretrain.py itself, compiled: tokens/s, share of the data sheet's FLOP/s, memory beside
        the plan.
        """
        rows, steps = [], 30 if self.gpu else 3
        for kind in ("adamw", "muon"):
            for shape in self.shapes:
                cfg = bench_model.SHAPES[shape]
                flags = [f"--{key}={getattr(cfg, key)}" for key in SIZES]
                batch = {"124M": 32, "350M": 16, "1.1B": 4}.get(shape, 2)
                flags += [f"--batch_size={batch}", f"--total_batch_tokens={batch * cfg.block_size}"]
                flags += [
                    f"--optimizer={kind}",
                    f"--max_steps={steps}",
                    "--eval_every=1000000",
                    "--eval_steps=1",
                ]
                flags += [f"--warmup_steps={min(5, steps)}"]
                flags += [
                    f"--device={self.device}",
                    f"--compile={self.compiles}",
                    "--sample_prompts=",
                ]
                flags += ["--dtype=bfloat16"] if self.gpu else []
                script = ("pretrain.py", "config/debug.py")
                events, said = self.tried(
                    f"{shape}_{kind}", *script, *flags, log_every=max(1, steps // 3)
                )
                if events:
                    last, plan = events[-1], re.search(r"memory +([\d.]+) GiB", said)
                    mfu = f"{100 * last['mfu']:.1f} %" if "mfu" in last else ""
                    rows.append({
                        "model": shape, "optimizer": kind, "batch": f"{batch} x {cfg.block_size}",
                        "tokens/s": f"{last['tokens_per_s']:,.0f}", "MFU": mfu,
                        "GiB": f"{last['memory_gib']:.1f}", "GiB planned": plan[1] if plan else "",
                        "loss": f"{events[0]['loss']:.3f} to {last['loss']:.3f}",
                    })  # fmt: skip
        self.table(rows)

    def profile(self) -> None:
        """The most expensive operations of one compiled step."""
        device, cfg = torch.device(self.device), bench_model.SHAPES[self.shapes[0]]
        tokens = torch.randint(
            cfg.vocab_size, (32 if self.gpu else 2, cfg.block_size), device=device
        )
        way, dtype = ("blocks", torch.bfloat16) if self.gpu else ("none", torch.float32)
        step, _ = bench_model.our_step("adamw", way, dtype, cfg, tokens)
        for _ in range(3):
            step()
        with torch.profiler.profile() as found:
            step()
            devices.synchronize(device)
        by = f"self_{self.device}_time_total".replace("cuda", "device")
        self.section.text += [
            "```",
            *found.key_averages().table(sort_by=by, row_limit=30).splitlines(),
            "```",
        ]

    def beside(self) -> None:
        """nanoGPT's train.py and pretrain.py as they are started, on the same tokens, shape and
        batch: 124M AdamW.
        """
        cfg = bench_model.SHAPES["124M" if self.gpu else "tiny"]
        batch, steps = (16, 100) if self.gpu else (2, 4)
        both = [f"--{key}={getattr(cfg, key)}" for key in ("n_layer", "n_head", "n_embd")]
        both += [f"--block_size={cfg.block_size}", f"--batch_size={batch}"]
        both += [f"--device={self.device}", f"--compile={self.compiles}", f"--dtype={self.dtype}"]
        ours = ["pretrain.py", "config/debug.py", f"--vocab_size={cfg.vocab_size}", "--n_kv_head=0"]
        ours += [f"--total_batch_tokens={batch * cfg.block_size}", f"--max_steps={steps}"]
        ours += ["--optimizer=adamw", "--warmup_steps=2", "--sample_prompts="]
        ours += ["--eval_every=1000000", "--eval_steps=1"]

        begin = time.monotonic()
        events, _ = self.train("beside", *ours, *both, log_every=max(1, steps // 20))
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
        shape, tokens = (self.shapes[0], 16384) if self.gpu else ("tiny", 128)
        more += [
            f"--compile={'blocks' if self.gpu else 'none'}",
            f"--tokens={tokens}",
            "--apart=False",
        ]
        self.bench("train", f"--shapes={shape}", *more)

    def bench(self, row: str, *flags: str) -> None:
        out, rows = self.out / f"{row}.json", []
        self.run(
            "tools/bench.py",
            f"--rows={row}",
            "--repeats=3",
            f"--out={out}",
            f"--device={self.device}",
            *flags,
        )
        for line in json.loads(out.read_text("utf-8"))["lines"]:
            ratios = "; ".join(f"{ratio[0]:.2f} x {peer}" for peer, ratio in line["ratios"].items())
            share = (
                f"{100 * line['median'] / line['limit']:.0f} %"
                if line["limit"] and line["samples"]
                else ""
            )
            found = f"{line['median']:,.0f} {line['unit']}" if line["samples"] else line["note"]
            rows.append({
                "case": line["case"],
                "side": line["side"],
                "found": found,
                "of the limit": share,
                "": ratios,
            })
        self.table(rows)
        out.unlink()

    def cpu(self) -> None:
        """The losses of config/debug.py on both, in float32."""
        steps, found = (200 if self.gpu else 4), {}
        for device in ("cpu", self.device):
            flags = [
                "--eval_every=1000000",
                f"--max_steps={steps}",
                f"--device={device}",
                "--sample_prompts=",
            ]
            flags += [f"--warmup_steps={min(5, steps)}"]
            found[device] = self.train(f"debug_{device}", "pretrain.py", "config/debug.py", *flags)[
                0
            ]
        at = sorted({0, steps // 4 - 1, steps // 2 - 1, steps - 1})
        rows = [
            {device: f"{events[i]['loss']:.5f}" for device, events in found.items()} for i in at
        ]
        self.table([{"step": i + 1} | row for i, row in zip(at, rows, strict=True)])

    def tuning(self) -> None:
        """sft packed, dpo and GRPO on the debug data, compiled."""
        rows, steps = [], 20 if self.gpu else 2
        for script, more in (("sft", ["--pack=yes"]), ("dpo", []), ("rl", ["--eval_prompts=1"])):
            flags = [
                f"--device={self.device}",
                f"--compile={self.compiles}",
                f"--max_steps={steps}",
                *more,
            ]
            flags += ["--warmup_steps=2"]
            events, _ = self.tried(
                script, f"{script}.py", f"config/debug_{script}.py", "--eval_every=1000000", *flags
            )
            if events:
                loss, ms = (f"{events[-1][key]:.4g}" for key in ("loss", "step_ms"))
                rows.append({"stage": script, "steps": steps, "loss": loss, "ms": ms})
        self.table(rows)

    def decode(self) -> None:
        """Tokens/s of generation, and the share of reading weights and cache once per token."""
        shape = self.shapes[-1]
        for batch in (8, 64) if self.gpu else (2,):  # beside 1
            more = ["--compile=blocks"] if self.gpu else ["--compile=none", "--new_tokens=4"]
            self.bench("generate", f"--shapes={shape}", f"--batch_size={batch}", *more)

    def resume(self) -> None:
        """Eight steps at once, and four with four more after a restart."""
        flags = ["pretrain.py", "config/debug.py", "--schedule=constant", f"--device={self.device}"]
        flags += ["--eval_every=1000000", "--warmup_steps=4"]
        straight = self.train("straight", *flags, "--max_steps=8", "--sample_prompts=")[0]
        self.train("resumed", *flags, "--max_steps=4", "--sample_prompts=")
        resumed = self.train("resumed", *flags, "--max_steps=8", "--sample_prompts=")[0]
        pairs = list(zip(straight, resumed, strict=True))[4:]
        self.table([
            {"step": a["step"], "straight": a["loss"], "resumed": b["loss"]} for a, b in pairs
        ])


SIZES = (
    "n_layer",
    "n_head",
    "n_kv_head",
    "n_embd",
    "ffn_dim",
    "block_size",
    "vocab_size",
    "tie_embeddings",
)


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


def main(config: dict) -> int:
    part = config["sections"]
    names = list(PARTS[part]) if part in PARTS else part.split(",")
    if unknown := [name for name in names if name not in LIMIT_S]:
        raise UserError(
            f"config: sections={unknown[0]!r} is none of {', '.join([*PARTS, *LIMIT_S])}"
        )
    part = part if part in PARTS else "gpu_check"
    out, gpu, found = Path(config["out_dir"]).absolute(), torch.cuda.is_available(), []
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "runs", ignore_errors=True)
    hardware = devices.hardware(torch.device("cuda" if gpu else "cpu"))
    head = f"# {hardware}, {time.strftime('%Y-%m-%d')}, commit {curves.commit()}\n"
    if not gpu:
        head += "\nThere is no GPU: every section ran on tiny shapes on the CPU, and the figures mean nothing.\n"
    (out / f"{part}.md").write_text(head, "utf-8")
    print(head)
    for section in results(Check(out, gpu, config["shapes"], config["nanogpt"]), names):
        what = getattr(Check, section.name).__doc__ or ""
        failed = ["", "Failed:", "```", section.failed, "```"] if section.failed else []
        text = "\n".join([
            "",
            f"## {section.name}, {section.seconds} s",
            "",
            what,
            "",
            *section.text,
            *failed,
            "",
        ])
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
