"""domains.py against transformers on the same documents, and against models whose losses are known by construction."""

import gzip
import json
import math
import random
from pathlib import Path

import pytest
import sentencepiece
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import prepare
from configurator import defaults_of, is_key, write_config
from groundup.errors import UserError
from groundup.scores import domains, trained_on
from groundup.scores.domains import (
    Domain,
    Settings,
    document_losses,
    evaluate_domains,
    parse_domains,
    windows,
)
from groundup.scores.trained_on import warnings_of_texts
from groundup.tokens.engines import PATTERNS
from groundup.tokens.training import bpe_files, train
from groundup.train import huggingface
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

BLOCK = 32
CHINESE = "机器学习是人工智能的一个分支,它研究怎样从数据中得到规律。"
ENGLISH = "A model of language gives each continuation of a text a probability. "
TEXTS = [ENGLISH * 6, "x", CHINESE, CHINESE * 3 + ENGLISH, "  two\n\nlines\t", ENGLISH]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train([ENGLISH * 3 + CHINESE] * 3, 340)


@pytest.fixture(scope="module")
def model(tokenizer) -> Transformer:
    torch.manual_seed(0)
    cfg = ModelConfig(tokenizer.vocab_size, block_size=BLOCK, n_layer=2, n_head=4, n_kv_head=2, n_embd=32)
    model = Transformer(cfg)
    model.embed_tokens.weight.data *= 20
    return model


