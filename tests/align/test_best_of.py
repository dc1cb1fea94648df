"""best_of.py, and sample.py with a reward model: against rewards by hand arithmetic and of whole conversations."""

import dataclasses
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
import saved
import test_pretrain as tp
import test_sample as ts
import torch
from test_model import random_model, tiny_config

from groundup.align import reward_model
from groundup.align.best_of import Ranker, drawn_part
from groundup.align.reward_model import RewardModel
from groundup.errors import printable
from groundup.generate.completion import generate
from groundup.generate.engine import Completion, Result
from groundup.tokens.training import train
from groundup.train import huggingface
from model import Transformer
from tokenizer import Tokenizer

QUESTION = "从前有一只猫?"
BY_REWARD = ["--best_of_by=reward", "--reward_from=rm"]


def counting_model(cfg_of: Transformer, token: int) -> RewardModel:
    """One that adds up `token` by uniform attention; see reward_by_hand."""
    net = RewardModel(dataclasses.replace(cfg_of.cfg, n_layer=1, norm_eps=1e-12))
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(float(p.ndim == 1))
        net.embed_tokens.weight[:, 1] = 1
        net.embed_tokens.weight[token, 0] = 1
        net.layers[0].self_attn.v_proj.weight[0, 0] = 1
        net.layers[0].self_attn.o_proj.weight[0, 0] = 1
        net.score.weight[0, 0] = 1
    return net


def reward_by_hand(ids: list[int], token: int, C: int = 64) -> float:
    """RMS norm makes sqrt(C / 2) of the 1 that the token has in column 0, and the mean over all tokens is added."""
    mean = math.sqrt(C / 2) * ids.count(token) / len(ids)
    return mean / math.sqrt((mean**2 + 1) / C)


def write_reward_model(directory: Path, net: RewardModel, tokenizer: Tokenizer) -> Path:
    directory.mkdir(parents=True)
    reward_model.write_model(directory, net, tokenizer)
    return directory


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """tuned/chat, a model that likes full stops and ends; rm, a reward model that counts full stops; random, one that
    has its own taste."""
    root = tmp_path_factory.mktemp("cwd")
    path = ts.save_run(root / "first", seed=3, stage="", block_size=512)
    net, tokenizer = huggingface.load_model(path), Tokenizer.load(path)
    with torch.no_grad():
        net.lm_head.weight[[stop(tokenizer), tokenizer.im_end_id]] *= 4
    saved.save(root / "tuned/chat", 20, net, tokenizer)
    command = "'Resolved configuration; re-run with: python sft.py out/config.py'\n"
    (root / "tuned/chat/config.py").write_text(command, encoding="utf-8")
    write_reward_model(root / "rm", counting_model(net, stop(tokenizer)), tokenizer)
    torch.manual_seed(5)
    other = RewardModel(net.cfg)
    other.load_state_dict(random_model(net.cfg, 8).state_dict(), strict=False)
    torch.nn.init.normal_(other.score.weight)
    write_reward_model(root / "random", other, tokenizer)
    return root


@pytest.fixture(scope="module")
def tuned(home) -> tuple[Transformer, Tokenizer]:
    path = home / "tuned/chat/step_000020"
    return huggingface.load_model(path), Tokenizer.load(path)


def stop(tokenizer: Tokenizer) -> int:
    [token] = tokenizer.encode("。")
    return token


def ask(*said: str) -> list[dict]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(said)]


def answers_by_hand(tuned: tuple[Transformer, Tokenizer], messages: list[dict], **changes: object) -> Result:
    net, tokenizer = tuned
    ids = tokenizer.render(messages, add_generation_prompt=True)[0]
    return generate(net, tokenizer, [ids], ts.params_of(tokenizer, net, **changes))[0]


# ---- the choice -----------------------------------------------------------------------------------------------------


