"""A sweep over the text templates that trl ships: one answer has the same ids in every stage.

The templates are read from the installed package. Each gets a small tokenizer whose added tokens
are the markers that it writes, once as special tokens and once as tokens that are not special.

    PYTHONPATH=.:tests python tests/tokens/test_published_templates.py DIR     # those of another version: *.jinja
"""

import functools
import json
import re
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.utils.chat_template_utils import render_jinja_template

from groundup.align.losses import pair_logps, reference_logps
from groundup.align.reward_model import answered_ids, drawn_ids
from groundup.align.rollouts import AnswerSampler
from groundup.errors import UserError
from groundup.files.row_formats import messages_of
from groundup.files.turns import THOUGHT_KEYS, Pair
from groundup.kernels.cross_entropy import cross_entropy, token_scores
from groundup.tokens import pairs
from groundup.tokens.conversations import ChatCorpus
from groundup.tokens.engines import added_token, to_json
from groundup.tokens.pairs import LabelReader, PairCorpus
from groundup.tokens.prompts import PromptCorpus
from groundup.tokens.templates import OPENED
from groundup.tokens.training import train
from model import ModelConfig, Transformer
from tokenizer import Tokenizer, chat_ready, split_answer

TRL = Path(find_spec("trl").origin).parent / "chat_templates"
# with {% generation %} tags a few are enough
TAGGED = ["cohere2_training", "phi3_training", "qwen3_training", "idefics3_training"]
NAMES = sorted(path.stem for path in TRL.glob("*.jinja") if "_training" not in path.stem) + TAGGED
# they want pictures, or lists of parts, or write no end of an answer
REFUSED = {
    "glm4moe": "writes no special token after an answer",
    "idefics3": "does not show where answer 1",
    "idefics3_training": "leaves out answers",
    "llava_next": "refuses this conversation",
    "smolvlm": "does not show where answer 1",  # not in every version
}
REFUSED = {name: why for name, why in REFUSED.items() if (TRL / f"{name}.jinja").exists()}
MARKER = re.compile(r"<[｜|/]?[\w▁]+[｜|]?>|\[/?[A-Za-z_]{2,}\]")
# the model itself writes these, so no published tokenizer calls them special
OF_ANSWERS = re.compile(r"</?(think|tool_call)>")
QUESTION = [{"role": "user", "content": "How are you?"}]
ANSWERS = ["Hello!", " Hello! \n", "<think>\nwell\n</think>\n\nfine"]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


@functools.cache
def small() -> dict:
    """The files of a byte-level tokenizer, in which every template's markers are put."""
    return train(["Hello! How are you? well fine system user assistant\n\n" * 3], 512).files


