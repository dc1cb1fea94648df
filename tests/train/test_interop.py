"""Run directories as others open them: transformers, peft, lm-eval and gguf, on checkpoints that the trainers wrote.

Nothing is exported or converted first. What a checkpoint holds is in test_checkpoint.py, the arithmetic of adapters in
test_lora.py; here whole runs, from text through prepare.py and the trainers, are read as their users would read them.
"""

import json
import random
import runpy
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import regex
import saved
import torch
import yaml
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from groundup.align import reward_model
from groundup.generate.completion import begin_prompt, generate
from groundup.generate.sampling import SamplingParams
from groundup.scores.likelihood import score_tokens
from groundup.tokens.bpe import PATTERNS
from groundup.tokens.conversations import ChatCorpus
from groundup.train import huggingface
from model import rope_frequencies, rotate
from tokenizer import Tokenizer

pytestmark = pytest.mark.slow  # transformers, peft, lm_eval and gguf take seconds to import
ROOT = Path(__file__).parents[2]
BLOCK = 96
SIZES = ["--n_layer=2", "--n_head=4", "--n_kv_head=2", "--n_embd=64", f"--block_size={BLOCK}", "--batch_size=4"]
ON_CPU = ["--device=cpu", "--dtype=float32"]
TRAINING = [*ON_CPU, "--compile=False", "--peak_tflops=1", "--log_every=20", "--warmup_steps=0", "--learning_rate=1e-2"]
TUNING = [f"--block_size={BLOCK}", "--batch_size=4", "--val_fraction=0.1"]
PROMPTS = ["What is 3 plus", "中文：二加二是", "a", "The answer\n"]