def test_the_best_are_those_with_most_full_stops(home, tuned):
    """For their length: what is scored is the conversation up to the <|im_end|> that ended the answer."""
    _, tokenizer = tuned
    drawn = answers_by_hand(tuned, ask(QUESTION), n=16, max_new_tokens=12)
    finished = [found for found in drawn.completions if found.finish_reason == "stop"]
    n_cut = 16 - len(finished)
    rewards = [reward_by_hand(drawn.prompt_ids + found.ids, stop(tokenizer)) for found in finished]
    best = sorted(range(len(finished)), key=lambda i: -rewards[i])
    assert len(set(rewards)) >= 4 and n_cut > 0 and best != sorted(best)
    flags = ["--init_from=tuned/chat", *BY_REWARD, f"--prompt={QUESTION}", "--best_of=16", "--max_new_tokens=12"]
    ended = ts.run(home, *flags, "--n=3", "--out=best.jsonl")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == f"sample: {n_cut} of 16 answers have no reward: {n_cut} ended by length\n"
    [answer] = ts.read_answers(home / "best.jsonl")
    assert [found["text"] for found in answer["completions"]] == [finished[i].text for i in best[:3]]
    found = [found["reward"] for found in answer["completions"]]
    assert found == pytest.approx([rewards[i] for i in best[:3]], rel=1e-4)
    ended = ts.run(home, *flags, "--n=2")  # as plain text
    shown = ("-" * 80 + "\n").join(finished[i].text + "\n" for i in best[:2])
    assert ended.out == printable(shown)
    ended = ts.run(home, *flags, "--n=16", "--out=all.jsonl")  # n answers are simply scored
    [answer] = ts.read_answers(home / "all.jsonl")
    found = [found["reward"] for found in answer["completions"]]
    assert found[: len(finished)] == pytest.approx(sorted(rewards, reverse=True), rel=1e-4)
    assert found[len(finished) :] == [None] * n_cut