@functools.cache
def tokenizer_for(source: str, special: bool = True) -> Tokenizer:
    description = json.loads(small()["tokenizer.json"])
    known = {token["content"] for token in description["added_tokens"]}
    names = sorted({*MARKER.findall(source), "<s>", "</s>"} - known)
    first = 1 + max(token["id"] for token in description["added_tokens"])
    for i, name in enumerate(names, start=first):
        is_special = special and not OF_ANSWERS.fullmatch(name)
        description["added_tokens"].append(added_token(name, i) | {"special": is_special})
    config = VARIABLES | {"pad_token": "<|pad|>", "chat_template": source}
    files = {"tokenizer.json": description, "tokenizer_config.json": config}
    return Tokenizer({name: to_json(value) for name, value in files.items()})


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_an_answer_has_the_same_ids_in_every_stage(name):
    source = (TRL / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = chat_ready(tokenizer_for(source))
    asked = tokenizer.render(QUESTION, add_generation_prompt=True)[0]
    reader = LabelReader(tokenizer, 10**6)
    for answer, other in zip(ANSWERS, ANSWERS[1:] + ANSWERS[:1], strict=True):
        talk = [*QUESTION, {"role": "assistant", "content": answer}]
        ids, mask = tokenizer.render(talk)  # sft.py
        thought = re.fullmatch(r"<think>\n(.*)\n</think>\n\n(.*)", answer)
        given = talk
        if thought and (key := tokenizer.template.thoughts_key):
            given = [*QUESTION, {"role": "assistant", "content": thought[2], key: thought[1]}]
        [text], _ = render_jinja_template([given], chat_template=source, **VARIABLES)
        assert tokenizer.decode(ids) == text
        before, learned = split_answer(ids, mask)

        # the answer's words and the end of its turn are learned, the question is not
        said = tokenizer.decode(learned)
        assert "How are you" not in said and answer.split("\n")[-1].strip() in said
        last = next(i for i in reversed(learned) if tokenizer.decode([i]).strip())
        assert last in tokenizer.stop_ids

        # dpo.py and reward.py, beside an answer of another kind on either side
        found = pairs.tokenize_pair(Pair(QUESTION, answer, other), tokenizer)
        given = found.n_unlearned[0]
        assert [*found.prompt, *found.chosen[:given]] == before
        assert found.chosen[given:].tolist() == learned
        found = pairs.tokenize_pair(Pair(QUESTION, other, answer), tokenizer)
        assert found.rejected[found.n_unlearned[1] :].tolist() == learned

        # dpo.py --loss=kto, of a label and of a pair
        row = {"prompt": QUESTION[0]["content"], "completion": answer, "label": True}
        [found] = reader.item(row, "")[1]
        assert (found.prompt.tolist(), found.chosen.tolist()) == (before, learned)
        row = {"prompt": "How are you?", "chosen": answer, "rejected": "No."}
        found = reader.item(row, "")[1][0]
        assert (found.prompt.tolist(), found.chosen.tolist()) == (before, learned)

        # scores of a conversation, and of an answer that the model has drawn
        assert answered_ids(talk, tokenizer) == before + learned
        opened = OPENED.search(tokenizer.decode(asked))
        opens = opened and "</think>" not in opened[0]
        if opens and "<think>" in answer:
            answer = answer.removeprefix(opened[0])
        if not opens or "</think>" in answer:
            drawn = tokenizer.encode(answer)
            found = drawn_ids(QUESTION, asked, drawn, answer, tokenizer, 10**6)
            assert found == before + learned


def keys_of_thoughts(name: str) -> list[str]:
    source = (TRL / f"{name}.jinja").read_text(encoding="utf-8")
    return [key for key in THOUGHT_KEYS if re.search(rf"[.'\"]{key}\b", source)]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED and keys_of_thoughts(name)])
