"""Gradient exchange on a slow network: ddp.py beside torch DDP, each case with its own copy of one model, in turn.

    sudo python tools/bench_ddp.py --ranks=2 --mbit=500 --out=ddp.json   # network namespaces joined by a limited link
    python tools/bench_ddp.py --cases=ours,powersgd --timeline=True      # when each bucket was sent, as a chart

As root every rank runs in a network namespace of its own (removed at the end, also after an error or Ctrl-C), joined by
veth pairs that tc's token bucket limits. Without root, ip or tc the link is virtual: collectives run over loopback, but
are not done before deadline = max(now, last deadline) + bytes / rate, torch DDP's by a communication hook.
A round runs every case once: barrier, a step to lead in, then `steps` timed ones with nothing between, so that work
which a step leaves to the next is inside the clock. Times are the slowest rank's, per step. One round does not count;
each begins with another case. float32, one thread per rank, fused AdamW, norm clipped to 1.0. torch DDP has
gradient_as_bucket_view=True and broadcast_buffers=False (the model's are constant), both in its favour.
eta = (T_sequential - T) / (T_sequential - T_ideal): what part of the possible gain overlap has won. In T_ideal a bucket
leaves once it is ready (measured without communication) and the link is free, at the link's full rate:
f_k = max(ready_k, f_k-1) + bytes_k / rate, T_ideal = max(T_compute, f_last). Only where float32 travels, once.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent))

import ddp
from configurator import configure
from groundup.errors import UserError
from groundup.train.optim import Optimizer
from groundup.train.ranks import barrier, close, gather_objects, init
from model import ModelConfig, Transformer

# ---- config ---------------------------------------------------------------------------------------------------------
ranks = 2  # processes; there should be a CPU core for each
mbit = 500  # rate of the link, Mbit/s each way; 0 = loopback without a limit
rounds = 7  # rounds that count, after one that does not
steps = 3  # timed steps of each case in a round
cases = "all"  # all, or some of CASES with commas
timeline = False  # afterwards draw one step of the cases "ours" and "powersgd"
out = ""  # JSON file for all figures; "" = none
link = "auto"  # auto | virtual; how the ranks are told what it is: tc | virtual | loopback

LR, BETAS, DECAY = 1e-3, (0.9, 0.95), 0.1
SEQUENCES, LENGTH = 4, 128  # per rank and step
MODEL = ModelConfig(vocab_size=2048, block_size=LENGTH, n_layer=8, n_head=8, n_embd=256)  # 7M, ten buckets
FRAME = 1514 / 1448  # bytes of an Ethernet frame (MTU 1500) per byte of TCP payload
CASES = {  # key: (label, options of our DDP)
    "compute": ("compute only", {}),
    "comm": ("communication only", {}),
    "sequential": ("ours, all sent after backward", {}),
    "torch": ("torch DDP, default 25 MiB buckets", {}),
    "torch_same": ("torch DDP, our bucket size", {}),
    "ours": ("ours", {}),
    "forward": ("ours, step in forward", {"overlap_step": "forward"}),
    "backward": ("ours, step in backward, no clipping", {"overlap_step": "backward"}),
    "zero1": ("ours, ZeRO-1", {"zero1": True}),
    "zero1_forward": ("ours, ZeRO-1, step in forward", {"zero1": True, "overlap_step": "forward"}),
    "fp16": ("ours, float16 on the wire", {"hook": ddp.Average(torch.float16)}),
    "bf16": ("ours, bfloat16 on the wire", {"hook": ddp.Average(torch.bfloat16)}),
    "powersgd": ("ours, PowerSGD rank 4", {"hook": ddp.PowerSGD(rank=4, embedding=True)}),
    "powersgd_raw": ("the same, embedding as it is", {"hook": ddp.PowerSGD(rank=4, embedding=False)}),
}
LINK = SimpleNamespace(free_at=0.0, sent=0.0)  # the virtual one: when it will be idle, bytes that it has passed


@contextmanager
def namespaces() -> Iterator[list[tuple[list[str], str]]]:
    """One network namespace per rank, two joined directly, more by a bridge: (command prefix, interface) of each."""
    spaces = [f"b{os.getpid()}r{i}" for i in range(ranks + 1)]  # the interface in a home is called like it
    homes, hub, limit = spaces[:-1], spaces[-1], f"root tbf rate {mbit}mbit burst 64kb latency 100ms"
    setup = [f"ip netns add {space}" for space in spaces]
    setup += [f"ip -n {hub} link add hub type bridge", f"ip -n {hub} link set hub up"]
    for rank, home in enumerate(homes):
        if ranks > 2:
            setup += [f"ip link add {home} netns {home} type veth peer name port{rank} netns {hub}"]
            setup += [f"ip -n {hub} link set port{rank} master hub up", f"tc -n {hub} qdisc add dev port{rank} {limit}"]
        elif rank == 0:
            setup += [f"ip link add {home} netns {home} type veth peer name {homes[1]} netns {homes[1]}"]
        setup += [f"ip -n {home} addr add 10.77.0.{rank + 1}/24 dev {home}", f"ip -n {home} link set {home} up"]
        setup += [f"ip -n {home} link set lo up", f"tc -n {home} qdisc add dev {home} {limit}"]
    try:
        for command in setup:
            subprocess.run(command.split(), check=True, capture_output=True, text=True)
        yield [(["ip", "netns", "exec", home], home) for home in homes]
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave them behind
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def carry(work: dist.Work, collective: Callable, flat: Tensor) -> torch.futures.Future:
    """A future of `flat`, complete when `work` is and the virtual link has passed what a rank sends of it."""
    n_bytes = (2 if collective is dist.all_reduce else 1) * (ranks - 1) / ranks * flat.nbytes  # of a ring
    LINK.free_at = deadline = max(time.perf_counter(), LINK.free_at) + n_bytes * 8e-6 / mbit
    LINK.sent += n_bytes

    def hold(_: torch.futures.Future) -> Tensor:  # sleeps in a thread of gloo's
        time.sleep(max(0.0, deadline - time.perf_counter()))
        return flat

    return work.get_future().then(hold)


def carry_torch(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What torch DDP does by itself, over the virtual link."""
    flat = bucket.buffer().div_(ranks)
    return carry(dist.all_reduce(flat, async_op=True), dist.all_reduce, flat)