def test_rewards_are_those_of_the_texts(home, tuned):
    """Of whole conversations, system message and several turns included; a stop string is not part of the answer."""
    _, tokenizer = tuned
    rows = [{"prompt": QUESTION}, {"messages": ask("猫?", "喵。", "狗?")}, {"prompt": "why?"}]
    (home / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = ["--init_from=tuned/chat", "--best_of_by=reward", "--reward_from=random", "--prompts=q.jsonl"]
    ended = ts.run(home, *flags, "--out=texts.jsonl", "--n=5", "--logprobs=0", "--stop=。", "--system=短")
    assert ended.code == 0
    judge, n_stopped, n_others = reward_model.load(home / "random"), 0, 0
    for answer in ts.read_answers(home / "texts.jsonl"):
        messages = answer.get("messages") or ask(answer["prompt"])
        system = [{"role": "system", "content": "短"}, *messages]
        prompt = tokenizer.render(system, add_generation_prompt=True)[0]
        found = [found for found in answer["completions"] if found["reward"] is not None]
        rewards = [one["reward"] for one in found]
        # By a stop string the whole conversation is text; else the ids are what was said, if text would have others.
        texts = [[*system, {"role": "assistant", "content": one["text"]}] for one in found]
        of_texts = saved.score_talks(judge, tokenizer, texts)
        of_ids = reward_model.score_ids(judge, [prompt + one["ids"] for one in found])
        stopped = [one["stop_reason"] == "。" for one in found]
        want = [a if by_string else b for a, b, by_string in zip(of_texts, of_ids, stopped, strict=True)]
        assert rewards == pytest.approx(want, abs=1e-5) and rewards == sorted(rewards, reverse=True)
        n_stopped += sum(stopped)
        n_others += len(found) - sum(stopped)
    assert n_stopped > 3 and n_others > 3


@pytest.mark.parametrize("text", ["猫 sat，\n", "", "🙂 because of the cat"])
def test_an_answer_is_closed_as_training_closes_it(tuned, text):
    _, tokenizer = tuned
    messages = [*ask(QUESTION), {"role": "assistant", "content": text}]
    prompt, ids = tokenizer.render(messages[:1], add_generation_prompt=True)[0], tokenizer.encode(text)
    want = reward_model.answered_ids(messages, tokenizer)
    ends = [(ids + [stop], stop) for stop in (tokenizer.im_end_id, tokenizer.eot_id, tokenizer.encode("x")[0])]
    for generated, reason in [*ends, (tokenizer.encode(text + "END of"), "END")]:
        drawn = drawn_part(Completion(text, generated, "stop", reason, None, 0.0), tokenizer)
        assert reward_model.drawn_ids(messages[:1], prompt, drawn, text, tokenizer, 10**6) == want


def test_what_has_no_reward_comes_last_and_is_counted(tuned):
    """First by reward, equal ones in their order; then too long ones; then unfinished ones."""
    net, tokenizer = tuned
    judge = Ranker(counting_model(random_model(tiny_config(vocab_size=512, block_size=20)), 300), tokenizer)
    eos = tokenizer.im_end_id

    def answer(name: str, ids: list[int], finish: str) -> Completion:
        ids = ids if finish == "length" else [*ids, eos]
        return Completion(name, ids, finish, eos if finish == "stop" else None, None, 0.0)

    drawn = [
        answer("cut", [300] * 5, "length"), answer("none", [1] * 5, "stop"), answer("long", [300] * 18, "stop"),
        answer("two", [300] * 2, "stop"), answer("four", [300] * 4, "stop"), answer("none too", [2] * 5, "stop"),
    ]  # fmt: skip
    ranked = judge.rank(Result([7, 8], drawn, None), None, 6)
    assert [found.text for found in ranked.completions] == ["four", "two", "none", "none too", "long", "cut"]
    want = [reward_by_hand([7, 8, *[300] * k, eos], 300) for k in (4, 2, 0, 0)]
    assert [found.reward for found in ranked.completions[:4]] == pytest.approx(want, rel=1e-4)
    assert [found.reward for found in ranked.completions[4:]] == [None, None]
    assert judge.rank(Result([7, 8], drawn, None), None, 2).completions == ranked.completions[:2]
    words = "4 of 12 answers have no reward: 2 ended by length, 2 longer than the reward model's block_size=20"
    assert judge.report() == f"sample: {words}"
    fits = Completion("", [300] * 17 + [eos], "stop", eos, None, 0.0)  # with the prompt it is 20 ids
    assert judge.rewards(Result([7, 8], [fits], None)) != [None]
    assert Ranker(judge.model, tokenizer).report() == ""
    with torch.no_grad():
        judge.model.score.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="not finite"):
        judge.rank(Result([7, 8], drawn, None), None, 2)


# ---- a file of prompts ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_file_goes_on_with_the_same_rewards(home, tmp_path):
    """To the bit, with another batch size too: the answers to a prompt are scored together."""
    ts.write_prompts(tmp_path / "q.jsonl", 10)
    flags = ["--prompts=q.jsonl", "--max_new_tokens=30", "--n=2", "--best_of=3", "--best_of_by=reward"]
    flags += [f"--init_from={home / 'tuned/chat'}", f"--reward_from={home / 'rm'}"]
    assert ts.run(tmp_path, *flags, "--out=whole.jsonl").code == 0
    line = [sys.executable, *ts.command(*flags, "--out=a.jsonl", "--batch_size=2")]
    out = tmp_path / "a.jsonl"
    with forks.Popen(line, cwd=tmp_path, env=ts.environment(tmp_path), stderr=subprocess.DEVNULL) as process:
        while not out.exists() or out.read_bytes().count(b"\n") < 2:
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert out.read_bytes().count(b"\n") < 10
    assert ts.run(tmp_path, *flags, "--out=a.jsonl", "--batch_size=5").code == 0
    by_index = sorted(ts.read_answers(out), key=lambda answer: answer["index"])
    assert by_index == sorted(ts.read_answers(tmp_path / "whole.jsonl"), key=lambda answer: answer["index"])
    rewards = [found["reward"] for answer in by_index for found in answer["completions"]]
    assert len(rewards) == 20 and len(set(rewards)) > 6


