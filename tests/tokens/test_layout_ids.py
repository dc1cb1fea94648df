"""Rows of every published layout as ids: equal to transformers' and trl's of the messages written by hand, in every
container.

    PYTHONPATH=.:tests:tests/files python tests/tokens/test_layout_ids.py        # the table
"""

import sys
import tempfile
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).parents[1] / "files"))
import test_layouts
import test_row_formats

from groundup.files.turns import Pair
from groundup.tokens.conversations import ChatReader
from groundup.tokens.pairs import PairReader
from groundup.tokens.training import train
from tokenizer import Tokenizer

# name: (row, messages); those that are refused, or end with a question, give no ids
CHATS = {
    name: (row, messages)
    for name, (row, messages, *_) in {**test_layouts.CHATS, **test_row_formats.CHATS}.items()
    if not isinstance(messages, str) and messages[-1]["role"] == "assistant" and isinstance(row, dict)
}
PAIRS = {
    name: (row, pair)
    for name, (row, pair, *_) in {**test_layouts.PAIRS, **test_row_formats.PAIRS}.items()
    if not isinstance(pair, str) and name != "literal markers"  # with transformers the text becomes markers
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    return load(tmp_path_factory.mktemp("tokenizer"))


def load(folder: Path) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    texts = [str(row) for row, _ in (*CHATS.values(), *PAIRS.values())]
    train([*texts, "system\nuser\nassistant\ntool\n"], 1024).save(folder)
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


def by_transformers(messages: list[dict], theirs: PreTrainedTokenizerFast, **options: bool) -> dict:
    plain = [{key: message[key] for key in ("role", "content")} for message in messages]
    return theirs.apply_chat_template(plain, return_dict=True, return_assistant_tokens_mask=True, **options)


def chat_ids(path: Path, ours: Tokenizer) -> list[tuple[list[int], list[int]]]:
    reader = ChatReader(ours)
    return [(ids.tolist(), mask.tolist()) for _, (ids, mask) in reader.read(str(path))]


def pair_ids(path: Path, ours: Tokenizer) -> list[tuple[list[int], list[int], list[int]]]:
    reader = PairReader(ours, 10**6)
    return [tuple(part.tolist() for part in pair[:3]) for _, pair in reader.read(str(path))]


def expected_chat(messages: list[dict], theirs: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    found = by_transformers(messages, theirs)
    return found["input_ids"], found["assistant_masks"]


def expected_pair(pair: Pair, theirs: PreTrainedTokenizerFast) -> tuple[list[int], list[int], list[int]]:
    """trl's rule: the ids of prompt and answer, without those of the prompt. The template's newline is not learned."""
    prompt = by_transformers(pair.prompt, theirs, add_generation_prompt=True)["input_ids"]
    newline = theirs.encode("\n")
    sides = []
    for answer in (pair.chosen, pair.rejected):
        whole = by_transformers([*pair.prompt, test_layouts.a(answer)], theirs)["input_ids"]
        assert whole[: len(prompt)] == prompt and whole[-len(newline) :] == newline
        sides.append(whole[len(prompt) : -len(newline)])
    return prompt, *sides


def files_of(row: dict, expected: object, read: object, ours: Tokenizer, folder: Path) -> int:
    """Return in how many containers a row has the expected ids; each must have."""
    files = list(test_layouts.write_containers([row], folder))
    assert all(read(file, ours) == [expected] for file in files), row
    return len(files)


def test_a_conversation_has_the_ids_and_mask_of_transformers(tokenizers, tmp_path):
    ours, theirs = tokenizers
    n_files = 0
    for row, messages in CHATS.values():
        n_files += files_of(row, expected_chat(messages, theirs), chat_ids, ours, tmp_path)
    assert len(CHATS) > 70 and n_files > 3.5 * len(CHATS)


def test_a_pair_has_the_ids_of_trl(tokenizers, tmp_path):
    ours, theirs = tokenizers
    n_files = 0
    for row, pair in PAIRS.values():
        n_files += files_of(row, expected_pair(pair, theirs), pair_ids, ours, tmp_path)
    assert len(PAIRS) > 30 and n_files > 3.5 * len(PAIRS)


@pytest.mark.parametrize("name", [name for name, (_, expected) in test_layouts.FLAGS.items() if expected])
def test_only_the_answers_to_learn_have_a_mask(name, tokenizers):
    ours, theirs = tokenizers
    row, expected = test_layouts.FLAGS[name]
    _, (ids, mask) = ChatReader(ours).item(row, "")
    answers = [[*theirs.encode(answer), theirs.convert_tokens_to_ids("<|im_end|>")] for answer in expected]
    assert ids[mask == 1].tolist() == sum(answers, [])


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    ours, theirs = load(folder / "tokenizer")
    print("| layout | kind | containers | ids | learned |\n|---|---|---:|---:|---:|")
    for name, (row, messages) in CHATS.items():
        ids, mask = expected_chat(messages, theirs)
        n_files = files_of(row, (ids, mask), chat_ids, ours, folder)
        print(f"| {name} | chat | {n_files} | {len(ids)} | {sum(mask)} |")
    for name, (row, pair) in PAIRS.items():
        prompt, *sides = expected_pair(pair, theirs)
        n_files = files_of(row, (prompt, *sides), pair_ids, ours, folder)
        learned = sum(map(len, sides))
        print(f"| {name} | preference | {n_files} | {len(prompt) + learned} | {learned} |")
    print(f"{len(CHATS)} conversations and {len(PAIRS)} pairs")


if __name__ == "__main__":
    main()
