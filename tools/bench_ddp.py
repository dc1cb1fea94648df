"""Row ddp: gradient exchange on a slow network, ddp.py beside torch DDP, each case with its own
copy of one model.

With mbit each of the two ranks has a network namespace (removed at the end, also after an error or
Ctrl-C), joined by a link that tc's token bucket limits; that needs root, ip and tc. A round runs
every case once: barrier, an untimed step, then the timed steps with nothing between, so that work
which a step leaves to the next is timed too. Times are the slowest rank's, per step. float32, one
thread per rank, fused AdamW, norm clipped to 1.0. torch DDP has gradient_as_bucket_view=True and
broadcast_buffers=False, both in its favour. eta = (T_sequential - T) / (T_sequential - T_ideal):
the part of the possible gain that overlap has won. In T_ideal a bucket leaves once it is ready
(measured without communication) and the link is free, at the rate of the case comm: f_k =
max(ready_k, f_k-1) + bytes_k / rate, T_ideal = max(T_compute, f_last).
"""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import timing
import torch
import torch.distributed as dist
from timing import Case, Line, Options
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import ddp
from groundup.errors import UserError
from groundup.train.optim import Optimizer
from groundup.train.powersgd import PowerSGD
from groundup.train.ranks import barrier, close, gather_objects, init
from model import ModelConfig, Transformer

LR, BETAS, DECAY = 1e-3, (0.9, 0.95), 0.1
SEQUENCES, LENGTH = 4, 128  # per rank and step
STEPS = 3  # timed in a row
# 7M parameters, ten buckets
MODEL = ModelConfig(vocab_size=2048, block_size=LENGTH, n_layer=8, n_head=8, n_embd=256)
CASES = {  # options of our DDP
    "compute": {},  # without communication
    "comm": {},  # without computation
    "sequential": {},  # ours, all sent after backward
    "torch": {},  # torch DDP
    "torch_same": {},  # with our bucket size
    "ours": {},
    "forward": {"overlap_step": "forward"},
    "backward": {"overlap_step": "backward"},
    "zero1": {"zero1": True},
    "zero1_forward": {"zero1": True, "overlap_step": "forward"},
    "fp16": {"hook": ddp.Average("fp16")},
    "bf16": {"hook": ddp.Average("bf16")},
    "powersgd": {"hook": PowerSGD(rank=4, embedding=True)},
    "powersgd_raw": {"hook": PowerSGD(rank=4, embedding=False)},
}
OVERLAP = {"sequential", "torch", "torch_same", "ours", "forward", "backward"}  # these get an eta


@contextmanager
def namespaces(mbit: int) -> Iterator[list[tuple[list[str], str]]]:
    """Join two network namespaces by a link of `mbit` Mbit/s; yield (command prefix, interface)
    of each. They are removed at the end.
    """
    # The interface in a namespace is called like it.
    homes = one, other = [f"b{os.getpid()}r{rank}" for rank in range(2)]
    setup = [f"ip netns add {home}" for home in homes]
    setup += [f"ip link add {one} netns {one} type veth peer name {other} netns {other}"]
    limit = f"tbf rate {mbit}mbit burst 64kb latency 100ms"
    for rank, home in enumerate(homes):
        setup += [f"ip -n {home} addr add 10.77.0.{rank + 1}/24 dev {home}"]
        setup += [f"ip -n {home} link set {name} up" for name in (home, "lo")]
        setup += [f"tc -n {home} qdisc add dev {home} root {limit}"]
    try:
        for command in setup:
            subprocess.run(command.split(), check=True, capture_output=True, text=True)
        yield [(["ip", "netns", "exec", home], home) for home in homes]
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave them behind
        for home in homes:
            subprocess.run(["ip", "netns", "del", home], capture_output=True)


# ---- cases ---------------------------------------------------------------------------------------
# step(); flush() what a step has left; buckets; times: of a step's begin, then of each bucket


