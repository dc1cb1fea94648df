"""rl.py as users run it.

The gradient by hand, rewards that rise, the same on any ranks, exact resume, mistakes.
"""

import json
import math
import runpy
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import test_pretrain as tp
import torch
from jobs import read_calls, run_on_ranks
from safetensors.torch import load_file
from saved import load_train_state

from groundup.align import policy_gradient as pg
from groundup.align import reward_model, rollouts
from groundup.align.reward_model import RewardModel
from groundup.align.rewards import Rollout
from groundup.align.rollouts import AnswerSampler
from groundup.demo import debug_data
from groundup.errors import UserError
from groundup.generate import sampling
from groundup.generate import tools as tool_module
from groundup.tokens.prompts import PromptCorpus
from groundup.tokens.training import train
from groundup.train import huggingface
from groundup.train.lora import LoRAConfig, set_trainable
from model import ModelConfig, Transformer
from tokenizer import Tokenizer, chat_ready

ROOT = Path(__file__).parent.parent
FLAGS = [
    "--device=cpu",
    "--dtype=float32",
    "--compile=False",
    "--log_every=1",
    "--block_size=96",
    "--batch_size=4",
]
FLAGS += ["--max_new_tokens=12", "--prompts_per_step=4", "--group_size=4", "--learning_rate=1e-3"]
FLAGS += [
    "--value_learning_rate=1e-3",
    "--warmup_steps=0",
    "--val_fraction=0.2",
    "--eval_prompts=2",
]
FEW = ["--prompts_per_step=2", "--group_size=2", "--eval_prompts=0"]  # where figures do not matter
RULES = '''
def brief(prompt, answer, row):
    """Better the shorter it is; what the right length is differs by question."""
    return -abs(len(answer) - row["number"]) / 20

def even(prompt, answer, row):
    return float(len(answer) % 2)

def same(prompt, answer, row):
    return 0.5

def fails(prompt, answer, row):
    return 1 / (row["number"] - row["number"])

def nan(prompt, answer, row):
    return float("nan")
'''