def watch(log: list[dict]) -> None:
    """From here on note in `log` when our collectives begin and are done; send them over the virtual link, if any."""
    plain = ddp.Bucket.launch

    def launch(bucket: ddp.Bucket, collective: Callable, *args: Tensor | list[int]) -> None:
        log.append(event := {"bucket": bucket.index, "launch": time.perf_counter()})
        plain(bucket, collective, *args)
        what, work = bucket.flight
        future = carry(work, collective, args[0]) if link == "virtual" else work.get_future()
        bucket.flight = what, SimpleNamespace(wait=future.wait, is_completed=future.done)
        future.add_done_callback(lambda _: event.update(done=time.perf_counter()))  # in a thread of gloo's

    ddp.Bucket.launch = launch


# ---- cases: step(), flush() what a step has left, buckets, events [(phase begun or bucket ready, time)] -------------


class Sequential(ddp.DDP):
    """Launches no bucket before backward is over: each waits for a gradient that never comes."""

    def _start_step(self) -> None:
        super()._start_step()
        for bucket in self.buckets:
            bucket.missing += 1


def our_case(key: str, model: Transformer, tokens: Tensor) -> SimpleNamespace:
    events: list[tuple] = []

    def silent(bucket: ddp.Bucket) -> Iterator:
        events.append((bucket.index, time.perf_counter()))
        yield False
        yield ddp.sum_of_squares(bucket.grad)

    options = {"hook": silent} if key == "compute" else CASES[key][1]
    parallel = (Sequential if key == "sequential" else ddp.DDP)(model, **options)
    opt = Optimizer(parallel.buckets, "adamw", BETAS, weight_decay=DECAY)

    def exchange() -> None:
        for bucket in parallel.buckets:
            bucket.launch(dist.all_reduce, bucket.grad)  # of zeros
        for bucket in parallel.buckets:
            bucket.wait()

    def step() -> None:
        events.append(("forward", time.perf_counter()))
        parallel.expect_step(opt, LR)
        loss = model(tokens, tokens) / tokens.numel()
        events.append(("backward", time.perf_counter()))
        loss.backward()
        events.append(("step", time.perf_counter()))
        parallel.step(opt, LR, clip=0.0 if key == "backward" else 1.0)
        events.append(("end", time.perf_counter()))

    step = exchange if key == "comm" else step
    return SimpleNamespace(step=step, flush=parallel.flush, buckets=parallel.buckets, events=events)