def talk(i: int) -> list[dict]:
    zh, en = (f"{i} 加 {i} 是多少？", f"是 {2 * i}。"), (f"What is {i} plus {i}?", f"It is {2 * i}.")
    question, answer = random.Random(i).choice([zh, en, (f"Say {i}!", f"{i}!")])
    system = [{"role": "system", "content": "Add, 好好地."}] if i % 3 == 0 else []
    return [*system, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write(path: Path, rows: list) -> Path:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return path


def command(script: str, *flags: str) -> None:
    """Run a script as from the command line, in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", sys.excepthook)
        patch.setattr(sys, "argv", [f"{script}.py", *flags])
        try:
            runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code
    for number, handler in handlers.items():
        signal.signal(number, handler)


def train(script: str, out: Path, steps: int, *flags: str) -> None:
    command(script, f"--out_dir={out}", f"--max_steps={steps}", *TRAINING, *flags)


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """A directory of runs, each of 20 to 60 steps: pretrain, qwen (QK-norm, untied head), sp (sentencepiece); from
    pretrain also sft, lora (sft of adapters) and reward."""
    out = tmp_path_factory.mktemp("runs")
    words = (ROOT / "LICENSE").read_text(encoding="utf-8").split()
    texts = [" ".join([*(m["content"] for m in talk(i)), *random.Random(i).choices(words, k=9)]) for i in range(300)]
    texts = [{"text": f"{text}\nThe answer of {i}, 中文：二加{'二三五'[i % 3]}是"} for i, text in enumerate(texts)]
    write(out / "texts.jsonl", texts)
    write(out / "talks.jsonl", [{"messages": talk(i)} for i in range(200)])
    pairs = [{"prompt": talk(i)[:-1], "chosen": f"It is {2 * i}, 请.", "rejected": f"{2 * i}, fool"} for i in range(80)]
    write(out / "pairs.jsonl", pairs)
    for backend, size in (("bpe", 512), ("sentencepiece", 384)):
        common = [f"--input={out}/texts.jsonl", f"--vocab_size={size}"]
        command("tokenizer", *common, f"--backend={backend}", f"--out_dir={out}/tok_{backend}")
        common += ["--near=0", "--val_fraction=0.1", "--workers=1", f"--tokenizer_dir={out}/tok_{backend}"]
        command("prepare", *common, f"--out_dir={out}/{backend}")
    for name, of, *flags in (
        ("pretrain", "bpe"),
        ("qwen", "bpe", "--qk_norm=True", "--tie_embeddings=False", "--rope_theta=1e6"),
        ("sp", "sentencepiece"),
    ):
        tokens = f"--total_batch_tokens={4 * BLOCK}"
        steps = 60 if name == "pretrain" else 40  # the others begin with it
        train("pretrain", out / name, steps, f"--data_dir={out}/{of}", tokens, *SIZES, *flags)
    base = [f"--init_from={out}/pretrain", *TUNING]
    chat = [*base, f"--data={out}/talks.jsonl", f"--total_batch_tokens={4 * BLOCK}", "--eval_answers=0"]
    train("sft", out / "sft", 40, *chat)
    train("sft", out / "lora", 20, *chat, "--trainable=lora", "--lora_rank=4")
    train("reward", out / "reward", 20, *base, f"--data={out}/pairs.jsonl", "--total_batch_pairs=4")
    return out


def ours(directory: Path, prompts: list[list[int]], n_tokens: int = 24, stop: tuple[str, ...] = ()) -> list:
    """Our greedy continuations."""
    model, tokenizer = huggingface.load_model(directory).eval(), Tokenizer.load(huggingface.tokenizer_dir(directory))
    params = SamplingParams(max_new_tokens=n_tokens, temperature=0, stop=stop, eos_ids=tokenizer.stop_ids)
    return [result.completions[0] for result in generate(model, tokenizer, prompts, params)]


def theirs(model: torch.nn.Module, ids: list[int], n_tokens: int = 24) -> list[int]:
    """Continuation by transformers with nothing but what generation_config.json says, and no sampling."""
    x = torch.tensor([ids])
    out = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=n_tokens, do_sample=False)
    return out[0, len(ids) :].tolist()


# ---- transformers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run, architecture", [("pretrain", "Llama"), ("qwen", "Qwen3"), ("sp", "Llama")])
def test_a_pretrained_run_continues_text_in_transformers_as_here(runs, run, architecture):
    path = runs / run / "latest"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert type(model).__name__ == f"{architecture}ForCausalLM"
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    assert prompts == [begin_prompt(Tokenizer.load(path), text) for text in PROMPTS]
    answers = ours(path, prompts)
    assert [answer.ids for answer in answers] == [theirs(model, ids) for ids in prompts]
    assert [answer.text for answer in answers] == [
        tokenizer.decode(answer.ids, skip_special_tokens=True) for answer in answers
    ]
    assert len({i for answer in answers for i in answer.ids}) > 10  # a loop of one token would prove little


def test_prompts_of_several_lengths_in_one_batch(runs):
    """As serving does it: the tokenizer pads, on the left."""
    path = runs / "pretrain" / "latest"
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    assert batch["input_ids"][2, 0] == Tokenizer.load(path).pad_id and batch["attention_mask"][2, 0] == 0
    model = AutoModelForCausalLM.from_pretrained(path)
    rows = model.generate(**batch, max_new_tokens=12, do_sample=False)[:, batch["input_ids"].shape[1] :].tolist()
    answers = ours(path, [tokenizer(text)["input_ids"] for text in PROMPTS], 12)
    assert [row[: len(answer.ids)] for row, answer in zip(rows, answers, strict=True)] == [a.ids for a in answers]


def test_a_tuned_run_answers_in_transformers_as_here(runs):
    """The chat template and the ids at which an answer ends come with the checkpoint."""
    path = runs / "sft" / "latest"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    questions = [talk(i)[:-1] for i in range(300, 306)]
    prompts = [tokenizer.apply_chat_template(q, add_generation_prompt=True)["input_ids"] for q in questions]
    render = Tokenizer.load(path).render
    assert prompts == [render(question, add_generation_prompt=True)[0] for question in questions]
    answers = ours(path, prompts)
    assert [answer.ids for answer in answers] == [theirs(model, ids) for ids in prompts]
    assert sum(answer.finish_reason == "stop" for answer in answers) >= 3
    assert all(answer.ids[-1] == Tokenizer.load(path).im_end_id for answer in answers if answer.finish_reason == "stop")


@pytest.mark.parametrize("run", ["sft", "lora"])
def test_the_last_loss_that_a_run_logged_is_that_of_transformers(runs, run):
    """So what was saved is what was trained. Of the held-out conversations, one at a time."""
    path = runs / run / "latest"
    hf = AutoModelForCausalLM.from_pretrained(path)
    corpus = ChatCorpus(str(runs / "talks.jsonl"), Tokenizer.load(path), BLOCK, pack=False, seed=0, val_fraction=0.1)
    (rows,) = corpus.val.values()
    nats = n = 0
    for i in range(rows.n_rows):
        ((ids, mask),) = rows.row(i)
        ids, mask = torch.tensor(ids.astype(int)), torch.tensor(mask.astype(bool))
        with torch.no_grad():
            nats += hf(ids[None], labels=ids.masked_fill(~mask, -100)[None]).loss.item() * int(mask[1:].sum())
        n += int(mask[1:].sum())
    log = map(json.loads, (runs / run / "log.jsonl").read_text(encoding="utf-8").splitlines())
    logged = [event["val_loss"] for event in log if event["event"] == "eval"]
    assert rows.n_rows > 10 and len(logged) == 2
    assert logged[-1] == pytest.approx(nats / n, rel=1e-5) and logged[-1] < logged[0] - 0.5


@pytest.mark.parametrize("run", ["pretrain", "sp"])
def test_the_tokenizer_of_a_run_in_transformers(runs, run):
    """Of both kinds. What looks like a special token is text, to transformers where it is told so."""
    path = runs / run / "latest"
    hf, tokenizer = AutoTokenizer.from_pretrained(path), Tokenizer.load(path)
    texts = ["It is 12.", "二加二是四。 繁體 𠮷 ok", "  two\n\n\tlines \r\n", "", "<|im_end|> <|pad|>"]
    for text in texts:
        ids = hf(text, split_special_tokens=True)["input_ids"]
        assert ids == tokenizer.encode(text), text
        assert hf.decode(ids) == text
    messages = [*talk(0), {"role": "user", "content": "再说一次"}, {"role": "assistant", "content": "好 的"}]
    out = hf.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert (out["input_ids"], out["assistant_masks"]) == tokenizer.render(messages)
    assert (hf.eos_token_id, hf.pad_token_id, hf.bos_token_id) == (tokenizer.eot_id, tokenizer.pad_id, tokenizer.bos_id)
    assert hf.convert_tokens_to_ids("<|im_end|>") == tokenizer.im_end_id


# ---- peft -----------------------------------------------------------------------------------------------------------


def test_adapters_of_a_run_through_peft(runs, tmp_path):
    """Opened in the three ways that peft and transformers have, merged by peft, and merged by tools/merge.py."""
    path, base = runs / "lora" / "latest", runs / "pretrain" / "latest"
    tokenizer = AutoTokenizer.from_pretrained(path)
    render = partial(tokenizer.apply_chat_template, add_generation_prompt=True)
    ask = [render(talk(i)[:-1])["input_ids"] for i in range(300, 304)]
    answers = [answer.ids for answer in ours(path, ask)]
    assert answers != [answer.ids for answer in ours(base, ask)]
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path)
    command("tools/merge", f"--init_from={path}", f"--out_dir={tmp_path / 'plain'}")
    for model in (
        opened,
        AutoPeftModelForCausalLM.from_pretrained(path),
        AutoModelForCausalLM.from_pretrained(path),
        AutoModelForCausalLM.from_pretrained(tmp_path / "plain"),
        opened.merge_and_unload(),
    ):
        assert [theirs(model, ids) for ids in ask] == answers


# ---- rewards --------------------------------------------------------------------------------------------------------


def test_a_reward_run_scores_texts_in_transformers_as_here(runs, tmp_path):
    """From messages to scores by transformers alone: template, padding and head; beside reward.py --score."""
    path = runs / "reward" / "latest"
    answers = ["It is 12, 请.", "12, fool", "请" * 20, "No."]
    talks = [[*talk(i)[:-1], {"role": "assistant", "content": answer}] for i in range(300, 303) for answer in answers]
    rows = write(tmp_path / "rows.jsonl", [{"messages": messages} for messages in talks])
    scored = tmp_path / "scored.jsonl"
    command("reward", f"--init_from={runs}/reward", f"--score={rows}", f"--out={scored}", *ON_CPU)
    here = [json.loads(line)["reward"] for line in scored.read_text(encoding="utf-8").splitlines()]
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    texts = [tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n") for messages in talks]
    with torch.no_grad():
        there = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    assert there.shape == (len(talks), 1)
    assert here == pytest.approx(there[:, 0].tolist(), abs=1e-4)
    assert np.ptp(here) > 0.1
    assert here == pytest.approx(saved.score_talks(reward_model.load(path), Tokenizer.load(path), talks), abs=1e-4)


# ---- lm-eval --------------------------------------------------------------------------------------------------------


QUESTIONS = [{"question": f"The answer of {i}, 中文：", "answer": f" 二加{'二三五'[i % 3]}是"} for i in range(6)]
QUESTIONS += [{"question": f"What is {i} plus {i}? It", "answer": f" is {2 * i}."} for i in range(6)]
MEAN = {"aggregation": "mean", "higher_is_better": True}
LM_EVAL_TASKS = {
    "ours_likelihood": {
        "output_type": "loglikelihood", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", **MEAN}],
    },
    "ours_perplexity": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}{{answer}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "ours_generation": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n", "。"], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match", **MEAN}],
    },
}  # fmt: skip


def lm_eval_run(runs: Path, run: str, folder: Path, tasks: list[str], **options: bool) -> dict:
    """What lm-eval finds on files of ours, through its backend for transformers."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    file = str(write(folder / "q.jsonl", QUESTIONS))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": file}}, "test_split": "test"}
    for name in tasks:
        task = {"task": name, **data, **LM_EVAL_TASKS[name]}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task, allow_unicode=True), encoding="utf-8")
    lm = HFLM(pretrained=str(runs / run / "latest"), device="cpu", dtype="float32", batch_size=4)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(lm, tasks=tasks, task_manager=manager, bootstrap_iters=0, **options)


