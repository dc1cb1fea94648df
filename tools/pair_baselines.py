"""What a reward model has to beat: on its own split of the pairs, "the longer answer wins" and a bag of words.

    python tools/pair_baselines.py --init_from=out/sft --data=pairs.jsonl --val_fraction=0.2

The bag of words is a logistic regression on how often each token is in the chosen answer more than in the rejected one,
log(1 + count) each. It knows nothing of the prompt and of the order of words: what it gets right, style alone tells.
Each share comes with its 95 % Wilson interval.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from configurator import configure
from groundup.errors import UserError
from groundup.scores.judging import wilson
from groundup.tokens.pairs import PairCorpus, Pairs
from groundup.train import checkpoint
from tokenizer import Tokenizer, chat_ready

# ---- config: override with a config file or --key=value; see --help -------------------------------------------------
init_from = "out/sft"  # whose tokenizer counts the words: a run, checkpoint or Hugging Face directory
data = ""  # pairs, as reward.py's
val_data = ""  # likewise, for validation
val_fraction = 0.05  # of the prompts, by their content; for data that have no validation of their own
block_size = 1024  # a longer pair is left out, as in reward.py
seed = 1337  # of the parts of the training pairs that choose how strongly weights are held down

STRENGTHS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
PARTS = 5


def features(pairs: Pairs, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(counts of the chosen answers less those of the rejected ones (n, V) float32, difference of lengths (n,))."""
    rows, longer = torch.zeros(pairs.n_rows, vocab_size), torch.zeros(pairs.n_rows)
    for i in range(pairs.n_rows):
        chosen, rejected = (torch.from_numpy(ids.astype("int64")) for ids in pairs.ids(i)[1:])
        counts = (torch.bincount(ids, minlength=vocab_size).float().log1p() for ids in (chosen, rejected))
        rows[i] = next(counts) - next(counts)
        longer[i] = len(chosen) - len(rejected)
    return rows, longer


def fit(x: Tensor, strength: float) -> Tensor:
    """Weights (V,) of the regression, every pair being a win: mean of -log sigmoid(x w) + strength |w|^2 / 2."""
    weights = torch.zeros(x.shape[1], requires_grad=True)
    solver = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        value = F.softplus(-x @ weights).mean() + strength / 2 * weights.square().sum()
        value.backward()
        return value

    solver.step(loss)
    return weights.detach()


def accuracy(margins: Tensor) -> float:
    """Share of pairs (n,) on the right side; a tie is half right."""
    return ((margins.sign() + 1) / 2).mean().item()


def choose_strength(x: Tensor, seed: int) -> float:
    """The strength that does best over PARTS parts of the pairs, each predicted from the others."""
    part = torch.randint(PARTS, (len(x),), generator=torch.Generator().manual_seed(seed))

    def score(strength: float) -> float:
        return sum(accuracy(x[part == k] @ fit(x[part != k], strength)) for k in range(PARTS))

    return max(STRENGTHS, key=score)


if __name__ == "__main__":
    config = configure(globals())
    if not data:
        raise UserError("config: data is empty; give --data=pairs.jsonl")
    tokenizer = chat_ready(Tokenizer.load(checkpoint.tokenizer_dir(checkpoint.resolve(init_from))))
    corpus = PairCorpus(data, tokenizer, block_size, seed, val_data, val_fraction)
    if not corpus.val:
        raise UserError("config: no pair is held out for validation; raise val_fraction or give val_data")
    print("\n".join(corpus.report()))
    train = torch.cat([features(pairs, tokenizer.vocab_size)[0] for pairs in corpus.train])
    found = [features(pairs, tokenizer.vocab_size) for pairs in corpus.val.values()]
    val, longer = torch.cat([rows for rows, _ in found]), torch.cat([lengths for _, lengths in found])
    strength = choose_strength(train, seed)
    for name, right in (("longer wins", accuracy(longer)), ("bag of words", accuracy(val @ fit(train, strength)))):
        low, high = wilson(right, len(val))
        print(f"{name:<14}{100 * right:5.1f}% ({100 * low:.1f} to {100 * high:.1f}) of {len(val)} held-out pairs")