def torch_case(key: str, model: Transformer, tokens: Tensor) -> SimpleNamespace:
    block_mb = sum(p.nbytes for p in model.layers[0].parameters()) / ddp.MIB  # our largest bucket
    cap = block_mb if key == "torch_same" else None
    wrapped = DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=True, broadcast_buffers=False)
    if link == "virtual":
        wrapped.register_comm_hook(None, carry_torch)
    params = list(model.parameters())
    rules = ((2, DECAY), (1, 0.0))  # matrices decay, vectors do not, as in optim.py
    groups = [{"params": [p for p in params if p.ndim == ndim], "weight_decay": decay} for ndim, decay in rules]
    opt = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)

    def step() -> None:
        (wrapped(tokens, tokens) / tokens.numel()).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        opt.zero_grad()

    return SimpleNamespace(step=step, flush=lambda: None, events=[])


def now() -> list[float]:
    """Time (ms), CPU time of this process (ms), MiB sent; loopback's are the whole machine's, here shared equally."""
    tx = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics/tx_bytes").read_text(encoding="ascii")
    sent = LINK.sent if link == "virtual" else int(tx) / (1 if link == "tc" else ranks)
    return [1e3 * time.perf_counter(), 1e3 * time.process_time(), sent / ddp.MIB]


def measure(built: dict[str, SimpleNamespace]) -> dict[str, dict]:
    """{case: {"ms" of the slowest rank, "cpu_ms" and "sent_mib" of the mean rank: one value per round}}, per step."""
    samples, keys = {key: [] for key in built}, list(built.items())
    for i in range(1 + rounds):
        for key, case in keys[i % len(keys) :] + keys[: i % len(keys)]:
            barrier()
            case.step()
            begin = now()
            for _ in range(steps):
                case.step()
            samples[key].append([(b - a) / steps for a, b in zip(begin, now(), strict=True)])
            case.flush()
    everyone, results = gather_objects(samples), {}
    for key in built:
        t = torch.tensor([theirs[key][1:] for theirs in everyone], dtype=torch.float64)  # (ranks, rounds, 3)
        ms, cpu_ms, sent_mib = t[..., 0].amax(0).tolist(), t[..., 1].mean(0).tolist(), t[..., 2].mean(0).tolist()
        results[key] = {"ms": ms, "median": median(ms), "cpu_ms": cpu_ms, "sent_mib": sent_mib}
    return results


def add_ideal(results: dict[str, dict], compute: SimpleNamespace) -> float:
    """T_ideal in ms; writes eta into `results`."""
    t = torch.tensor([t for _, t in compute.events], dtype=torch.float64).view(-1, 4 + len(compute.buckets))
    mine = 1e3 * (t[1 + steps :, 2:-2] - t[1 + steps :, :1]).median(0).values  # between forward, backward and step, end
    sent = [2 * (ranks - 1) / ranks * bucket.grad.nbytes for bucket in compute.buckets]
    rate = mbit * 1e3 / 8 / (FRAME if link == "tc" else 1) if mbit else sum(sent) / results["comm"]["median"]
    last = 0.0
    for n_bytes, *ready in zip(sent, *(times.tolist() for times in gather_objects(mine)), strict=True):
        last = max(last, *ready) + n_bytes / rate
    ideal, slow = max(results["compute"]["median"], last), results["sequential"]["median"]
    for key in {"sequential", "torch", "torch_same", "ours", "forward", "backward"} & results.keys():
        results[key]["eta"] = (slow - results[key]["median"]) / max(slow - ideal, 1e-9)
    return ideal


def draw(title: str, case: SimpleNamespace, log: list[dict], width: int = 80) -> tuple[dict, str]:
    """One step of this rank: times in ms; and a chart, | (of PowerSGD's factors P, Q) a launch, = on the wire."""
    for _ in range(2):  # the first leads in
        barrier()
        log.clear(), case.events.clear()
        case.step()
    time.sleep(0.05)  # for the last callbacks
    start = case.events[0][1]
    phases = {name: 1e3 * (t - start) for name, t in case.events}
    sent = [event | {key: 1e3 * (event[key] - start) for key in ("launch", "done")} for event in log]
    edges = pairwise((name, int(t / phases["end"] * width)) for name, t in phases.items())
    lines = [f"{title}: " + ", ".join(f"{name} {t:.0f}" for name, t in phases.items()) + " ms after its start"]
    lines += [" " * 18 + "".join(f"|{name}".ljust(b - a)[: b - a] for (name, a), (_, b) in edges) + "|"]
    for bucket in case.buckets:
        row, mine = [" "] * (width + 1), [event for event in sent if event["bucket"] == bucket.index]
        for event, mark in zip(mine, "PQ" if len(mine) > 1 else "|", strict=True):
            a, b = (min(width, int(event[key] / phases["end"] * width)) for key in ("launch", "done"))
            row[a : b + 1] = [mark, *"=" * (b - a)]
        lines.append(f"{bucket.blocks[0]:18}{''.join(row)}".rstrip())
    return {"phases": phases, "collectives": sent}, "\n".join(lines)