def responses(found: dict, task: str) -> list:
    return [sample["resps"][0][0] for sample in sorted(found["samples"][task], key=lambda sample: sample["doc_id"])]


@pytest.mark.slow
def test_lm_eval_finds_our_numbers(runs, tmp_path, monkeypatch):
    """Of a given answer, of whole texts, and of what is generated."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = runs / "pretrain" / "latest"
    found = lm_eval_run(runs, "pretrain", tmp_path, list(LM_EVAL_TASKS))
    model, tokenizer = huggingface.load_model(path), Tokenizer.load(path)
    prompts = [tokenizer.encode(row["question"]) for row in QUESTIONS]
    texts = [row["question"] + row["answer"] for row in QUESTIONS]
    whole = [tokenizer.encode(text) for text in texts]
    scored = score_tokens(model, [(ids, len(p)) for ids, p in zip(whole, prompts, strict=True)], 4, torch.float32)
    likelihoods = responses(found, "ours_likelihood")
    assert [float(nats) for nats, _ in likelihoods] == pytest.approx([-of.nats for of in scored], abs=1e-4)
    assert [greedy in (True, "True") for _, greedy in likelihoods] == [of.greedy for of in scored]

    rows, out = write(tmp_path / "texts.jsonl", [{"text": text} for text in texts]), tmp_path / "scores.json"
    command("evaluate", f"--init_from={runs}/pretrain", f"--data=q={rows}", f"--out={out}", *ON_CPU)
    bits = json.loads(out.read_text(encoding="utf-8"))["results"]["perplexity"]["all"]["bits_per_byte"]
    assert found["results"]["ours_perplexity"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)

    answers = ours(path, prompts, 16, stop=("\n", "。"))
    assert responses(found, "ours_generation") == [answer.text for answer in answers]
    right = [answer.text == row["answer"] for answer, row in zip(answers, QUESTIONS, strict=True)]
    assert found["results"]["ours_generation"]["exact_match,none"] == pytest.approx(sum(right) / len(right))


@pytest.mark.slow
def test_lm_eval_asks_a_tuned_run_by_its_template(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    found = lm_eval_run(runs, "sft", tmp_path, ["ours_generation"], apply_chat_template=True)
    path = runs / "sft" / "latest"
    asked = [[{"role": "user", "content": row["question"]}] for row in QUESTIONS]
    prompts = [Tokenizer.load(path).render(messages, add_generation_prompt=True)[0] for messages in asked]
    answers = ours(path, prompts, 16, stop=("\n", "。"))
    assert responses(found, "ours_generation") == [answer.text for answer in answers]
    assert any(answer.finish_reason == "stop" for answer in answers)


# ---- llama.cpp: what its Python package says ------------------------------------------------------------------------

# How llama.cpp cuts text, by the name that a file gives it ("tokenizer.ggml.pre"): src/llama-vocab.cpp. What no branch
# matches is a chunk too, which is why the first has no \s+.
CASELESS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"
REST = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
LLAMA_CPP = {
    "gpt-2": "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)",
    "dbrx": f"{CASELESS}|\\p{{N}}{{1,3}}{REST}",
    "qwen2": f"{CASELESS}|\\p{{N}}{REST}",
}
SAME = {"gpt2": "gpt-2", "cl100k": "dbrx", "qwen": "qwen2"}  # docs/ecosystem.md says so


def chunks(pattern: str, text: str) -> list[str]:
    """All of the text: the matches, and what is between them."""
    found, end = [], 0
    for match in regex.finditer(pattern, text):
        found += [text[end : match.start()], match.group()]
        end = match.end()
    return [chunk for chunk in [*found, text[end:]] if chunk]


def random_texts(n: int) -> list[str]:
    parts = ["a", "Hello", "we'Ll", "'s", "'T", "12345", "7", " ", "  ", "\n", "\r\n", "\t", "，", "二加", "𠮷", "!?"]
    rng = random.Random(0)
    return ["".join(rng.choices(parts, k=rng.randrange(1, 15))) for _ in range(n)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_which_patterns_llama_cpp_has_a_name_for(pattern):
    texts = random_texts(500)
    cut = [chunks(PATTERNS[pattern], text) for text in texts]
    same = {name for name, of in LLAMA_CPP.items() if cut == [chunks(of, text) for text in texts]}
    assert same == ({SAME[pattern]} if pattern in SAME else set())


@pytest.mark.parametrize("run, architecture", [("pretrain", "LLAMA"), ("qwen", "QWEN3"), ("sp", "LLAMA")])
def test_gguf_has_a_name_for_every_weight(runs, run, architecture):
    gguf = pytest.importorskip("gguf")
    path = runs / run / "latest"
    arch = gguf.MODEL_ARCH[architecture]
    assert gguf.MODEL_ARCH_NAMES[arch] == json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"]
    names = gguf.get_tensor_name_map(arch, 2)
    weights = load_file(path / "model.safetensors")
    found = {name: names.get_name(name, try_suffixes=(".weight",)) for name in weights}
    assert None not in found.values() and len(set(found.values())) == len(weights)
    wanted = {gguf.TENSOR_NAMES[kind].format(bid=i) + ".weight" for kind in gguf.MODEL_TENSORS[arch] for i in range(2)}
    assert set(found.values()) <= wanted
    assert ("output.weight" in found.values()) == (run == "qwen")  # else llama.cpp takes the embedding, for it is tied


@pytest.mark.parametrize("run", ["pretrain", "sp"])
def test_gguf_reads_the_special_tokens_the_merges_and_the_template(runs, run):
    gguf = pytest.importorskip("gguf")
    path = runs / run / "latest"
    with pytest.raises(FileNotFoundError):  # so the converter takes sentencepiece's file, or else byte-level BPE
        gguf.LlamaHfVocab(path)
    tokenizer, vocab = Tokenizer.load(path), gguf.SpecialVocab(path, load_merges=run == "pretrain")
    assert vocab.special_token_ids == {"bos": tokenizer.bos_id, "eos": tokenizer.eot_id, "pad": tokenizer.pad_id}
    assert vocab.add_special_token.get("bos", False) is vocab.add_special_token.get("eos", False) is False
    assert vocab.chat_template == AutoTokenizer.from_pretrained(path).chat_template
    if run == "pretrain":
        ids = AutoTokenizer.from_pretrained(path).get_vocab()
        joined = [ids[merge.replace(" ", "")] for merge in vocab.merges]
        assert joined == list(range(256, 256 + len(joined))) and len(joined) > 50


def interleaved(weight: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of a query or key matrix as llama.cpp wants them for "llama": of each head the first and the second half by
    turns, for there a rotation takes neighbours."""
    heads = weight.reshape(n_head, -1, weight.shape[1])
    half = heads.shape[1] // 2
    out = np.empty_like(heads)
    out[:, 0::2], out[:, 1::2] = heads[:, :half], heads[:, half:]
    return out.reshape(weight.shape)


