"""choices.py: prompts and log-probabilities of transformers and of lm-eval, question by question; scores by hand."""

import csv
import json
import math
import statistics
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import tokenizer as tok
from groundup.demo import debug_data
from groundup.errors import UserError
from groundup.scores.choices import evaluate_choices, likeliest, read_task, subjects_file, summary
from groundup.scores.tables import describe_choices
from groundup.tokens.training import train
from groundup.train import huggingface
from model import ModelConfig, Transformer

LETTERS = "ABCD"
SPLIT = {"mmlu": "test", "cmmlu": "test", "ceval": "val"}
EXAMS = ("mmlu", "cmmlu", "ceval")
# What lm-eval 0.4 has in the files of its tasks.
INTRO = {
    "mmlu": "The following are multiple choice questions (with answers) about {}.\n\n",
    "cmmlu": "以下是关于{}的单项选择题，请直接给出正确答案的选项。\n\n",
    "ceval": "以下是中国关于{}的单项选择题，请选出其中的正确答案。\n\n",
    "mmlu_text": "The following are questions (with answers) about {}.\n\n",
    "cmmlu_text": "以下是关于{}的问题及其答案。\n\n",
    "ceval_text": "以下是关于{}的问题及其答案。\n\n",
}
TITLE = {"high_school_us_history": "high school us history", "anatomy": "anatomy"}
TITLE_ZH = {"cmmlu": {"anatomy": "解剖学", "modern_chinese": "现代汉语"}, "ceval": {"law": "法学", "logic": "逻辑学"}}


# ---- questions and a model ------------------------------------------------------------------------------------------


def english(i: int) -> list[str]:
    """question, A, B, C, D, letter; some with commas, quotes, a line end, and white space around the question."""
    question = [f"What is {i} plus {i}?", f' Who said "{i}, and then\nmore"? ', f"The {i}th of them, and why:"][i % 3]
    return [question, f"It is {2 * i}", f"nobody, or {i} men", "the " * (i % 4) + "last", "x", LETTERS[i * 7 % 4]]


def chinese(i: int) -> list[str]:
    question = [f"下列第{i}项中正确的是", f"“{i}加{i}”等于多少？", f"第{i}个字，读音是____"][i % 3]
    return [question, f"等于{2 * i}", "以上都不对，" * (i % 3 + 1), f"{i}和{i + 1}", "不知道", LETTERS[i * 5 % 4]]


def write_csv(path: Path, header: list[str], rows: list[list[str]], encoding: str = "utf-8") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding=encoding, newline="") as file:
        csv.writer(file).writerows([header] * bool(header) + rows)


def exam_rows(task: str, subject: str, split: str) -> list[list[str]]:
    first = {"dev": 0, "test": 20, "val": 20}[split] + 3 * len(subject)
    n = 5 if split == "dev" else 4
    return [(english if task == "mmlu" else chinese)(i) for i in range(first, first + n)]