DOUBLE = '''
def double(n: int) -> int:
    """Double.

    Args:
        n: a number
    """
    return 2 * n
'''


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A small model of random weights that ends its answers, its tokenizer, a reward model of
    random weights, prompts and rules.
    """
    folder = tmp_path_factory.mktemp("base")
    debug_data.make_debug_data(folder / "data")
    tokenizer = chat_ready(Tokenizer.load(folder / "data"))
    torch.manual_seed(0)
    cfg = ModelConfig(
        tokenizer.vocab_size, block_size=96, n_layer=2, n_head=4, n_kv_head=2, n_embd=32
    )
    model, judge = Transformer(cfg), RewardModel(cfg)
    with torch.no_grad():
        for p in (*model.parameters(), *judge.parameters()):
            p.mul_(4)
        model.embed_tokens.weight[tokenizer.im_end_id] *= 2
        judge.score.weight.normal_()
    for name in ("model", "judge"):
        (folder / name).mkdir()
    huggingface.write_model(folder / "model", model, tokenizer)
    reward_model.write_model(folder / "judge", judge, tokenizer)
    (folder / "teacher").mkdir()
    torch.manual_seed(1)
    huggingface.write_model(folder / "teacher", Transformer(cfg), tokenizer)
    rows = [{"prompt": f"第{i}个问题: what is {i} plus {i}?", "number": i % 7} for i in range(40)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "rules.py").write_text(RULES, encoding="utf-8")
    (folder / "double.py").write_text(DOUBLE, encoding="utf-8")
    return folder


def flags_of(base: Path, out: Path, *flags: str) -> list[str]:
    """A flag --reward=NAME is the rule of that name."""
    common = [
        f"--init_from={base / 'model'}",
        f"--data={base / 'prompts.jsonl'}",
        f"--out_dir={out}",
        *FLAGS,
    ]
    common += [f"--reward={base}/rules.py:brief"]
    rules = {
        f"--reward={name}": f"--reward={base}/rules.py:{name}"
        for name in ("even", "same", "fails", "nan")
    } | {"--tools=double": f"--tools={base}/double.py"}
    return tp.flags_with_defaults(tuple(rules.get(flag, flag) for flag in flags), common)


@pytest.fixture
def run(base, tmp_path, monkeypatch):
    """run(*flags) -> exit status of rl.py in this process.

    Out_dir is tmp_path/out unless a flag says other.
    """
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(*flags: str) -> int:
        monkeypatch.setattr(sys, "argv", ["rl.py", *flags_of(base, tmp_path / "out", *flags)])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(ROOT / "rl.py"), run_name="__main__")
        return caught.value.code or 0

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def column(out: Path, event: str, key: str) -> list:
    return [one[key] for one in tp.events(out, event)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_learns_as_a_cpu_does(run, tmp_path, monkeypatch):
    """In float32, with the CPU's random numbers on both: a GPU's generators draw others.

    Logits that differ in the last bit may still change a token.
    """
    choose = sampling.choose

    class GeneratorOnCPU(torch.Generator):
        def __new__(cls, device="cpu"):
            return super().__new__(cls, "cpu")

    def choose_on_cpu(logits, rows, generators):
        on_cpu = sampling.RowParams(rows.params, logits.shape[-1])
        return choose(logits.cpu(), on_cpu, generators).to(logits.device)

    monkeypatch.setattr(sampling, "choose", choose_on_cpu)
    monkeypatch.setattr(torch, "Generator", GeneratorOnCPU)
    for device in ("cpu", "cuda"):
        assert run("--max_steps=2", f"--device={device}", f"--out_dir={tmp_path / device}") == 0
    for key in ("reward", "length"):
        want = column(tmp_path / "cpu", "train", key)
        assert len(want) == 2 and column(tmp_path / "cuda", "train", key) == pytest.approx(
            want, rel=0.05
        )


def first_answers(base: Path, n_prompts: int = 4, group_size: int = 4) -> list[Rollout]:
    """What a run with FLAGS draws in step 1."""
    tokenizer = Tokenizer.load(base / "model")
    corpus = PromptCorpus(str(base / "prompts.jsonl"), tokenizer, 96 - 12, 1337, val_fraction=0.2)
    prompts = corpus.take(corpus.redrawn_order(n_prompts), np.arange(n_prompts))
    seeds = [rollouts.seed_of(1337, 1, 0, slot) for slot in range(n_prompts)]
    model = huggingface.load_model(base / "model")
    sampler = AnswerSampler(model, tokenizer, 16, 12, 1.0, torch.float32, compile=False)
    return sampler.draw(prompts, seeds, group_size)


def reward_of(one: Rollout) -> float:
    """The rule `brief`, with the penalty of an unfinished answer."""
    return -abs(len(one.text) - one.prompt.row["number"]) / 20 if one.finished else -1.0


def n_drawn(event: dict) -> float:
    """Tokens that were drawn in a step, from the figures of its log line."""
    return event["draw_tokens_per_s"] * event["draw_ms"] / 1000


def n_positions(drawn: list[Rollout]) -> int:
    """Of prompts with their answers, without padding, each but for its last token."""
    return sum(len(one.prompt.ids) + len(one.ids) - 1 for one in drawn)


def text_logps(model: Transformer, one: Rollout) -> torch.Tensor:
    ids = torch.tensor([one.prompt.ids + one.ids])
    return model(ids[:, :-1])[0].log_softmax(-1).gather(1, ids[0, 1:, None])[-len(one.ids) :, 0]


# ---- one step ------------------------------------------------------------------------------------


def test_first_step_of_grpo_by_hand(run, base, tmp_path):
    """Rewards, advantages, loss and gradient of the answers, each text alone.

    REINFORCE with the group's mean.
    """
    assert run("--max_steps=1", "--kl_coef=0") == 0
    drawn, model = first_answers(base), huggingface.load_model(base / "model")
    rewards = torch.tensor([reward_of(one) for one in drawn]).view(4, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().tolist()
    n_tokens = sum(len(one.ids) for one in drawn)
    loss = (
        -sum(a * text_logps(model, one).sum() for a, one in zip(advantages, drawn, strict=True))
        / n_tokens
    )
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()
    (found,) = tp.events(tmp_path / "out", "train")
    assert found["grad_norm"] == pytest.approx(norm, rel=1e-4) and norm > 1e-3
    means = (
        -sum(a * len(one.ids) for a, one in zip(advantages, drawn, strict=True)) / n_tokens
    )  # every ratio is 1
    assert found["loss"] == pytest.approx(means, abs=1e-6)
    assert found["reward"] == pytest.approx(rewards.mean().item(), rel=1e-5)
    assert found["reward_std"] == pytest.approx(rewards.std().item(), rel=1e-5)
    assert (
        found["length"] == n_tokens / 16
        and found["finished"] == sum(one.finished for one in drawn) / 16
    )
    assert found["ratio_max"] == 1 and found["clipped"] == 0
    assert n_drawn(found) == pytest.approx(n_tokens)
    assert found["tokens_per_s"] * found["step_ms"] / 1000 == pytest.approx(n_positions(drawn))


def test_first_step_of_ppo_by_hand(run, base, tmp_path):
    """A critic that says 0 and a policy that has not moved: the advantage of every token is
    0.95^(tokens to the end) times the answer's reward, whitened over all tokens; the value's loss is
    half the square of it. The critic's head reads the body's result, normed once, at the place from
    which the token was drawn.
    """
    assert (
        run(
            "--algorithm=ppo",
            "--group_size=1",
            "--prompts_per_step=8",
            "--max_steps=1",
        )
        == 0
    )
    drawn, model = first_answers(base, 8, 1), huggingface.load_model(base / "model")
    returns = [
        reward_of(one) * 0.95 ** torch.arange(len(one.ids) - 1, -1, -1).double() for one in drawn
    ]
    flat = torch.cat(returns)
    loss, of_head = 0, 0
    for one, mine in zip(drawn, returns, strict=True):
        ids = torch.tensor([one.prompt.ids + one.ids])
        of_head = of_head - (mine[:, None] * model.hidden(ids[:, :-1])[0, -len(mine) :]).sum(
            0
        ).detach() / len(flat)
        advantages = (mine - flat.mean()) / flat.std()
        loss = loss - (advantages * text_logps(model, one)).sum() / len(flat)
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()
    (found,) = tp.events(tmp_path / "out", "train")
    assert found["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert found["value_loss"] == pytest.approx(0.5 * flat.square().mean().item(), rel=1e-5)
    assert found["value_norm"] == pytest.approx(of_head.norm().item(), rel=1e-4)
    assert found["explained"] == pytest.approx(0, abs=1e-6)
    assert "flat_groups" not in found  # of one answer each


@pytest.mark.parametrize(
    "flags", [["--temperature=0.8"], ["--algorithm=ppo"], ["--trainable=lora"]]
)
def test_nothing_moves_without_a_learning_rate(run, tmp_path, flags):
    """Old log-probabilities are those of the training forward: in every update of every epoch the
    ratio is 1, and so is that to the reference.
    """
    rates = [
        "--learning_rate=0",
        "--value_learning_rate=0",
        "--epochs_per_step=2",
        "--minibatches=2",
    ]
    assert run(*flags, *rates, "--max_steps=2") == 0
    assert column(tmp_path / "out", "train", "ratio_max") == pytest.approx([1, 1], abs=1e-5)
    assert column(tmp_path / "out", "train", "kl") == pytest.approx([0, 0], abs=1e-6)


def test_equal_rewards_teach_nothing(run, tmp_path):
    assert run("--reward=same", "--unfinished=mask", "--max_steps=2", "--kl_coef=0") == 0
    assert column(tmp_path / "out", "train", "flat_groups") == [1, 1]
    assert column(tmp_path / "out", "train", "grad_norm") == [0, 0]
    assert column(tmp_path / "out", "eval", "reward") == pytest.approx([0.5, 0.5])


@pytest.mark.slow
def test_groups_of_equal_rewards_are_drawn_anew(run, tmp_path):
    common = [
        "--reward=even",
        "--group_size=2",
        "--prompts_per_step=16",
        "--max_steps=1",
        "--kl_coef=0",
    ]
    for times in (0, 1, 4):
        assert run(*common, f"--filter_groups={times}", f"--out_dir={tmp_path / str(times)}") == 0
    found = {times: tp.events(tmp_path / str(times), "train")[0] for times in (0, 1, 4)}
    assert found[0]["redrawn"] == 0 and found[1]["redrawn"] == 16 * found[0]["flat_groups"] > 4
    assert found[4]["flat_groups"] < found[1]["flat_groups"] < found[0]["flat_groups"]


@pytest.mark.slow
def test_unfinished_answers_by_rule(run, base, tmp_path):
    """masked: the gradient is that of the finished ones among themselves, by hand."""
    assert run("--unfinished=mask", "--max_steps=1", "--kl_coef=0") == 0
    drawn, model = first_answers(base), huggingface.load_model(base / "model")
    loss, n_tokens, rewards = 0, 0, []
    for k in range(0, 16, 4):
        group = [one for one in drawn[k : k + 4] if one.finished]
        mean = sum(map(reward_of, group)) / max(1, len(group))
        loss = loss - sum((reward_of(one) - mean) * text_logps(model, one).sum() for one in group)
        n_tokens, rewards = (
            n_tokens + sum(len(one.ids) for one in group),
            rewards + list(map(reward_of, group)),
        )
    (loss / n_tokens).backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()
    (found,) = tp.events(tmp_path / "out", "train")
    assert 0 < len(rewards) < 16 and found["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert found["reward"] == pytest.approx(sum(rewards) / len(rewards), rel=1e-5)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_steps_without_a_finished_answer_change_nothing(
    run, base, tmp_path, monkeypatch, algorithm
):
    plain, rows = AnswerSampler.draw, set()

    def draw(sampler, *args, **others):
        rows.add(sampler.n_rows)
        drawn = plain(sampler, *args, **others)
        return [answer._replace(finished=False) for answer in drawn]

    monkeypatch.setattr(AnswerSampler, "draw", draw)
    flags = ["--unfinished=mask", "--max_steps=2", "--eval_prompts=0"]
    assert run(f"--algorithm={algorithm}", *flags) == 0
    out = tmp_path / "out"
    assert column(out, "train", "grad_norm") == [0, 0]
    assert column(out, "train", "reward") == column(out, "eval", "reward") == [None, None]
    assert algorithm == "grpo" or column(out, "train", "explained") == [None, None]
    before, after = (
        load_file(folder / "model.safetensors") for folder in (base / "model", out / "latest")
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert rows == {16}  # an evaluation holds no more answers in memory than a step


def test_updates_of_the_critic_without_a_finite_gradient_are_counted(run, tmp_path, monkeypatch):
    plain = pg.value_losses
    monkeypatch.setattr(pg, "value_losses", lambda *args: plain(*args) * math.inf)
    with pytest.raises(UserError, match="20 updates in a row .* value_learning_rate"):
        run("--algorithm=ppo", "--minibatches=4", "--max_steps=9", "--save_every=1", *FEW)
    assert column(tmp_path / "out", "train", "value_skipped") == [4, 8, 12, 16, 20]
    assert column(tmp_path / "out", "train", "skipped") == [0, 0, 0, 0, 0]
    saved, _ = load_train_state(tmp_path / "out" / "latest", 0)
    assert (saved["step"], saved["critic"]["skipped"]) == (4, [16, 16])


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--scale_rewards=group", "--loss=grpo", "--temperature=0.9", "--learning_rate=1e-2"],
        ["--algorithm=ppo", "--trainable=lora", "--minibatches=2", "--learning_rate=2e-2"],
    ],
    ids=["grpo", "ppo-lora"],
)
def test_rewards_rise(run, tmp_path, flags):
    common = ["--max_steps=10", "--prompts_per_step=8", "--batch_size=32", "--kl_coef=0.001"]
    assert run(*common, *flags, "--eval_prompts=0", "--eval_every=10") == 0
    before, after = column(tmp_path / "out", "eval", "reward")
    assert after > before + 0.2
    rewards = column(tmp_path / "out", "train", "reward")
    assert sum(rewards[-4:]) / 4 > rewards[0] + 0.2
    kls = column(tmp_path / "out", "train", "kl_answer")
    assert abs(kls[0]) < 0.5 < kls[-1] and all(map(math.isfinite, kls))


@pytest.mark.slow
def test_the_kl_coefficient_holds_the_policy_near_the_reference(run, tmp_path):
    common = ["--max_steps=7", "--prompts_per_step=8", "--eval_every=7", "--eval_prompts=1"]
    for coef in (1e-6, 1.0):
        assert run(*common, f"--kl_coef={coef}", f"--out_dir={tmp_path / str(coef)}") == 0
    free, held = (column(tmp_path / name, "train", "kl_answer")[-1] for name in ("1e-06", "1.0"))
    assert 0 < held < free / 2


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--minibatches=2"], ["--algorithm=ppo", "--epochs_per_step=2"]])
def test_any_micro_batches_give_the_same_steps(run, tmp_path, flags):
    for rows in (16, 3):
        out = f"--out_dir={tmp_path / str(rows)}"
        assert run(*flags, "--max_steps=1", f"--batch_size={rows}", out) == 0
    for key in ("loss", "grad_norm", "reward", "kl", "entropy", "length"):
        one = column(tmp_path / "16", "train", key)
        other = column(tmp_path / "3", "train", key)
        assert other == pytest.approx(one, rel=1e-3, abs=1e-5), key


@pytest.mark.slow
def test_both_kinds_of_reference_give_the_same_run(run, tmp_path):
    """With 'lora' it is the model without its adapters, with any other text a second model."""
    for kind in ("lora", "lora,"):
        flags = [f"--trainable={kind}", f"--out_dir={tmp_path / kind}", "--learning_rate=1e-2"]
        assert run(*flags, "--max_steps=2", "--kl_coef=0.1", *FEW) == 0
    one, other = (column(tmp_path / kind, "train", "kl") for kind in ("lora", "lora,"))
    assert abs(one[-1]) > 1e-4 and other == pytest.approx(one, rel=1e-3, abs=1e-6)


def test_a_reward_model_and_a_rule_add_up(run, base, tmp_path):
    """The log has each part; their weighted sum is the reward of the finished answers."""
    spec = f"{base / 'judge'}=0.5,{base}/rules.py:even=2"
    assert run(f"--reward={spec}", "--unfinished=mask", "--max_steps=1", "--eval_prompts=0") == 0
    for event in ("train", "eval"):
        found = tp.events(tmp_path / "out", event)[0]
        total = 0.5 * found["reward/judge"] + 2 * found["reward/even"]
        assert found["reward"] == pytest.approx(total, rel=1e-5)
    tokenizer = Tokenizer.load(base / "model")
    judge = reward_model.load(base / "judge")
    rows = [
        one.prompt.ids + one.ids[:-1] + [tokenizer.im_end_id]
        for one in first_answers(base)
        if one.finished
    ]
    scores = reward_model.score_ids(judge, rows)
    (found,) = tp.events(tmp_path / "out", "train")
    assert found["reward/judge"] == pytest.approx(sum(scores) / len(scores), rel=1e-4)


def test_a_critic_may_begin_as_the_reward_model(run, base, tmp_path):
    """Its first values are the scores of beginnings, so the first value loss is another than that
    of zeros.
    """
    flags = ["--algorithm=ppo", "--max_steps=1"]
    assert run(*flags, f"--critic_from={base / 'judge'}") == 0
    assert run(*flags, f"--out_dir={tmp_path / 'zeros'}") == 0
    found, zeros = (column(tmp_path / name, "train", "value_loss")[0] for name in ("out", "zeros"))
    assert found > 2 * zeros > 0


@pytest.mark.slow
def test_half_precision_trains(run, tmp_path):
    for kind in ("bfloat16", "float16"):
        flags = [
            f"--dtype={kind}",
            "--max_steps=1",
            "--eval_prompts=1",
            "--algorithm=ppo",
            "--prompts_per_step=2",
            f"--out_dir={tmp_path / kind}",
        ]
        assert run(*flags, "--epochs_per_step=2") == 0
        assert all(map(math.isfinite, column(tmp_path / kind, "train", "loss")))


# ---- resume --------------------------------------------------------------------------------------


def assert_same_run(a: Path, b: Path) -> None:
    for key in ("loss", "grad_norm", "lr", "reward", "kl_answer", "value_loss"):
        assert column(a, "train", key) == column(b, "train", key), key
    for key in ("val_loss", "length"):
        assert column(a, "eval", key) == column(b, "eval", key), key
    name = (
        "adapter_model.safetensors"
        if (a / "latest" / "adapter_model.safetensors").exists()
        else "model.safetensors"
    )
    weights, others = (load_file(out / "latest" / name) for out in (a, b))
    assert all(torch.equal(weights[name], others[name]) for name in weights.keys() | others.keys())
    mine, theirs = (load_train_state(out / "latest", 0)[0] for out in (a, b))
    for one, other in ((mine, theirs), (mine.get("critic", {}), theirs.get("critic", {}))):
        for name, state in one.get("optimizer", {}).items():
            assert all(torch.equal(state[key], other["optimizer"][name][key]) for key in state), (
                name
            )
        for name, weight in one.get("weights", {}).items():
            assert torch.equal(weight, other["weights"][name]), name
    assert mine["reward_sums"] == theirs["reward_sums"]


@pytest.mark.slow
def test_a_run_continues_to_the_bit(run, tmp_path):
    """From the checkpoint of step 2, which is all that is left of a run."""
    common = ["--filter_groups=1", "--reward=even", "--max_steps=4", "--save_every=2"]
    common += ["--eval_every=3", "--keep_last=0"]
    assert run(*common, f"--out_dir={tmp_path / 'straight'}") == 0
    leave_step_2(tmp_path / "straight", tmp_path / "left")
    assert run(*common, f"--out_dir={tmp_path / 'left'}", "--resume=must") == 0
    assert_same_run(tmp_path / "straight", tmp_path / "left")


def leave_step_2(run: Path, copy: Path) -> None:
    """Copy a run of four steps without what came after step 2."""
    later = shutil.ignore_patterns("step_000004", "*est*")
    shutil.copytree(run, copy, symlinks=True, ignore=later)


def test_a_resume_of_something_else_is_refused(run, base, tmp_path):
    flags = ["--trainable=lora", "--max_steps=1"]
    assert run(*flags) == 0
    others = [
        "--lora_rank=4",
        "--trainable=all",
        "--prompts_per_step=8",
        "--algorithm=ppo",
        "--reward=even",
    ]
    for flag in [*others, "--max_new_tokens=10", "--seed=1"]:
        with pytest.raises(Exception, match=flag.partition("=")[0].lstrip("-")) as caught:
            run("--max_steps=3", *tp.flags_with_defaults((flag,), ["--trainable=lora"]))
        assert isinstance(caught.value, UserError)


# ---- ranks ---------------------------------------------------------------------------------------

ROOM_FOR_TOOLS = ["--block_size=640", "--max_new_tokens=40"]
STEPS = ["--max_steps=2", "--save_every=2", "--eval_every=2"]
RANK_CASES = {
    "grpo": ["--minibatches=2", "--epochs_per_step=2", "--scale_rewards=group"],
    "dr_grpo zero1": [
        "--grad_clip=0",
        "--loss=dr_grpo",
        "--eval_prompts=1",
        "--zero1=True",
        "--normalise_rewards=True",
    ],
    "mask filter": ["--unfinished=mask", "--filter_groups=1", "--reward=even", "--loss=grpo"],
    "ppo": ["--algorithm=ppo", "--epochs_per_step=2", "--minibatches=2"],
    "tools": ["--tools=double", *ROOM_FOR_TOOLS, "--prompts_per_step=2"],
    "ppo lora zero1": ["--algorithm=ppo", "--group_size=2", "--trainable=lora", "--zero1=True"],
}
RANK_CASES["ppo"] += ["--normalise_rewards=True", "--max_steps=4"]


@pytest.fixture(scope="session")
def two_ranks(base, tmp_path_factory) -> Path:
    """All cases on 2 ranks in one start, and "left": that of ppo, continued from step 2."""
    folder = tmp_path_factory.mktemp("ranks")

    def job(name: str, case: str) -> tuple[list[str], bool]:
        return flags_of(base, folder / name, *tp.flags_with_defaults(RANK_CASES[case], STEPS)), False

    run_on_ranks(2, "rl.py", [job(name, name) for name in RANK_CASES], folder)
    leave_step_2(folder / "ppo", folder / "left")
    run_on_ranks(2, "rl.py", [job("left", "ppo")], folder)
    return folder


@pytest.mark.dist
@pytest.mark.parametrize("name", [name for name in RANK_CASES if name != "ppo"])
def test_two_ranks_equal_one(two_ranks, run, tmp_path, name, monkeypatch):
    """Answers, rewards, updates."""
    for module in (tool_module, rollouts):
        monkeypatch.setattr(module, "read_calls", read_calls)
    flags = [flag for flag in RANK_CASES[name] if not flag.startswith("--zero1")]
    assert run(*tp.flags_with_defaults(tuple(flags), STEPS)) == 0
    keys = ["loss", "grad_norm", "reward", "length", "kl", "entropy", "flat_groups", "redrawn"]
    keys += ["turns", "calls", "without_call"] * (name == "tools")
    keys += ["value_loss", "clipped", "ratio_max"] + ["value_norm", "explained"] * name.startswith(
        "ppo"
    )
    for key in keys:
        mine, theirs = (column(out, "train", key) for out in (tmp_path / "out", two_ranks / name))
        assert theirs == pytest.approx(mine, rel=2e-3, abs=1e-5), key
    mine, theirs = (column(out, "eval", "val_loss") for out in (tmp_path / "out", two_ranks / name))
    assert theirs == pytest.approx(mine, rel=1e-4)
    mine, theirs = (
        list(map(n_drawn, tp.events(out, "train"))) for out in (tmp_path / "out", two_ranks / name)
    )
    assert theirs == pytest.approx(mine)


@pytest.mark.dist
def test_throughput_is_that_of_all_ranks(two_ranks, base):
    drawn = first_answers(base)
    found = tp.events(two_ranks / "dr_grpo zero1", "train")[0]
    assert found["tokens_per_s"] * found["step_ms"] / 1000 == pytest.approx(n_positions(drawn))


@pytest.mark.dist
def test_two_ranks_resume_to_the_bit(two_ranks):
    assert_same_run(two_ranks / "ppo", two_ranks / "left")


@pytest.mark.dist
def test_one_rank_continues_what_two_began(two_ranks, run, tmp_path):
    leave_step_2(two_ranks / "ppo", tmp_path / "out")
    assert run(*tp.flags_with_defaults(RANK_CASES["ppo"], STEPS), "--resume=must") == 0
    keys = ["loss", "grad_norm", "reward", "length", "kl", "kl_answer", "entropy", "clipped"]
    for key in [*keys, "ratio_max", "value_loss", "value_norm", "explained"]:
        mine, theirs = (column(out, "train", key) for out in (tmp_path / "out", two_ranks / "ppo"))
        assert len(mine) == 4 and mine[-2:] == pytest.approx(theirs[-2:], rel=2e-3, abs=1e-5), key
    mine, theirs = (column(out, "eval", "val_loss") for out in (tmp_path / "out", two_ranks / "ppo"))
    assert mine == pytest.approx(theirs, rel=1e-4)


# ---- a teacher -----------------------------------------------------------------------------------

TAUGHT = ["--reward=", "--unfinished_reward=0", "--kl_coef=1", "--learning_rate=1e-2"]


def test_a_student_comes_close_to_its_teacher_without_a_reward(run, base, tmp_path):
    """With a teacher of even probabilities the divergence is log(V) minus the entropy."""
    flags = [*TAUGHT, f"--teacher={base / 'teacher'}", "--max_steps=6", "--eval_every=6"]
    flags += ["--schedule=constant"]
    assert run(*flags) == 0
    first, last = column(tmp_path / "out", "eval", "kl_teacher")
    assert 0 < last < 0.9 * first
    assert column(tmp_path / "out", "eval", "val_loss") == pytest.approx([first, last])
    assert not any(column(tmp_path / "out", "train", "reward"))


def test_a_teacher_that_is_the_student_teaches_nothing(run, base, tmp_path):
    assert run(*TAUGHT, f"--teacher={base / 'model'}", "--max_steps=2") == 0
    assert column(tmp_path / "out", "train", "kl")[0] == pytest.approx(0, abs=1e-5)
    assert column(tmp_path / "out", "train", "grad_norm")[0] == pytest.approx(0, abs=1e-4)


# ---- tools ---------------------------------------------------------------------------------------


def test_a_run_with_tools_goes_on_to_the_bit(run, base, tmp_path, monkeypatch):
    """Half of what the random model writes is taken for a call."""
    for module in (tool_module, rollouts):
        monkeypatch.setattr(module, "read_calls", read_calls)
    (tmp_path / "own.py").write_text(DOUBLE)
    flags = ["--algorithm=ppo", "--trainable=lora", "--minibatches=2", *ROOM_FOR_TOOLS]
    flags += [f"--tools={tmp_path / 'own.py'}"]
    flags += ["--save_every=1", "--max_steps=2", "--group_size=2", "--prompts_per_step=2"]
    assert run(*flags) == 0
    out = tmp_path / "out"
    assert any(column(out, "train", "calls")) and max(column(out, "train", "turns")) > 1
    assert min(column(out, "train", "turns")) >= 1
    straight = shutil.copytree(out, tmp_path / "straight", symlinks=True)
    shutil.rmtree(out / "step_000002")
    assert run(*flags) == 0
    assert_same_run(straight, out)
    assert column(out, "train", "calls") == column(straight, "train", "calls")

    (tmp_path / "own.py").write_text((tmp_path / "own.py").read_text() + "\n")
    with pytest.raises(UserError, match="tools"):
        run(*flags, "--max_steps=5")


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--init_from=nowhere"], "init_from='nowhere'"),
        (["--data=nowhere.jsonl"], "nowhere.jsonl"),
        (["--algorithm=dpo"], "algorithm must be one of"),
        (["--loss=sum"], "loss must be one of"),
        (["--group_size=1"], "group_size must be at least 2"),
        (["--temperature=0"], "temperature must be from 0.01 to 100"),
        (["--minibatches=3"], "minibatches=3 must divide"),
        (["--tools=nowhere.py"], "no such Python file"),
        (["--reward="], "reward='' is for a run with a teacher"),
        (["--reward=", "--teacher=out/sft"], "give unfinished_reward=0"),
        (["--teacher=out/sft", "--kl_coef=0"], "kl_coef is the weight of the teacher"),
        (["--teacher=nowhere"], "nowhere"),
        (["--unfinished_reward=1e999"], "unfinished_reward must be from -1e9 to 1e9"),
        (["--algorithm=ppo", "--filter_groups=1"], "filter_groups"),
        (["--critic_from=out/reward"], "critic_from"),
        (["--max_new_tokens=96"], "leaves no room"),
        (["--max_new_tokens=90"], "no room for an answer"),
        (["--epochs=0"], "too few to learn from"),
        (["--reward=nowhere"], "nowhere"),
        (["--trainable=lora,nonsense"], "nonsense"),
        (["--val_fraction=0"], "held out"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(run, tmp_path, flags, says):
    with pytest.raises(Exception) as caught:
        run(*flags)
    assert (
        isinstance(caught.value, UserError)
        and says in str(caught.value)
        and "\n" not in str(caught.value)
    )
    assert not (tmp_path / "out").exists()


def test_a_run_does_not_go_on_with_another_reference(run, base, tmp_path):
    """The KL divergence would be measured to other weights from there on."""
    start = shutil.copytree(base / "model", tmp_path / "start")
    assert run(f"--init_from={start}", "--max_steps=2") == 0
    model = huggingface.load_model(start)
    torch.nn.init.normal_(model.norm.weight)
    huggingface.write_model(start, model, Tokenizer.load(start))
    with pytest.raises(Exception, match="reference_weights=") as caught:
        run(f"--init_from={start}", "--max_steps=4")
    assert isinstance(caught.value, UserError)


def test_a_reward_that_is_no_function_says_how_to_name_one(run, base):
    cases = {
        "rules.py": "rules.py has no function ''",
        "no.py": "there is no file",
        "rules.py:no": "'no'",
    }
    for name, says in cases.items():
        with pytest.raises(Exception, match="give file.py:function") as caught:
            run(f"--reward={base / name}", "--max_steps=1")
        assert isinstance(caught.value, UserError) and says in str(caught.value)


def test_means_leave_out_steps_without_a_value():
    steps = [
        {"reward": value, "none": math.nan, "ratio_max": 1, "draw_s": 1, "drawn": 1}
        for value in (1, math.nan, 3)
    ]
    means = rollouts.mean_figures(steps)
    assert means["reward"] == 2 and math.isnan(means["none"]) and means["draw_ms"] == 1000


@pytest.mark.parametrize("rule, says", [("fails", "ZeroDivisionError"), ("nan", "nan")])
def test_a_reward_that_fails_is_named_with_its_prompt(run, base, rule, says):
    with pytest.raises(Exception, match=f"rules.py:{rule}") as caught:
        run(f"--reward={rule}", "--max_steps=1")
    text = str(caught.value)
    assert (
        isinstance(caught.value, UserError)
        and says in text
        and "prompts.jsonl:" in text
        and "个问题" in text
    )


def test_a_reward_model_or_critic_of_another_tokenizer_is_refused(run, base, tmp_path):
    (tmp_path / "judge").mkdir()
    reward_model.write_model(
        tmp_path / "judge", reward_model.load(base / "judge"), train(["another text"], 300)
    )
    for flags in (
        [f"--reward={tmp_path / 'judge'}"],
        ["--algorithm=ppo", f"--critic_from={tmp_path / 'judge'}"],
    ):
        with pytest.raises(Exception, match="another tokenizer") as caught:
            run(*flags)
        assert isinstance(caught.value, UserError)


@pytest.mark.slow
def test_every_shipped_config_trains(run, tmp_path):
    for path in sorted(ROOT.glob("config/*.py")):
        if f" rl.py config/{path.name}" in path.read_text(encoding="utf-8"):
            small = [
                "--max_steps=1",
                "--prompts_per_step=2",
                "--group_size=4",
                "--eval_prompts=2",
                "--max_new_tokens=8",
                "--warmup_steps=1",
                "--val_data=",
                "--critic_from=",
            ]
            small += [f"--out_dir={tmp_path / path.stem}"]
            assert run(str(path), *small) == 0, path
            assert tp.events(tmp_path / path.stem, "eval")[-1]["step"] == 1


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_plan_counts_every_model(base, tmp_path, monkeypatch, capsys, algorithm):
    flags = [f"--algorithm={algorithm}", "--plan_only=True", f"--reward={base / 'judge'}"]
    monkeypatch.setattr(sys, "argv", ["rl.py", *flags_of(base, tmp_path / "out", *flags)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "rl.py"), run_name="__main__")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("memory"))
    n_params = sum(p.numel() for p in huggingface.load_model(base / "model").parameters())
    assert f"reference {4 * n_params / 2**20:,.0f} MiB" in line and "reward models" in line
    assert (f"critic {28 * n_params / 2**20:,.0f} MiB" in line) == (
        algorithm == "ppo"
    )  # and its copy to save from
    assert f" copy to save {12 * n_params / 2**20:,.0f} MiB" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("unfinished", ["mask", "penalty"])
def test_steps_whose_answers_are_all_cut_are_told(run, tmp_path, capsys, unfinished):
    """One line for each line of the log, only where it happens."""
    flags = ["--log_every=2", "--kl_coef=0", "--eval_prompts=1", f"--unfinished={unfinished}"]
    assert (
        run(*flags, "--max_steps=3", "--max_new_tokens=1", "--draw_batch_size=4", "--batch_size=4")
        == 0
    )
    told = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "cut off at max_new_tokens=1" in line
    ]
    found = column(tmp_path / "out", "train", "finished")
    assert (
        len(told) == sum(share < 1 for share in found) == 2
        and "of these 2 steps" in told[0]
        and "sft.py" in told[0]
    )
    assert run("--max_steps=1", f"--out_dir={tmp_path / 'other'}") == 0
    assert "cut off" not in capsys.readouterr().out


def test_without_a_kl_term_there_is_no_reference(run, tmp_path, monkeypatch, capsys):
    """Neither in memory nor in the plan, and no KL divergence from it is reported."""
    built, plain = [], huggingface.build

    def watched(kind, *args):
        built.append(kind)
        return plain(kind, *args)

    monkeypatch.setattr(huggingface, "build", watched)
    assert run("--kl_coef=0", "--max_steps=1") == 0
    assert "reference" not in capsys.readouterr().out
    (event,) = tp.events(tmp_path / "out", "train")
    assert "kl" not in event and "kl_answer" not in event and built == []
    for trainable, models in (("lora", []), ("all", [Transformer])):
        flags = [f"--trainable={trainable}", f"--out_dir={tmp_path / trainable}"]
        assert run("--kl_coef=0.1", "--max_steps=1", *flags) == 0 and built == models
        assert ("reference" in capsys.readouterr().out) == bool(models)
        (event,) = tp.events(tmp_path / trainable, "train")
        assert "kl" in event


def test_the_reference_without_adapters_is_the_model_that_had_none(base):
    """Adapters that do something are in what is drawn and in what is trained."""
    tokenizer = Tokenizer.load(base / "model")
    adapted = huggingface.load_model(base / "model")
    set_trainable(adapted, "lora", LoRAConfig(4))
    for name, p in adapted.named_parameters():
        p.data.add_(0.1 if "lora_B" in name else 0.0)
    plain = first_answers(base)
    prompts = [one.prompt for one in plain[::4]]
    seeds = [rollouts.seed_of(1337, 1, 0, slot) for slot in range(4)]
    sampler = AnswerSampler(adapted, tokenizer, 16, 12, 1.0, torch.float32, compile=False)
    drawn = sampler.draw(prompts, seeds, 4)
    assert [one.ids for one in drawn] != [one.ids for one in plain]
    with torch.no_grad():
        sums = [text_logps(adapted, one).sum().item() for one in drawn]
    assert sums == pytest.approx([one.logprob for one in drawn], abs=1e-3)