class Sequential(ddp.DDP):
    """Launches no bucket before backward is over: each waits for a gradient that never comes."""

    def _start_step(self) -> None:
        super()._start_step()
        for bucket in self.buckets:
            bucket.missing.add(-1)


def our_case(key: str, model: Transformer, tokens: Tensor) -> SimpleNamespace:
    times: list[float] = []

    def silent(bucket: ddp.Bucket) -> Iterator:
        times.append(time.perf_counter())
        yield ddp.State.IN_FLIGHT
        bucket.squared_norm = ddp.sum_of_squares(bucket.grad)
        yield ddp.State.REDUCED

    options = {"hook": silent} if key == "compute" else CASES[key]
    parallel = (Sequential if key == "sequential" else ddp.DDP)(model, **options)
    opt = Optimizer(parallel.buckets, "adamw", BETAS, weight_decay=DECAY)

    def exchange() -> None:
        for bucket in parallel.buckets:
            bucket.launch(dist.all_reduce, bucket.grad)  # of zeros
        for bucket in parallel.buckets:
            bucket.wait()

    def step() -> None:
        times.append(time.perf_counter())
        parallel.expect_step(opt, LR)
        (model(tokens, tokens) / tokens.numel()).backward()
        parallel.step(opt, LR, clip=0.0 if key == "backward" else 1.0)

    step = exchange if key == "comm" else step
    return SimpleNamespace(step=step, flush=parallel.flush, buckets=parallel.buckets, times=times)