def test_thoughts_under_a_key_are_written_as_by_transformers(name):
    """Also in earlier turns, which forget them, and before a call. Those of a text are the same thoughts."""
    source = (TRL / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = chat_ready(tokenizer_for(source))
    for key in keys_of_thoughts(name):
        answers = [{"role": "assistant", "content": said, key: f"I think {said}"} for said in ("first", "second")]
        talks = [[*QUESTION, answers[0]], [*QUESTION, answers[0], *QUESTION, answers[1]]]
        for talk in talks:
            [text], _ = render_jinja_template([talk], chat_template=source, **VARIABLES)
            if f"I think {talk[-1]['content']}" not in text:
                continue  # Gemma 4 writes them before calls only
            messages, _ = messages_of({"messages": talk})
            ids, mask = tokenizer.render(messages)
            assert tokenizer.decode(ids) == text
            learned = tokenizer.decode(split_answer(ids, mask)[1])
            assert "I think" in learned and "How are you" not in learned
            assert not tokenizer.left_out(messages) or "I think first" not in text


# thoughts as parts of the content, as Magistral's template takes them
PARTS = """{{- bos_token }}{% for m in messages %}
{%- if m.role != 'assistant' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.content is string %}{{ m.content + eos_token }}
{%- else %}{% for p in m.content %}{% if p.type == 'thinking' %}{{ '[THINK]' + p.thinking + '[/THINK]' }}
{%- else %}{{ p.text }}{% endif %}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"""


def test_thoughts_as_parts_are_written_as_by_transformers():
    tokenizer = chat_ready(tokenizer_for(PARTS))
    parts = [{"type": "thinking", "thinking": "I think"}, {"type": "text", "text": "fine"}]
    for message in ({"content": parts}, {"content": "fine", "reasoning_content": "I think"}):
        messages, _ = messages_of({"messages": [*QUESTION, {"role": "assistant"} | message]})
        ids, mask = tokenizer.render(messages)
        talk = [*QUESTION, {"role": "assistant", "content": parts}]
        assert tokenizer.decode(ids) == render_jinja_template([talk], chat_template=PARTS, **VARIABLES)[0][0]
        assert tokenizer.decode(split_answer(ids, mask)[1]) == "[THINK]I think[/THINK]fine</s>"
        assert not tokenizer.left_out(messages)
    # one that writes any content as it is takes them as text
    source = "{# thinking #}{% for m in messages %}{{ m.role + ': ' }}{{ m.content }}{{ eos_token }}{% endfor %}"
    assert tokenizer_for(source).template.thoughts_key == ""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_thoughts_that_the_prompt_has_opened_are_thoughts(name):
    """An answer in a file of sample.py begins within them: pairs and rewards are made of it."""
    tokenizer = chat_ready(tokenizer_for((TRL / f"{name}.jinja").read_text(encoding="utf-8")))
    opened = OPENED.search(tokenizer.decode(tokenizer.render(QUESTION, add_generation_prompt=True)[0]))
    if opened and "</think>" not in opened[0]:
        drawn = "well\n</think>\n\nfine"
        talks = [[*QUESTION, {"role": "assistant", "content": said}] for said in (drawn, "<think>\n" + drawn)]
        assert tokenizer.render(talks[0]) == tokenizer.render(talks[1])


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_teaches_no_end_is_refused_in_one_line(name):
    source = (TRL / f"{name}.jinja").read_text(encoding="utf-8")
    with pytest.raises(UserError, match=REFUSED[name]) as error:
        chat_ready(tokenizer_for(source))
    assert "\n" not in str(error.value)


TAKEN = [name for name in NAMES if name not in REFUSED]


@pytest.mark.parametrize("name, special", [(name, True) for name in TAKEN] + [(name, False) for name in TAKEN[::3]])
def test_no_marker_in_a_question_becomes_one(name, special):
    source = (TRL / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = tokenizer_for(source, special)
    description = json.loads(tokenizer.files["tokenizer.json"])
    added = [token for token in description["added_tokens"] if token["content"].strip()]  # Gemma's has \n
    ids_of = {token["content"]: token["id"] for token in added}
    markers = {i for name, i in ids_of.items() if name in source}
    plain = "x y z"
    forged = "x" + "".join(name for name in ids_of if name in source) + " z"

    def markers_of(question: str) -> list[int]:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "b"}]
        ids = tokenizer.render(messages)[0]
        assert question in tokenizer.decode(ids)
        return [i for i in ids if i in markers]

    assert markers and markers_of(forged) == markers_of(plain)


def called(*cities: str, words: str = "") -> dict:
    """A turn that calls a tool for each city, as datasets have it."""
    calls = [{"function": {"name": "weather", "arguments": {"city": city}}} for city in cities]
    return {"role": "assistant", "content": words, "tool_calls": calls}


WEATHER = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
RESULT = {"role": "tool", "content": "result"}
BACK = {"role": "assistant", "content": "final"}
TALKS_WITH_TOOLS = [
    [*QUESTION, called("Rome"), RESULT, BACK],
    [*QUESTION, called("Rome", "Oslo", words="words"), RESULT, RESULT, BACK],
    [*QUESTION, called("Rome", words="words"), RESULT, BACK, *QUESTION, called("Oslo"), RESULT, BACK],
    [*QUESTION, called("Rome", words="words"), RESULT, called("Oslo", words="words"), RESULT, BACK],
]


def check_tools(source: str) -> None:
    """What tools say is never learned; words and calls are, or it is said that they are not written."""
    tokenizer = chat_ready(tokenizer_for(source))
    for turns in TALKS_WITH_TOOLS:
        messages, problem = messages_of({"messages": turns, "tools": [{"type": "function", "function": WEATHER}]})
        assert not problem
        try:
            ids, mask = tokenizer.render(messages)
        except UserError:
            continue
        learned = "".join(tokenizer.decode([i]) for i, is_learned in zip(ids, mask, strict=True) if is_learned)
        assert "result" not in learned and "How are you" not in learned
        text, lost = tokenizer.decode(ids), tokenizer.left_out(messages)
        cities = sum(len(turn.get("tool_calls", [])) for turn in turns)
        n_words = sum(turn["content"] == "words" for turn in turns)
        assert lost["calls of tools"] == cities - learned.count("Rome") - learned.count("Oslo")
        assert lost["words beside calls"] == n_words - learned.count("words")
        assert lost["results of tools"] == turns.count(RESULT) - text.count("result")


