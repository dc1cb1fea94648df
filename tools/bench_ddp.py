"""Row ddp: gradient exchange on a slow network, ddp.py beside torch DDP, each case with its own copy of one model.

With mbit every rank runs in its own network namespace (removed at the end, also after an error or Ctrl-C); veth pairs
join them, and tc's token bucket limits the rate. That needs root, ip and tc; mbit=0 is loopback without a limit.
A round runs every case once: barrier, an untimed step, then the timed steps with nothing between, so that work which a
step leaves to the next is timed too. Times are the slowest rank's, per step. float32, one thread per rank, fused AdamW,
norm clipped to 1.0. torch DDP has gradient_as_bucket_view=True and broadcast_buffers=False (the model's are constant),
both in its favour.
eta = (T_sequential - T) / (T_sequential - T_ideal): the part of the possible gain that overlap has won. In T_ideal a
bucket leaves once it is ready (measured without communication) and the link is free, at the full rate of the link:
f_k = max(ready_k, f_k-1) + bytes_k / rate, T_ideal = max(T_compute, f_last). It needs the cases compute, comm and
sequential, and is given where float32 travels once.
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

import timing
import torch
import torch.distributed as dist
from timing import Line, Options
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
MODEL = ModelConfig(vocab_size=2048, block_size=LENGTH, n_layer=8, n_head=8, n_embd=256)  # 7M, ten buckets
FRAME = 1514 / 1448  # bytes of an Ethernet frame (MTU 1500) per byte of TCP payload
CASES = {  # key: (label, options of our DDP)
    "compute": ("compute only", {}),
    "comm": ("communication only", {}),
    "sequential": ("ours, sent after backward", {}),
    "torch": ("torch DDP", {}),
    "torch_same": ("torch DDP, our bucket size", {}),
    "ours": ("ours", {}),
    "forward": ("ours, step in forward", {"overlap_step": "forward"}),
    "backward": ("ours, step in backward", {"overlap_step": "backward"}),
    "zero1": ("ours, ZeRO-1", {"zero1": True}),
    "zero1_forward": ("ours, ZeRO-1, step in forward", {"zero1": True, "overlap_step": "forward"}),
    "fp16": ("ours, float16 on the wire", {"hook": ddp.Average(torch.float16)}),
    "bf16": ("ours, bfloat16 on the wire", {"hook": ddp.Average(torch.bfloat16)}),
    "powersgd": ("ours, PowerSGD rank 4", {"hook": PowerSGD(rank=4, embedding=True)}),
    "powersgd_raw": ("the same, embedding as it is", {"hook": PowerSGD(rank=4, embedding=False)}),
}
RUN = SimpleNamespace(ranks=2, mbit=0, rounds=1, steps=1, cases=[], timeline=False)  # a rank gets it as JSON


@contextmanager
def namespaces() -> Iterator[list[tuple[list[str], str]]]:
    """One network namespace per rank, two joined directly, more by a bridge: (command prefix, interface) of each."""
    spaces = [f"b{os.getpid()}r{i}" for i in range(RUN.ranks + 1)]  # the interface in a home is called like it
    homes, hub, limit = spaces[:-1], spaces[-1], f"root tbf rate {RUN.mbit}mbit burst 64kb latency 100ms"
    setup = [f"ip netns add {space}" for space in spaces]
    setup += [f"ip -n {hub} link add hub type bridge", f"ip -n {hub} link set hub up"]
    for rank, home in enumerate(homes):
        if RUN.ranks > 2:
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


def watch(log: list[dict]) -> None:
    """Append to `log` from now on when our collectives begin and end."""
    plain = ddp.Bucket.launch

    def launch(bucket: ddp.Bucket, collective: Callable, *args: Tensor | list[int]) -> None:
        log.append(event := {"bucket": bucket.index, "launch": time.perf_counter()})
        plain(bucket, collective, *args)
        what, work = bucket.flight
        future = work.get_future()
        bucket.flight = what, SimpleNamespace(wait=future.wait, is_completed=future.done)
        future.add_done_callback(lambda _: event.update(done=time.perf_counter()))  # in a thread of gloo

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
    """Return (time in ms, CPU time of this process in ms, MiB that it has sent)."""
    if RUN.mbit:  # an interface of its own
        path = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics/tx_bytes")
        sent = int(path.read_text(encoding="ascii"))
    else:  # others use the loopback too: count what this process writes, sockets included
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
        sent = int(fields["wchar"])
    return [1e3 * time.perf_counter(), 1e3 * time.process_time(), sent / 2**20]


def measure(built: dict[str, SimpleNamespace]) -> dict[str, dict]:
    """{case: {"ms" of the slowest rank, "cpu_ms" and "sent_mib" of the mean rank: one value per round}}, per step."""
    samples, keys = {key: [] for key in built}, list(built.items())
    for i in range(1 + RUN.rounds):
        for key, case in keys[i % len(keys) :] + keys[: i % len(keys)]:
            barrier()
            case.step()
            begin = now()
            for _ in range(RUN.steps):
                case.step()
            samples[key].append([(b - a) / RUN.steps for a, b in zip(begin, now(), strict=True)])
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
    mine = 1e3 * (t[1 + RUN.steps :, 2:-2] - t[1 + RUN.steps :, :1]).median(0).values  # of the buckets
    sent = [2 * (RUN.ranks - 1) / RUN.ranks * bucket.grad.nbytes for bucket in compute.buckets]
    rate = RUN.mbit * 1e3 / 8 / FRAME if RUN.mbit else sum(sent) / results["comm"]["median"]  # bytes per ms
    last = 0.0
    for n_bytes, *ready in zip(sent, *(times.tolist() for times in gather_objects(mine)), strict=True):
        last = max(last, *ready) + n_bytes / rate
    ideal, slow = max(results["compute"]["median"], last), results["sequential"]["median"]
    for key in {"sequential", "torch", "torch_same", "ours", "forward", "backward"} & results.keys():
        results[key]["eta"] = (slow - results[key]["median"]) / max(slow - ideal, 1e-9)
    return ideal


def draw(title: str, case: SimpleNamespace, log: list[dict], width: int = 80) -> str:
    """Return a chart of one step of this rank: | (of PowerSGD's factors P, Q) a launch, = on the wire."""
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
    return "\n".join(lines)


def run_rank() -> None:
    """Do one rank's part; rank 0 prints the charts and a line of JSON: {case: results}."""
    torch.set_num_threads(1), torch.manual_seed(0)
    world = init(timeout_s=60)
    tokens = torch.randint(MODEL.vocab_size, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(world.rank))
    model, log = Transformer(MODEL), []
    built = {key: (torch_case if "torch" in key else our_case)(key, deepcopy(model), tokens) for key in RUN.cases}
    results = measure(built)
    if {"compute", "comm", "sequential"} <= built.keys():
        add_ideal(results, built["compute"])
    charts = []
    if RUN.timeline:
        watch(log)
        charts = [draw(CASES[key][0], built[key], log) for key in ("ours", "powersgd") if key in built]
    if world.is_main:
        print(*charts, json.dumps(results), sep="\n")
    close()


def launch() -> dict[str, dict]:
    """Set up the link and run all ranks over it; print their charts, return their results."""
    with ExitStack() as stack:
        host, places = "127.0.0.1", [([], "lo")] * RUN.ranks
        if RUN.mbit:
            try:
                host, places = "10.77.0.1", stack.enter_context(namespaces())
            except (OSError, subprocess.CalledProcessError) as error:
                said = f"{error} {getattr(error, 'stderr', '')}".strip()
                raise UserError(f"bench: mbit={RUN.mbit} needs root, ip and tc; or use mbit=0: {said}") from None
        command = [sys.executable, "-W", "ignore::FutureWarning", __file__, json.dumps(vars(RUN))]
        port = f"{20000 + os.getpid() % 12000}"  # below those that the kernel hands out
        env = os.environ | {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": f"{RUN.ranks}"}
        env |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # it would warn that namespaces have no DNS
        processes = []
        for rank, (prefix, interface) in enumerate(places):
            env |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "GLOO_SOCKET_IFNAME": interface}
            pipe = subprocess.DEVNULL if rank else subprocess.PIPE
            processes.append(subprocess.Popen([*prefix, *command], env=env, stdout=pipe, start_new_session=True))
            stack.callback(processes[-1].kill)
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(0.2)
        if any(codes):
            raise UserError(f"bench: a rank of bench_ddp.py ended with status {next(filter(None, codes))}")
        *charts, results = processes[0].stdout.read().decode().splitlines()
        print(*charts, sep="\n", end="\n" * bool(charts))
        return json.loads(results)


def ddp_row(options: Options) -> Iterator[Line]:
    """Steps/s of each case beside torch DDP; the limit is the step without communication."""
    keys = options.keys
    cases = list(CASES) if keys["cases"] == "all" else list(dict.fromkeys(["compute", *keys["cases"].split(",")]))
    vars(RUN).update({key: keys[key] for key in ("ranks", "mbit", "timeline")})
    vars(RUN).update(cases=cases, rounds=options.repeats, steps=1 if options.quick else 3)
    results = launch()
    seconds = {CASES[key][0]: [ms / 1e3 for ms in found["ms"]] for key, found in results.items()}
    notes = {}
    for key, found in results.items():
        notes[CASES[key][0]] = f"{median(found['sent_mib']):.2f} MiB sent, {median(found['cpu_ms']):.0f} ms CPU"
        notes[CASES[key][0]] += f", eta {found['eta']:.2f}" if "eta" in found else ""
    peers = [CASES[key][0] for key in ("torch", "torch_same")]
    limit = 1e3 / results["compute"]["median"]
    case = f"7M, {RUN.ranks} x {SEQUENCES} x {LENGTH}" + f", {RUN.mbit} Mbit/s" * bool(RUN.mbit)
    yield from timing.lines("ddp", case, seconds, "step/s", peers, 1, limit, notes)


if __name__ == "__main__":
    vars(RUN).update(json.loads(sys.argv[1]))
    run_rank()