def test_the_reward_model_is_recorded_and_another_is_refused(home, tmp_path):
    ts.write_prompts(tmp_path / "q.jsonl", 2)
    flags = ["--prompts=q.jsonl", "--out=a.jsonl", "--max_new_tokens=3", "--best_of_by=reward"]
    flags += [f"--init_from={home / 'tuned/chat'}"]
    assert ts.run(tmp_path, *flags, f"--reward_from={home / 'rm'}").code == 0
    settings = json.loads((tmp_path / "a.jsonl.config.json").read_text(encoding="utf-8"))
    assert settings["reward_model"].startswith("rm ") and settings["model"].startswith("step_000020 ")
    ended = ts.run(tmp_path, *flags, f"--reward_from={home / 'random'}")
    assert ended.code == 1 and ended.err.count("\n") == 1 and "reward_model='rm " in ended.err
    ts.run(tmp_path, *flags[:1], flags[-1], "--out=b.jsonl", "--max_new_tokens=3")
    assert "reward_model" not in json.loads((tmp_path / "b.jsonl.config.json").read_text(encoding="utf-8"))
    assert "reward" not in ts.read_answers(tmp_path / "b.jsonl")[0]["completions"][0]


def test_a_text_to_continue_is_named(home, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"text": "The"}\n{"prompt": "The"}\n', encoding="utf-8")
    flags = [f"--init_from={home / 'tuned/chat'}", f"--reward_from={home / 'rm'}", "--best_of_by=reward"]
    ended = ts.run(tmp_path, *flags, "--prompts=q.jsonl", "--out=a.jsonl", "--max_new_tokens=3")
    assert ended.code == 0 and "q.jsonl:1: sample: a text to continue has no reward" in ended.err
    assert [answer["index"] for answer in ts.read_answers(tmp_path / "a.jsonl")] == [1]


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--best_of_by=reward"], ["best_of_by=reward and reward_from=DIR go together", "''"]),
        (["--reward_from=rm"], ["best_of_by=reward and reward_from=DIR go together", "sum", "'rm'"]),
        ([*BY_REWARD, "--num_beams=2", "--temperature=0"], ["samples, not beams", "num_beams=2"]),
        ([*BY_REWARD, "--prompt="], ["cannot stream", "--prompt"]),
        ([*BY_REWARD, "--chat=no"], ["needs a chat", "--chat=yes"]),
        ([BY_REWARD[0], "--reward_from=nowhere"], ["reward_from='nowhere'", "no such directory"]),
        ([BY_REWARD[0], "--reward_from=tuned/chat"], ["reward_from='tuned/chat'", "no reward model"]),
        ([BY_REWARD[0], "--reward_from=foreign"], ["reward_from='foreign'", "another tokenizer"]),
        ([*BY_REWARD, "--best_of=3", "--temperature=0"], ["temperature", "best_of=3"]),
        ([*BY_REWARD, "--n=3", "--best_of=2"], ["best_of", "n=3"]),
        (["--init_from=rm"], ["rm is a reward model", "init_from"]),
    ],
)
def test_mistakes_are_one_line(home, arguments, words):
    if not (home / "foreign").exists():
        other = train(["another text"], 300)
        net = RewardModel(tiny_config(vocab_size=other.vocab_size, n_layer=1))
        write_reward_model(home / "foreign", net, other)
    defaults = ["--init_from=tuned/chat", "--prompt=a", *([] if "--prompt=" in arguments else ["--out=never.jsonl"])]
    ended = ts.run(home, *tp.flags_with_defaults(arguments, defaults))
    assert ended.code == 1 and ended.out == ""
    assert ended.err.count("\n") == 1 and all(word in ended.err for word in words), ended.err
    assert not list(home.glob("never.jsonl*"))