def write_exam(folder: Path, task: str) -> Path:
    subjects = list(TITLE) if task == "mmlu" else list(TITLE_ZH[task])
    for subject in subjects:
        for split in ("dev", SPLIT[task]):
            rows = exam_rows(task, subject, split)
            if task == "mmlu":
                write_csv(folder / split / f"{subject}_{split}.csv", [], rows)
            elif task == "cmmlu":
                rows = [[str(k), *row] for k, row in enumerate(rows)]
                write_csv(folder / split / f"{subject}.csv", ["", "Question", *LETTERS, "Answer"], rows)
            else:
                extra = split == "dev"
                rows = [[str(k), *row, *["因为如此"] * extra] for k, row in enumerate(rows)]
                header = ["id", "question", *LETTERS, "answer", *["explanation"] * extra]
                write_csv(folder / split / f"{subject}_{split}.csv", header, rows)
    (folder / SPLIT[task] / f"._{subjects[0]}.csv").write_bytes(b"\0\5\x16\7Mac OS X\xff")  # no subject
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A directory for each benchmark, and model/, small and of random weights."""
    folder = tmp_path_factory.mktemp("choices")
    debug_data.make_debug_data(folder / "data")
    tokenizer = tok.Tokenizer.load(folder / "data")
    save_model(folder / "model", tokenizer, block_size=1024)
    for task in EXAMS:
        write_exam(folder / task, task)
    return folder


def save_model(folder: Path, tokenizer: tok.Tokenizer, block_size: int) -> None:
    torch.manual_seed(0)
    cfg = ModelConfig(tokenizer.vocab_size, block_size=block_size, n_layer=2, n_head=4, n_kv_head=2, n_embd=32)
    model = Transformer(cfg)
    for p in model.parameters():
        p.data.mul_(4)  # logits that differ
    folder.mkdir()
    huggingface.write_model(folder, model, tokenizer)


def data_of(base: Path, task: str) -> str:
    return str(base / task.removesuffix("_text"))


def evaluate(base: Path, task: str, shots: int, model: str = "model", **others: int) -> dict:
    folder = base / model
    tokenizer = tok.Tokenizer.load(folder)
    return evaluate_choices(
        huggingface.load_model(folder), tokenizer, task, data_of(base, task), shots, 3, torch.float32, **others
    )


# ---- the same by transformers ---------------------------------------------------------------------------------------


def prompts_of(task: str, shots: int) -> list[tuple[str, list[str], int]]:
    """(context, answers, right) of every question, in the order of files and rows."""
    exam, english_exam = task.removesuffix("_text"), task.startswith("mmlu")
    titles = TITLE if english_exam else TITLE_ZH[exam]
    colon = "Answer:" if english_exam else "答案："

    def ask(row: list[str]) -> str:
        if task == exam:
            return "\n".join([row[0].strip(), *[f"{a}. {t}" for a, t in zip(LETTERS, row[1:5], strict=True)], colon])
        return ("Question: " if english_exam else "问题：") + row[0].strip() + "\n" + colon

    def answers(row: list[str]) -> list[str]:
        return [*LETTERS] if task == exam else row[1:5]

    found = []
    for subject in sorted(titles):
        context = INTRO[task].format(titles[subject])
        for row in exam_rows(exam, subject, "dev")[:shots]:
            context += ask(row) + " " + answers(row)[LETTERS.index(row[5])] + "\n\n"
        for row in exam_rows(exam, subject, SPLIT[exam]):
            found.append((context + ask(row), answers(row), LETTERS.index(row[5])))
    return found


@torch.no_grad()
def logprob(hf_model, hf_tokenizer, context: str, answer: str, cut: int = 10**9) -> float:
    """One row, one call, the whole table of log-softmax."""
    ids = hf_tokenizer(f"{context} {answer}")["input_ids"]
    n_context = len(hf_tokenizer(context.rstrip())["input_ids"])
    n_answer = len(ids) - n_context
    ids = torch.tensor(ids[-cut:])
    logps = hf_model(ids[None, :-1]).logits[0].log_softmax(-1)
    return logps.gather(1, ids[1:, None])[-n_answer:].sum().item()


def n_bytes(text: str) -> int:
    return len(text.encode())


def hf(base: Path, model: str = "model") -> tuple:
    return AutoModelForCausalLM.from_pretrained(base / model), AutoTokenizer.from_pretrained(base / model)


@pytest.mark.parametrize("task", ["mmlu", "cmmlu_text", "ceval_text"])  # lm-eval answers all below
def test_log_probabilities_and_choices_are_those_of_transformers(base, task):
    shots = 2 if task != "ceval_text" else 0
    found, prompts = evaluate(base, task, shots), prompts_of(task, shots)
    assert len(found["records"]) == len(prompts) == 8
    both = hf(base)
    for record, (context, answers, right) in zip(found["records"], prompts, strict=True):
        expected = [logprob(*both, context, answer) for answer in answers]
        assert record["logprobs"] == pytest.approx(expected, abs=1e-4)
        assert (record["right"], record["shots"], record["cut_tokens"]) == (right, shots, 0)
        assert record["chosen"]["acc"] == max(range(len(answers)), key=expected.__getitem__)
        for measure, length in () if task in EXAMS else (("acc_norm", len), ("acc_bytes", n_bytes)):
            rates = [p / length(a) for p, a in zip(expected, answers, strict=True)]
            assert record["chosen"][measure] == max(range(len(answers)), key=rates.__getitem__)
    assert found["fewer_shots"] == found["cut"] == 0
    assert set(found["records"][0]["chosen"]) == ({"acc"} if task in EXAMS else {"acc", "acc_norm", "acc_bytes"})
    right = [record["chosen"]["acc"] == record["right"] for record in found["records"]]
    assert found["overall"]["acc"] == sum(right) / 8


def test_sentencepiece_and_any_batch_size(base, tmp_path):
    """Its letter after a space is another token than the letter alone."""
    texts = [row[0] + row[1] for i in range(200) for row in (english(i), chinese(i))]
    save_model(tmp_path / "model", train(texts, 384, backend="sentencepiece"), block_size=1024)
    tokenizer, model = tok.Tokenizer.load(tmp_path / "model"), huggingface.load_model(tmp_path / "model")
    both = hf(tmp_path)
    for task in ("cmmlu", "mmlu_text"):
        one, many = (
            evaluate_choices(model, tokenizer, task, data_of(base, task), 1, size, torch.float32)["records"]
            for size in (1, 64)
        )
        for a, b, (context, answers, _) in zip(one, many, prompts_of(task, 1), strict=True):
            assert a["logprobs"] == pytest.approx(b["logprobs"], abs=1e-4)
            expected = [logprob(*both, context, answer) for answer in answers]
            assert a["logprobs"] == pytest.approx(expected, abs=1e-4)


def test_too_long_prompts_lose_examples_then_their_beginning(base):
    prompts, both = {n: prompts_of("mmlu", n) for n in range(4)}, hf(base)
    longest = {n: [len(both[1](f"{c} D")["input_ids"]) for c, *_ in prompts[n]] for n in prompts}
    size = sorted(longest[2])[4]  # some fit with two examples and some with one
    found = evaluate(base, "mmlu", 3, block_size=size)
    fits = [max(n for n in prompts if longest[n][i] <= size + 1) for i in range(8)]
    assert [record["shots"] for record in found["records"]] == fits
    assert (found["fewer_shots"], found["cut"]) == (sum(n < 3 for n in fits), 0) and {1, 2} <= set(fits)
    for i, record in enumerate(found["records"]):
        assert record["logprobs"][1] == pytest.approx(logprob(*both, prompts[fits[i]][i][0], "B"), abs=1e-4)

    size = sorted(longest[0])[4] - 1  # the model reads all but the last token
    found = evaluate(base, "mmlu", 1, block_size=size)
    assert [record["cut_tokens"] for record in found["records"]] == [max(0, n - size - 1) for n in longest[0]]
    assert found["cut"] == sum(n > size + 1 for n in longest[0]) > 0
    for i, record in enumerate(found["records"]):
        if record["cut_tokens"]:
            expected = [logprob(*both, prompts[0][i][0], letter, cut=size + 1) for letter in LETTERS]
            assert record["logprobs"] == pytest.approx(expected, abs=1e-4)


def test_an_answer_longer_than_the_block_is_an_error(base, tmp_path):
    write_csv(tmp_path / "test" / "x_test.csv", [], [english(0), ["q", "no", "long " * 40, "c", "d", "A"]])
    model, tokenizer = huggingface.load_model(base / "model"), tok.Tokenizer.load(base / "model")
    with pytest.raises(UserError, match=r"x_test.csv:2: an answer of \d+ tokens does not fit in block_size=20"):
        evaluate_choices(model, tokenizer, "mmlu_text", str(tmp_path), 0, 4, torch.float32, block_size=20)


# ---- the same by lm-eval --------------------------------------------------------------------------------------------


LM_EVAL_TEXT = {
    "mmlu": "{{question.strip()}}\nA. {{A}}\nB. {{B}}\nC. {{C}}\nD. {{D}}\nAnswer:",
    "mmlu_text": "Question: {{question.strip()}}\nAnswer:",
    "cmmlu": "{{Question.strip()}}\nA. {{A}}\nB. {{B}}\nC. {{C}}\nD. {{D}}\n答案：",
    "ceval": "{{question.strip()}}\nA. {{A}}\nB. {{B}}\nC. {{C}}\nD. {{D}}\n答案：",
}


def lm_eval_task(base: Path, folder: Path, task: str, subject: str) -> str:
    """The name of a task for lm-eval, written to folder, on the same files and with the templates of its own tasks."""
    exam = task.removesuffix("_text")
    split = SPLIT[exam]
    template = {"task": f"our_{task}_{subject}", "num_fewshot": 2, "output_type": "multiple_choice"}
    template |= {"test_split": split, "fewshot_split": "dev", "fewshot_config": {"sampler": "first_n"}}
    suffix = "" if exam == "cmmlu" else "_{}"
    files = {s: str(base / exam / s / f"{subject}{suffix.format(s)}.csv") for s in ("dev", split)}
    columns = {"names": ["question", *LETTERS, "answer"], "header": None} if exam == "mmlu" else {}
    answer = "Answer" if exam == "cmmlu" else "answer"
    title = (TITLE | TITLE_ZH.get(exam, {}))[subject]
    template |= {"dataset_path": "csv", "description": INTRO[task].format(title)}
    template |= {"doc_to_target": f"{{{{['A', 'B', 'C', 'D'].index({answer})}}}}"}
    template |= {"doc_to_choice": [*LETTERS] if task == exam else "{{[A, B, C, D]}}"}
    template |= {"doc_to_text": LM_EVAL_TEXT[task], "dataset_kwargs": {"data_files": files, **columns}}
    measures = ["acc"] if task in EXAMS else ["acc", "acc_norm", "acc_bytes"]
    template |= {"metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in measures]}
    text = yaml.safe_dump(template, allow_unicode=True)
    (folder / f"{task}_{subject}.yaml").write_text(text, encoding="utf-8")
    return template["task"]


@pytest.mark.slow
def test_every_question_is_answered_as_by_lm_eval(base, tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    subjects = {task: list(TITLE if task.startswith("mmlu") else TITLE_ZH[task]) for task in LM_EVAL_TEXT}
    names = {(task, s): lm_eval_task(base, tmp_path, task, s) for task in subjects for s in subjects[task]}
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    lm = HFLM(pretrained=str(base / "model"), device="cpu", dtype="float32", batch_size=4)
    theirs = lm_eval.simple_evaluate(lm, tasks=[*names.values()], task_manager=manager, bootstrap_iters=1)
    found = {task: evaluate(base, task, 2) for task in subjects}
    for (task, subject), name in names.items():
        records = [record for record in found[task]["records"] if record["subject"] == subject]
        samples = sorted(theirs["samples"][name], key=lambda sample: sample["doc_id"])
        for record, sample in zip(records, samples, strict=True):
            assert record["logprobs"] == pytest.approx([float(r[0][0]) for r in sample["resps"]], abs=1e-4)
            right = {m: float(chosen == record["right"]) for m, chosen in record["chosen"].items()}
            assert right == {m: sample[m] for m in right}
        score, of_theirs = found[task]["subjects"][subject], theirs["results"][name]
        for measure in records[0]["chosen"]:
            assert score[measure] == pytest.approx(of_theirs[f"{measure},none"])
            assert score[f"{measure}_stderr"] == pytest.approx(of_theirs[f"{measure}_stderr,none"])


def test_subjects_are_introduced_as_in_the_files_of_lm_eval():
    folder = Path(pytest.importorskip("lm_eval").__file__).parent / "tasks"
    patterns = {"mmlu": "mmlu/default/mmlu_*", "cmmlu": "cmmlu/cmmlu_*", "ceval": "ceval/ceval-valid_*"}
    for exam, pattern in patterns.items():
        words, files = subjects_file()[exam], sorted(folder.glob(pattern + ".yaml"))
        assert len(files) == {"mmlu": 57, "cmmlu": 67, "ceval": 52}[exam]
        for file in files:
            theirs = yaml.safe_load(file.read_text(encoding="utf-8"))
            name = theirs["dataset_name"]
            title = words["names"].get(name, name.replace("_", " "))
            assert words["letters_intro"].format(title) == theirs["description"]


# ---- scores by hand -------------------------------------------------------------------------------------------------


def answered(subject: str, right: bool, n_answers: int = 4) -> dict:
    chosen = {"acc": 1 if right else 0}
    known = {"subject": subject, "logprobs": [0.0] * n_answers, "right": 1, "chosen": chosen}
    return known | {"shots": 5, "cut_tokens": 0}


def test_accuracies_standard_errors_and_chance_by_hand():
    records = [answered("anatomy", True), answered("anatomy", False), answered("anatomy", True, 5)]
    records += [answered("virology", False), answered("my_own", True) | {"shots": 3, "cut_tokens": 7}]
    groups = {"a": ["anatomy"], "b": ["anatomy", "virology"], "none": ["law"]}
    found = summary(records, groups, shots=5)
    assert found["overall"] == {"n": 5, "chance": pytest.approx((4 / 4 + 1 / 5) / 5), "acc": 0.6} | {
        "acc_stderr": pytest.approx(statistics.stdev([1, 0, 1, 0, 1]) / math.sqrt(5))
    }
    assert found["subjects"]["anatomy"]["acc_stderr"] == pytest.approx(statistics.stdev([1, 0, 1]) / math.sqrt(3))
    assert found["subjects"]["virology"] == {"n": 1, "chance": 0.25, "acc": 0.0, "acc_stderr": None}
    assert {name: (s["n"], s["acc"]) for name, s in found["groups"].items()} == {"a": (3, 2 / 3), "b": (4, 0.5)}
    assert found["subject_mean"] == {"acc": pytest.approx((2 / 3 + 0 + 1) / 3)}
    assert (found["fewer_shots"], found["cut"]) == (1, 1)


def test_the_likeliest_answer_by_sum_and_by_length():
    assert likeliest([-3.0, -2.0, -2.0], [1, 1, 1]) == 1  # the first of equals
    assert likeliest([-3.0, -2.0], [6, 3]) == 0  # -0.5 and -0.667
    assert likeliest([-3.0, -1.0], [4, 0]) == 0  # an empty text


def test_groups_are_those_of_the_publishers():
    """Sizes from the papers: arXiv:2009.03300, 2306.09212 (table 4), 2305.08322 (figure 1)."""
    exams = subjects_file()
    sizes = {exam: {name: len(members) for name, members in words["groups"].items()} for exam, words in exams.items()}
    assert sizes["mmlu"] == {"STEM": 18, "humanities": 13, "social sciences": 12, "other": 14}
    main = {"STEM": 17, "humanities": 13, "social sciences": 22, "other": 15}
    assert sizes["cmmlu"] == main | {"China specific": 15}
    assert sizes["ceval"] == {"STEM": 20, "social sciences": 10, "humanities": 11, "other": 11, "hard": 8}
    for exam, words in exams.items():
        extra = {"China specific", "hard"}
        members = Counter(name for group, names in words["groups"].items() for name in names if group not in extra)
        assert set(members.values()) == {1} and len(members) == {"mmlu": 57, "cmmlu": 67, "ceval": 52}[exam]
        assert exam == "mmlu" or set(members) == set(words["names"])
        assert {name for group in extra & set(words["groups"]) for name in words["groups"][group]} <= set(members)


def test_table_and_records(base):
    found = evaluate(base, "cmmlu", 1, limit=3)
    assert found["overall"]["n"] == 6 and {s["n"] for s in found["subjects"].values()} == {3}
    text = describe_choices(found)
    p, error = found["overall"]["acc"], found["overall"]["acc_stderr"]
    assert f"{100 * p:.1f} +- {100 * error:.1f}" in text.split("overall")[1].split("\n")[0]
    assert all(name in text for name in ("cmmlu, 1 shots", "China specific", "modern_chinese", "25.0"))
    assert json.loads(json.dumps(found)) == found
    assert found["records"][3]["where"].endswith("modern_chinese.csv:2")


# ---- files ----------------------------------------------------------------------------------------------------------


def test_gbk_files_are_read_and_said(base, tmp_path):
    write_exam(tmp_path / "cmmlu", "cmmlu")
    for split in ("dev", "test"):
        path = tmp_path / "cmmlu" / split / "modern_chinese.csv"
        path.write_bytes(path.read_text(encoding="utf-8").encode("gb18030"))
    subjects, notes = read_task("cmmlu", str(tmp_path / "cmmlu"), 2)
    expected, nothing = read_task("cmmlu", str(base / "cmmlu"), 2)
    names = "dev/modern_chinese.csv, test/modern_chinese.csv"
    assert notes == [f"read as GB18030 (GBK), not UTF-8: {names}"] and nothing == []
    plain = [[q._replace(where="") for q in (*s.examples, *s.questions)] for s in subjects]
    assert plain == [[q._replace(where="") for q in (*s.examples, *s.questions)] for s in expected]
    assert any("下列第" in question.text for question in plain[1])


def test_gbk_without_a_header_and_a_subject_of_no_group(tmp_path):
    rows = [chinese(i) for i in range(9)]
    write_csv(tmp_path / "test" / "my_subject_test.csv", [], rows, encoding="gbk")
    (subject,), notes = read_task("mmlu", str(tmp_path), 0)
    assert subject.intro == INTRO["mmlu"].format("my subject")
    assert [q.text.split("\n")[0] for q in subject.questions] == [row[0] for row in rows]
    assert notes == [
        "read as GB18030 (GBK), not UTF-8: test/my_subject_test.csv",
        "of no group, only in the overall score: my_subject",
    ]


HEADER = ",Question,A,B,C,D,Answer\n"


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "anatomy.csv holds no question"),
        (HEADER.encode(), "anatomy.csv holds no question"),
        (b",Question,A,B,C,Answer\n0,q,a,b,c,A\n", "anatomy.csv:2: no field 'D'; there are '', 'Question', 'A', 'B'"),
        (f"{HEADER}0,q,a,b,c,d,A\n1,q,a,b,c,A\n".encode(), "anatomy.csv:3: bad_csv: 6 fields, but 7 columns"),
        (f"{HEADER}0,q,a,b,c,d,E\n".encode(), "anatomy.csv:2: Answer is 'E', not one of A, B, C, D"),
        (f"{HEADER}0,q,a,b,c,d,\n".encode(), "anatomy.csv:2: Answer is '', not one of A, B, C, D"),
        (HEADER.encode() + b'0,"q,a,b,c,d,A\n', "anatomy.csv:2: bad_csv: unexpected end of data"),
        (HEADER.encode() + b"0,\xff\xff,a,b,c,d,A\n", "bad_encoding: not UTF-8: 1 of 2 lines looked at"),
    ],
)
def test_what_is_wrong_in_a_csv_file_is_said_with_file_and_line(tmp_path, content, message):
    path = tmp_path / "test" / "anatomy.csv"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_task("cmmlu", str(tmp_path), 0)
    assert message in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_wrong_in_the_request_is_said(base, tmp_path):
    for task, path, shots, message in [
        ("mmlu", base / "ceval", 0, r"no test/\*.csv in .*; give the directory that holds dev and test"),
        ("mmlu", base / "mmlu", 6, "anatomy_dev.csv holds 5 examples, fewer than shots=6; give --shots=5 or less"),
    ]:
        with pytest.raises(UserError, match=message):
            read_task(task, str(path), shots)
    (base / "mmlu" / "dev").rename(tmp_path / "dev")
    try:
        with pytest.raises(ValueError, match="anatomy_dev.csv holds 0 examples.* give --shots=0"):
            read_task("mmlu", str(base / "mmlu"), 1)
        assert len(read_task("mmlu", str(base / "mmlu"), 0)[0]) == 2
    finally:
        (tmp_path / "dev").rename(base / "mmlu" / "dev")


def test_texts_that_are_letters_have_every_measure(base, tmp_path):
    write_csv(tmp_path / "test" / "x_test.csv", [], [["Which?", *"ABCD", "B"], english(1)])
    model, tokenizer = huggingface.load_model(base / "model"), tok.Tokenizer.load(base / "model")
    found = evaluate_choices(model, tokenizer, "mmlu_text", str(tmp_path), 0, 4, torch.float32)
    first = found["records"][0]["chosen"]
    assert set(first) == {"acc", "acc_norm", "acc_bytes"} and len(set(first.values())) == 1
    assert found["overall"]["n"] == 2