@pytest.fixture(scope="module")
def saved(model, tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    huggingface.write_model(folder, model, tokenizer)
    return folder


def settings(stride: int = BLOCK, batch_size: int = 3, **more) -> Settings:
    return Settings(batch_size, BLOCK, stride, **more)


def losses_of(model: Transformer, tokenizer: Tokenizer, texts: list[str], how: Settings) -> list[domains.Loss]:
    return document_losses(model, tokenizer, iter(texts), how, torch.float32)


# ---- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size, stride", [(4, 4), (4, 1), (5, 3), (7, 6), (1, 1)])
def test_every_token_is_scored_once_with_enough_context(block_size, stride):
    for n in range(2 * block_size + 2 * stride + 3):
        rows = list(windows(range(n), block_size, stride))
        assert [i for ids, first in rows for i in ids[first:]] == list(range(1, n))
        assert all(len(ids) <= block_size + 1 for ids, _ in rows)
        assert all(first >= block_size - stride for _, first in rows[1:])
        assert all(len(ids) > first for ids, first in rows)


# ---- against transformers -------------------------------------------------------------------------------------------


@torch.no_grad()
def nats_by_hand(folder: Path, text: str, stride: int) -> tuple[float, int]:
    """(nats, tokens) of a document by transformers alone: each token by itself, its context found by the definition:
    the first window, of those that begin at 0, stride, 2 stride, .., that reaches it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    hf = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [tokenizer.eos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    nats = 0.0
    for i in range(1, len(ids)):
        begin = next(k for k in range(0, len(ids), stride) if i <= k + BLOCK)
        logits = hf(torch.tensor([ids[begin:i]])).logits[0, -1]
        nats -= logits.double().log_softmax(-1)[ids[i]].item()
    return nats, len(ids) - 1


@pytest.mark.parametrize("stride", [BLOCK, 10])
def test_losses_are_those_of_transformers(model, tokenizer, saved, stride):
    losses = losses_of(model, tokenizer, TEXTS, settings(stride))
    assert max(loss.n_tokens for loss in losses) > 2 * BLOCK
    for text, loss in zip(TEXTS, losses, strict=True):
        nats, n_tokens = nats_by_hand(saved, text, stride)
        assert loss.nats == pytest.approx(nats, rel=1e-5, abs=1e-4)
        assert loss[1:] == (n_tokens, len(text.encode("utf-8")), len(text))


def test_figures_are_sums_over_documents(model, tokenizer, saved, tmp_path):
    paths = [tmp_path / f"{i}.txt" for i in range(len(TEXTS))]
    for path, text in zip(paths, TEXTS, strict=True):
        path.write_text(text, encoding="utf-8")
    spec = f"some={tmp_path}/[012].txt,rest={tmp_path}/[345].txt"
    found = evaluate_domains(model, tokenizer, parse_domains(spec), settings(), torch.float32)
    everything = [nats_by_hand(saved, text, BLOCK) for text in TEXTS]
    nats, n_tokens = (sum(column) for column in zip(*everything[3:], strict=True))
    text = "".join(TEXTS[3:])
    expected = {
        "documents": 3, "tokens": n_tokens, "bytes": len(text.encode()), "characters": len(text),
        "nats_per_document": nats / 3, "nats_per_token": nats / n_tokens, "perplexity": math.exp(nats / n_tokens),
        "bits_per_byte": nats / math.log(2) / len(text.encode()), "bits_per_character": nats / math.log(2) / len(text),
    }  # fmt: skip
    assert found["domains"]["rest"].pop("notes") == []
    assert found["domains"]["rest"] == pytest.approx(expected, rel=1e-5)
    assert found["all"]["nats_per_document"] == pytest.approx(sum(nats for nats, _ in everything) / 6, rel=1e-5)


@pytest.mark.parametrize("stride", [BLOCK, 7])
def test_batch_size_and_the_size_of_groups_change_nothing(model, tokenizer, monkeypatch, stride):
    expected = losses_of(model, tokenizer, TEXTS, settings(stride, batch_size=1))
    assert losses_of(model, tokenizer, TEXTS, settings(stride, batch_size=100)) == [pytest.approx(e) for e in expected]
    monkeypatch.setattr(domains, "GROUP_TOKENS", 1)  # rows of one document are in several groups
    assert losses_of(model, tokenizer, TEXTS, settings(stride)) == [pytest.approx(e) for e in expected]


# ---- known by construction ------------------------------------------------------------------------------------------


def certain_model(vocab_size: int, follows: dict[int, list[int]]) -> Transformer:
    """After id i comes one of follows[i], all equally likely. Embeddings are unit vectors, blocks add nothing, and the
    head has a column for each i with a logit for what follows of about 3 sqrt(vocab_size)."""
    model = Transformer(ModelConfig(vocab_size, BLOCK, n_layer=1, n_head=1, n_embd=vocab_size, tie_embeddings=False))
    for p in model.layers.parameters():
        p.data.zero_()
    model.embed_tokens.weight.data = torch.eye(vocab_size)
    model.lm_head.weight.data.zero_()
    for i, targets in follows.items():
        model.lm_head.weight.data[targets, i] = 3.0
    return model


def test_bits_per_byte_are_equal_for_tokenizers_of_equal_quality():
    """Texts are of pairs, a or b and then c or d, at random: 1 bit per letter, and no model can do better. A tokenizer
    spells letters, another one pairs; both models know all that there is to know."""
    rng = random.Random(0)
    texts = ["".join(rng.choice("ab") + rng.choice("cd") for _ in range(n)) for n in (1, 7, 40, 100)]
    letters = Tokenizer(bpe_files([], PATTERNS["gpt4"]))
    one = {c: letters.encode(c)[0] for c in "abcd"}
    pairs = Tokenizer(bpe_files([(one[x], one[y]) for x in "ab" for y in "cd"], PATTERNS["gpt4"]))
    both = [pairs.encode(x + y)[0] for x in "ab" for y in "cd"]
    first, second = [one["a"], one["b"]], [one["c"], one["d"]]
    of_letters = {i: second for i in first} | {i: first for i in [*second, letters.bos_id]}
    of_pairs = {i: both for i in [*both, pairs.bos_id]}
    for stride in (BLOCK, 5):
        found = [
            domains.summarize(losses_of(certain_model(t.vocab_size, follows), t, texts, settings(stride)))
            for t, follows in ((letters, of_letters), (pairs, of_pairs))
        ]
        assert [of["tokens"] for of in found] == [296, 148]
        assert [of["nats_per_token"] for of in found] == pytest.approx([math.log(2), math.log(4)], rel=1e-5)
        assert [of["perplexity"] for of in found] == pytest.approx([2, 4], rel=1e-5)
        for key in ("bits_per_byte", "bits_per_character"):
            assert [of[key] for of in found] == pytest.approx([1, 1], rel=1e-5)
        assert [of["nats_per_document"] for of in found] == pytest.approx([74 * math.log(2)] * 2, rel=1e-5)


def test_bytes_are_those_of_the_text_where_a_tokenizer_normalises_it(tmp_path):
    """sentencepiece as it comes: NFKC, one space for several, none at the end."""
    text = CHINESE + "  \uff21\uff22\uff23 \u2460 "  # full-width letters; a circled 1
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([ENGLISH, CHINESE] * 9), model_prefix=str(tmp_path / "tokenizer"), vocab_size=340,
        model_type="bpe", byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}', encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)).strip() == CHINESE.replace("\uff0c", ",") + " ABC 1"
    torch.manual_seed(0)
    model = Transformer(ModelConfig(tokenizer.vocab_size, BLOCK, 1, 2, 0, 16))
    (loss,) = losses_of(model, tokenizer, [text], settings())
    assert (loss.n_bytes, loss.n_chars) == (len(text.encode()), len(text))
    assert loss.n_tokens == len(tokenizer.encode(text))


# ---- files ----------------------------------------------------------------------------------------------------------


def test_names_of_domains(tmp_path):
    for name in ("zh/a.txt", "zh/b.txt", "code.jsonl", "news.tar.json.gz", "x=y.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}", encoding="utf-8")
    spec = f"{tmp_path}/zh, {tmp_path}/*.jsonl,{tmp_path}/*.gz,poems={tmp_path}/zh/*.txt,{tmp_path}/x=y.txt"
    found = [(domain.name, [Path(file).name for file in domain.files]) for domain in parse_domains(spec)]
    assert found == [
        ("zh", ["a.txt", "b.txt"]), ("code", ["code.jsonl"]), ("news.tar", ["news.tar.json.gz"]),
        ("poems", ["a.txt", "b.txt"]), ("x=y", ["x=y.txt"]),
    ]  # fmt: skip


def test_texts_that_a_run_was_trained_on_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "new"):
        Path(f"{name}.txt").write_text(name * 500, encoding="utf-8")
    defaults = defaults_of(prepare.__file__)
    config = {"input": "a.txt,b.txt", "out_dir": "data/mine", "vocab_size": 384, "workers": 1, "val_fraction": 0.1}
    assert prepare.main({key: defaults[key] for key in defaults if is_key(key, defaults[key])} | config) == 0
    step = tmp_path / "out/run/step_000001"
    step.mkdir(parents=True)

    def warning(spec: str) -> str:
        return "".join(warnings_of_texts(parse_domains(spec), step))

    assert warning("a.txt") == ""  # not a run of ours
    (tmp_path / "same.txt").write_bytes((tmp_path / "b.txt").read_bytes())
    stages = "0: data/gone=1; 5: data/gone=1,data/mine=2"
    write_config({"data_dir": stages}, "out/run/config.py", "python pretrain.py x")
    assert warning("new.txt") == ""
    said = "trained on most of a.txt (data/mine was made of it), so the loss is too low; that of the val"
    assert warning("new.txt,a.txt") == f"warning: this model was {said} split is in out/run/README.md"
    assert "most of b.txt, same.txt (" in warning("x=b.txt,same.txt")
    write_config({"data_dir": "data/mine"}, "out/run/config.py", "python sft.py x")
    assert warning("a.txt") == ""

    # a run that began with such a one
    monkeypatch.setattr(trained_on.checkpoint, "resolve", lambda path, rewards: Path(path) / "step_000001")
    Path("out/base").mkdir()
    write_config({"data_dir": "data/mine"}, "out/base/config.py", "python pretrain.py x")
    write_config({"init_from": "out/base"}, "out/run/config.py", "python sft.py x")
    assert warning("a.txt").startswith("warning: this model began with base, which was trained on most of a.txt (")


def test_specifications_that_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    with pytest.raises(UserError, match="data is empty"):
        parse_domains(" , ")
    with pytest.raises(UserError, match="two domains are called 'a'"):
        parse_domains(f"{tmp_path}/a.txt,a={tmp_path}/a.txt")
    with pytest.raises(UserError, match="no file matches 'nowhere/x.txt'"):
        parse_domains("zh=nowhere/x.txt")


def test_all_encodings_and_containers_give_the_same_figures(model, tokenizer, tmp_path):
    text = CHINESE * 5
    (tmp_path / "utf8.txt").write_text(text, encoding="utf-8")
    (tmp_path / "gbk.txt").write_bytes(text.encode("gbk"))
    (tmp_path / "utf16.txt").write_bytes(text.encode("utf-16"))
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(json.dumps({"content": text}).encode()))
    found = evaluate_domains(model, tokenizer, parse_domains(f"{tmp_path}/*"), settings(), torch.float32)["domains"]
    notes = {name: of.pop("notes") for name, of in found.items()}
    assert notes == {
        "gbk": ["read as GB18030 (GBK), not UTF-8: 1 document"], "utf8": [], "utf16": [], "packed": [],
    }  # fmt: skip
    assert all(of == found["utf8"] for of in found.values())


def test_what_is_left_out_is_said(model, tokenizer, tmp_path):
    rows = [{"text": "one"}, {"text": " \n"}, {"other": 1}, {"text": "two"}, {"text": "three"}]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "x.jsonl").write_text("\n".join([lines[0], "{broken", *lines[1:]]), encoding="utf-8")
    found = evaluate_domains(model, tokenizer, parse_domains(f"{tmp_path}/x.jsonl"), settings(), torch.float32)
    found = found["domains"]["x"]
    assert found["documents"] == 3
    empty, unread = found["notes"]
    assert empty == "empty, left out: 1 document"
    assert unread.startswith("not read: 2 records (bad_json 1, bad_field 1)")
    assert f"{tmp_path}/x.jsonl:2: bad_json" in unread
    limited = evaluate_domains(model, tokenizer, parse_domains(f"{tmp_path}/x.jsonl"), settings(limit=2), torch.float32)
    assert limited["all"]["bytes"] == len("onetwo")


@pytest.mark.parametrize(
    "content, why",
    [(b"", "empty, left out: 1"), (b" \n\t", "empty, left out: 1"), (b"caf\xe9 \xff\xfe", "bad_encoding")],
    ids=["empty", "white", "latin1"],
)
def test_a_domain_without_text_is_an_error(model, tokenizer, tmp_path, content, why):
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(UserError, match=f"domain 'x' has no text in {tmp_path}/x.txt; .*{why}"):
        evaluate_domains(model, tokenizer, [Domain("x", [str(tmp_path / "x.txt")])], settings(), torch.float32)


def test_conversations_have_tasks_of_their_own(model, tokenizer, tmp_path):
    row = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
    (tmp_path / "x.jsonl").write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        evaluate_domains(model, tokenizer, parse_domains(f"{tmp_path}/x.jsonl"), settings(), torch.float32)
    error = str(caught.value)
    assert "another kind: keys conversations; this is conversations (ShareGPT), of kind='chat'" in error
    assert error.endswith("use --tasks=generation, or for losses --score=FILE --out=OUT.jsonl")


def test_perplexity_that_no_float_holds():
    assert domains.summarize([domains.Loss(1e6, 1, 1, 1)])["perplexity"] == math.inf
    assert math.isnan(domains.summarize([domains.Loss(math.nan, 1, 1, 1)])["perplexity"])


def test_a_tokenizer_without_a_beginning_is_refused(model, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "bos_id", -1)
    assert domains.begin_id(tokenizer) == tokenizer.eot_id
    monkeypatch.setattr(tokenizer, "eot_id", -1)
    with pytest.raises(UserError, match="no token that begins"):
        losses_of(model, tokenizer, ["x"], settings())


def test_a_wrong_column_is_named_once(model, tokenizer, tmp_path):
    rows = [{"id": "x", "body": f"a text, number {i}"} for i in range(9)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        evaluate_domains(model, tokenizer, parse_domains(f"{tmp_path}/x.jsonl"), settings(), torch.float32)
    error = str(caught.value)
    assert error.count("x.jsonl:") == 1 and len(error) < 400
    how = settings(text_key="body")
    found = evaluate_domains(model, tokenizer, parse_domains(f"{tmp_path}/x.jsonl"), how, torch.float32)
    assert found["all"]["documents"] == 9