def rotated(x: np.ndarray, n_head: int, theta: float) -> np.ndarray:
    """(T, heads, head_dim) of x (T, heads * head_dim): neighbours turned, as llama.cpp does it for "llama"."""
    T, dim = len(x), x.shape[1] // n_head
    pairs = x.reshape(T, n_head, dim // 2, 2)
    turn = np.exp(1j * np.arange(T)[:, None] * theta ** (-np.arange(0, dim, 2) / dim))
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn[:, None]
    return np.stack([turned.real, turned.imag], axis=-1).reshape(T, n_head, dim)


def test_interleaved_rows_turned_as_neighbours_give_our_attention(runs):
    """Products of queries and keys: by the converter's order of rows and llama.cpp's rotation, and by ours."""
    path = runs / "pretrain" / "latest"
    weights, cfg = load_file(path / "model.safetensors"), huggingface.load_config(path)
    q, k = (weights[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qk")
    x = torch.randn(7, cfg.n_embd, generator=torch.Generator().manual_seed(0))
    angles = torch.outer(torch.arange(7.0), rope_frequencies(cfg))
    mine = [
        rotate((x @ w.T).view(1, 7, n, -1).transpose(1, 2), angles.cos(), angles.sin())[0].transpose(0, 1).numpy()
        for w, n in ((q, cfg.n_head), (k, cfg.n_kv_head))
    ]
    other = [
        rotated(x.numpy() @ interleaved(w.numpy(), n).T, n, cfg.rope_theta)
        for w, n in ((q, cfg.n_head), (k, cfg.n_kv_head))
    ]
    for head in range(cfg.n_head):
        of_group = head // (cfg.n_head // cfg.n_kv_head)
        scores = [a[:, head] @ b[:, of_group].T for a, b in (mine, other)]
        np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)
    assert not np.allclose(mine[0], other[0], atol=1e-2)