def run_rank(keys: list[str]) -> None:
    """One rank's part; rank 0 prints the results and writes them."""
    torch.set_num_threads(1), torch.manual_seed(0)
    world, load = init(timeout_s=60), os.getloadavg()[:1]
    tokens = torch.randint(MODEL.vocab_size, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(world.rank))
    model, log = Transformer(MODEL), []
    built = {key: (torch_case if "torch" in key else our_case)(key, deepcopy(model), tokens) for key in keys}
    if link == "virtual":
        watch(log)
    results = measure(built)
    load += os.getloadavg()[:1]
    ideal = add_ideal(results, built["compute"]) if {"compute", "comm", "sequential"} <= built.keys() else 0.0
    if timeline and link != "virtual":
        watch(log)
    charts = {key: draw(CASES[key][0], built[key], log) for key in ("ours", "powersgd") if timeline and key in built}
    if world.is_main:
        n_params = sum(p.numel() for p in model.parameters())
        print(f"{ranks} ranks x {tokens.numel()} tokens, {n_params:,} parameters, {rounds} rounds of {steps} steps")
        best = f", T_ideal {ideal:.0f} ms" if ideal else ""
        print(f"{link} link, {mbit or 'unlimited'} Mbit/s, load average {load[0]:.1f} to {load[1]:.1f}{best}")
        print(f"{'case':35} {'ms':>6} {'min':>6} {'/ torch':>8} {'/ same':>7} {'eta':>6} {'sent MiB':>9} {'CPU ms':>7}")
        for key, row in results.items():
            units = [results[base]["median"] if base in results else float("nan") for base in ("torch", "torch_same")]
            ms, eta = row["median"], f"{row['eta']:.2f}" if "eta" in row else ""
            times = f"{ms:6.0f} {min(row['ms']):6.0f} {ms / units[0]:8.2f} {ms / units[1]:7.2f} {eta:>6}"
            print(f"{CASES[key][0]:35} {times} {median(row['sent_mib']):9.2f} {median(row['cpu_ms']):7.0f}")
        print(*(f"\n{chart}" for _, chart in charts.values()), sep="\n")
        if out:
            report = {"link": link, "mbit": mbit, "ranks": ranks, "torch": torch.__version__, "load_average": load}
            report |= {"ideal": ideal, "cases": results, "timelines": {key: chart[0] for key, chart in charts.items()}}
            Path(out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    close()


def launch() -> int:
    """Set up the link and run all ranks over it; returns 0 or the exit status of one that failed."""
    with ExitStack() as stack:
        kind, host, places = "virtual" if mbit else "loopback", "127.0.0.1", [([], "lo")] * ranks
        if mbit and link != "virtual":
            try:
                kind, host, places = "tc", "10.77.0.1", stack.enter_context(namespaces())
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"virtual link, as namespaces fail: {error} {getattr(error, 'stderr', '')}".strip(), flush=True)
        flags = [flag for flag in sys.argv[1:] if not flag.startswith("--link=")] + [f"--link={kind}"]
        command = [sys.executable, "-W", "ignore::FutureWarning", __file__, *flags]  # 2.13 renames broadcast_buffers
        port = f"{20000 + os.getpid() % 12000}"  # below those that the kernel hands out
        env = os.environ | {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": f"{ranks}", "OMP_NUM_THREADS": "1"}
        env |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # it would warn that namespaces have no DNS
        processes = []
        for rank, (prefix, interface) in enumerate(places):
            env |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "GLOO_SOCKET_IFNAME": interface}
            processes.append(subprocess.Popen([*prefix, *command], env=env, start_new_session=True))
            stack.callback(processes[-1].kill)
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(0.2)
        return next((code for code in codes if code), 0)


if __name__ == "__main__":
    configure(globals())
    chosen = list(CASES) if cases == "all" else cases.split(",")
    if not set(chosen) <= CASES.keys() or ranks < 2 or min(rounds, steps) < 1 or mbit < 0:
        raise UserError(f"config: ranks from 2, rounds and steps from 1, mbit from 0, cases from {','.join(CASES)}")
    if "RANK" in os.environ:
        run_rank(chosen)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed
        sys.exit(launch())