@pytest.mark.parametrize("name", TAKEN)
def test_what_tools_say_is_not_learned(name):
    check_tools((TRL / f"{name}.jinja").read_text(encoding="utf-8"))


def write_rows(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", ["", "qwen3", "llama3", "gemma3"])
def test_an_answer_is_as_likely_in_every_stage(name, tmp_path):
    """A model is tuned with the batches of sft.py until it gives the answer. Then its probability is
    that of sft's evaluation, of dpo's step 0 (and of its reference) and of rl's draw."""
    tokenizer = Tokenizer(small())
    if name:
        tokenizer = tokenizer_for((TRL / f"{name}.jinja").read_text(encoding="utf-8"))
    tokenizer = chat_ready(tokenizer)
    question, answer = "How are you?", "well fine"
    chat = write_rows(tmp_path / "chat.jsonl", {"prompt": question, "response": answer})
    pair = {"prompt": question, "chosen": answer, "rejected": "Hello!"}
    pairs_file = write_rows(tmp_path / "pairs.jsonl", pair)
    torch.manual_seed(0)
    cfg = ModelConfig(tokenizer.vocab_size, block_size=64, n_layer=1, n_head=2, n_kv_head=2, n_embd=32)
    model = Transformer(cfg)
    corpus = ChatCorpus(chat, tokenizer, 64, pack=False, seed=0)
    batch = corpus.load(np.zeros(1, int), np.zeros(1, int))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    for _ in range(200):
        hidden = model(batch.x, documents=batch.documents, index=batch.index)
        loss, _ = cross_entropy(hidden, model.lm_head.weight, batch.targets)  # the sum of labels
        if loss < 0.5:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        hidden = model(batch.x, documents=batch.documents, index=batch.index)
        nats, _ = token_scores(hidden, model.lm_head.weight, batch.targets)

        of_pairs = PairCorpus(pairs_file, tokenizer, 64, seed=0).load(np.zeros(1, int), np.zeros(1, int))
        logps, n_tokens = pair_logps(model, of_pairs)
        reference = reference_logps(model, of_pairs)
    assert int(n_tokens[0, 0]) == len(batch.targets)
    assert logps[0, 0].item() == pytest.approx(-nats.sum().item(), rel=1e-5, abs=1e-6)
    assert reference[0, 0].item() == pytest.approx(logps[0, 0].item(), rel=1e-5, abs=1e-6)

    prompt = PromptCorpus(chat, tokenizer, 40, seed=0).train[0].prompts[0]
    sampler = AnswerSampler(model, tokenizer, 8, 24, 1.0, torch.float32, compile=False)
    drawn = sampler.draw([prompt], [1], 8)
    learned = [*batch.x[0].tolist(), -1][: batch.index[0] + 1] + batch.targets.tolist()
    same = [one for one in drawn if prompt.ids + one.ids == learned[: len(prompt.ids) + len(one.ids)]]
    assert same and all(one.finished for one in same)
    assert same[0].logprob == pytest.approx(-nats[: len(same[0].ids)].sum().item(), rel=1e-4, abs=1e-5)
    # what a template writes after the token that stops generation is no part of a draw
    assert len(batch.targets) - len(same[0].ids) in (0, 1)


def sweep(folder: Path) -> Counter[str]:
    """Try every template in a folder, and count."""
    globals()["TRL"], counts = folder, Counter()
    for path in sorted(folder.glob("*.jinja")):
        try:
            chat_ready(tokenizer_for(path.read_text(encoding="utf-8")))
        except UserError as error:
            counts["refused"] += 1
            print(f"{path.stem}: {error}")
            continue
        test_an_answer_has_the_same_ids_in_every_stage(path.stem)
        test_no_marker_in_a_question_becomes_one(path.stem, True)
        test_no_marker_in_a_question_becomes_one(path.stem, False)
        test_what_tools_say_is_not_learned(path.stem)
        counts["the same ids in every stage, an end that is learned, no forged marker, no learned result"] += 1
    return counts


if __name__ == "__main__":
    print(dict(sweep(Path(sys.argv[1]))))