def torch_case(key: str, model: Transformer, tokens: Tensor) -> SimpleNamespace:
    cap = None  # torch's own bucket size; torch_same: ours, a block
    if key == "torch_same":
        cap = sum(p.nbytes for p in model.layers[0].parameters()) / ddp.MIB
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=cap, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    opt = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)

    def step() -> None:
        (wrapped(tokens, tokens) / tokens.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()

    return SimpleNamespace(step=step, flush=lambda: None)


def sent_mib() -> float:
    """Return the MiB that this process has written until now, sockets included. The counters of
    the loopback would include other processes.
    """
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"]) / 2**20


def measure(built: dict[str, SimpleNamespace], rounds: int) -> dict[str, list]:
    """Return {case: [(ms, MiB sent), one for each round]}, both per step, of this rank."""

    def turn(case: SimpleNamespace) -> tuple[float, float]:
        barrier()
        case.step()
        begin, before = time.perf_counter(), sent_mib()
        for _ in range(STEPS):
            case.step()
        values = 1e3 * (time.perf_counter() - begin) / STEPS, (sent_mib() - before) / STEPS
        case.flush()
        return values

    return timing.alternate({key: partial(turn, case) for key, case in built.items()}, rounds)


def ready_ms(compute: SimpleNamespace) -> list[float]:
    """Return how long after the begin of a step each bucket is ready, without communication."""
    times = 1e3 * torch.tensor(compute.times, dtype=torch.float64)  # ms
    times = times.view(-1, 1 + len(compute.buckets))[1 + STEPS :]  # steps after the warm-up
    return (times[:, 1:] - times[:, :1]).median(0).values.tolist()


def ideal_ms(ready: list[list[float]], sizes: list[int], comm_ms: float) -> float:
    """Return when the last bucket arrives at best, see the head of this file. ready: of each rank;
    sizes: bytes of the buckets, which take comm_ms in all.
    """
    sent = 0.0  # until when the link is busy
    for n_bytes, *ready_at in zip(sizes, *ready, strict=True):
        sent = max(sent, *ready_at) + n_bytes * comm_ms / sum(sizes)
    return sent


def run_rank(cases: list[str], rounds: int) -> None:
    """Do one rank's part; rank 0 prints what all have measured as JSON."""
    torch.set_num_threads(1), torch.manual_seed(0)
    world, model = init(timeout_s=60), Transformer(MODEL)
    rng = torch.Generator().manual_seed(world.rank)
    tokens = torch.randint(MODEL.vocab_size, (SEQUENCES, LENGTH), generator=rng)
    built = {}
    for key in cases:
        make = torch_case if "torch" in key else our_case
        built[key] = make(key, deepcopy(model), tokens)
    mine = measure(built, rounds), ready_ms(built["compute"])
    samples, ready = zip(*gather_objects(mine), strict=True)
    if world.is_main:
        sizes = [bucket.grad.nbytes for bucket in built["compute"].buckets]
        print(json.dumps({"samples": samples, "ready": ready, "sizes": sizes}))
    # Free torch's reducers before the process group. Its last owner destroys it; a reducer does
    # that while it holds the GIL, for which gloo's thread may wait: a deadlock, seen on a busy
    # machine.
    built.clear()
    gc.collect()
    close()


def launch(cases: list[str], rounds: int, mbit: int) -> dict[str, list]:
    """Set up the link, run both ranks over it, and return their results."""
    with ExitStack() as stack:
        host, places = "127.0.0.1", [([], "lo")] * 2
        if mbit:
            try:
                host, places = "10.77.0.1", stack.enter_context(namespaces(mbit))
            except (OSError, subprocess.CalledProcessError) as error:
                said = f"{error} {getattr(error, 'stderr', '')}".strip()
                what = f"mbit={mbit} needs root, ip and tc; or use mbit=0: {said}"
                raise UserError(f"bench: {what}") from None
        command = [sys.executable, "-W", "ignore::FutureWarning", __file__]
        command += [json.dumps([cases, rounds])]
        port = f"{20000 + os.getpid() % 12000}"  # below those that the kernel hands out
        env = os.environ | {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": "2"}
        # torch would warn that namespaces have no DNS
        env |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        processes = []
        for rank, (prefix, interface) in enumerate(places):
            env |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "GLOO_SOCKET_IFNAME": interface}
            pipe = subprocess.DEVNULL if rank else subprocess.PIPE
            process = subprocess.Popen(
                [*prefix, *command], env=env, stdout=pipe, start_new_session=True
            )
            processes.append(process)
            stack.callback(process.kill)
        codes = [process.wait() for process in processes]  # a rank left alone ends after timeout_s
        if any(codes):
            raise UserError(
                f"bench: a rank of bench_ddp.py ended with status {max(codes, key=abs)}"
            )
        return json.loads(processes[0].stdout.read())


def ddp_row(options: Options) -> Iterator[Line]:
    """Steps/s of each case beside torch DDP; the limit is the step without communication."""
    chosen = CASES if options.cases == "all" else ["compute", *options.cases.split(",")]
    chosen = list(dict.fromkeys(chosen))
    found = launch(chosen, options.repeats, options.mbit)
    seconds, notes = {}, {}
    for key in chosen:
        rounds = torch.tensor([samples[key] for samples in found["samples"]])  # (ranks, rounds, 2)
        seconds[key] = (rounds[..., 0].amax(0) / 1e3).tolist()  # of the slowest rank
        notes[key] = f"{rounds[..., 1].mean(0).median():.2f} MiB sent"
    middle = {key: 1e3 * median(values) for key, values in seconds.items()}
    if {"comm", "sequential"} <= seconds.keys():
        ideal = ideal_ms(found["ready"], found["sizes"], middle["comm"])
        could = max(middle["sequential"] - max(ideal, middle["compute"]), 1e-9)
        for key in OVERLAP & seconds.keys():
            notes[key] += f", eta {(middle['sequential'] - middle[key]) / could:.2f}"
    name = f"7M, 2 x {SEQUENCES} x {LENGTH}" + f", {options.mbit} Mbit/s" * bool(options.mbit)
    case = Case(name, {}, "step/s", ("torch", "torch_same"), 1, notes=notes)
    yield from timing.lines("ddp", case, seconds, limit=1e3 / middle["compute"])


if __name__ == "__main__":
    run_rank(*json.loads(sys.argv[1]))
