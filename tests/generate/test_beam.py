"""Beam search of beam.py, driven with transformers' own model, against generate() and against all sequences."""

import itertools
import math

import pytest
import torch

from groundup.errors import UserError
from groundup.generate.beam import Beam, BeamParams, Beams

V, K, N_NEW = 24, 3, 9
PROMPTS = [[5, 7, 9], [3, 11, 17, 4, 4], [20], [8, 8]]


@pytest.fixture(scope="module")
def llama():
    """Large weights, so that distributions are peaked and stop ids come at all ages."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, initializer_range=0.35,
        bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).eval()


@torch.no_grad()
def search(llama, prompts: list[list[int]], params: BeamParams, limits: list[int] | None = None):
    """The finished beams of each prompt. Every step recomputes the whole of every row; rows are put together from
    tokens and parents alone."""
    found = []
    for prompt, limit in zip(prompts, limits or [params.max_new_tokens] * len(prompts), strict=True):
        beams = Beams(prompt, params, limit, V)
        rows = [list(prompt) for _ in range(params.num_beams)]
        while not beams.ended:
            tokens, parents = beams.advance(last_logits(llama, rows))
            rows = [rows[p] + [t] for t, p in zip(tokens.tolist(), parents.tolist(), strict=True)]
        found.append(beams.finished)
    return found


def last_logits(llama, rows: list[list[int]]) -> torch.Tensor:
    """One call per length."""
    out = torch.empty(len(rows), V)
    for length in {len(row) for row in rows}:
        which = [i for i, row in enumerate(rows) if len(row) == length]
        out[which] = llama(torch.tensor([rows[i] for i in which]), use_cache=False).logits[:, -1]
    return out


def theirs(llama, prompt: list[int], params: BeamParams, limit: int = 0) -> list[tuple[list[int], float]]:
    ids = torch.tensor([prompt])
    out = llama.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=params.num_beams,
        num_return_sequences=params.num_beams, max_new_tokens=limit or params.max_new_tokens,
        min_new_tokens=params.min_new_tokens or None, repetition_penalty=params.repetition_penalty,
        suppress_tokens=list(params.banned_ids) or None, length_penalty=params.length_penalty,
        early_stopping={"false": False, "true": True, "never": "never"}[params.early_stopping],
        eos_token_id=sorted(params.stop_ids) or None, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    beams = []
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token in params.stop_ids), len(row))
        beams.append((row[:end], score))
    return beams


def assert_same(got: list[Beam], want: list[tuple[list[int], float]], note) -> None:
    assert [beam.ids for beam in got] == [ids for ids, _ in want], note
    assert [beam.score for beam in got] == pytest.approx([score for _, score in want], abs=1e-4), note


def beam_params(**changes) -> BeamParams:
    defaults = {"max_new_tokens": N_NEW, "temperature": 0, "num_beams": K, "eos_ids": frozenset({1})}
    return BeamParams(**{**defaults, **changes})


@pytest.mark.parametrize("early_stopping", ["false", "true", "never"])
def test_sequences_and_scores_equal_transformers(llama, early_stopping):
    """Four prompts of different lengths."""
    lengths = set()
    for length_penalty, eos in ((-1.0, {2, 6, 13}), (0.0, {1}), (1.0, {2, 6, 13}), (2.5, {1})):
        params = beam_params(early_stopping=early_stopping, length_penalty=length_penalty, eos_ids=frozenset(eos))
        for prompt, got in zip(PROMPTS, search(llama, PROMPTS, params), strict=True):
            assert_same(got, theirs(llama, prompt, params), (length_penalty, eos, prompt))
            lengths |= {len(beam.ids) for beam in got}
    assert lengths >= {2, 4, N_NEW}


def test_settings_make_a_difference(llama):
    """Else the comparison above would say little."""
    settings = itertools.product(("false", "true", "never"), (-1.0, 0.0, 1.0, 2.5))
    results = [
        search(llama, PROMPTS, beam_params(early_stopping=e, length_penalty=lp, eos_ids=frozenset({2, 6, 13})))
        for e, lp in settings
    ]
    texts = {str([[beam.ids for beam in prompt] for prompt in result]) for result in results}
    assert len(texts) >= 5


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.7},  # of the prompt's ids too, and of log-probabilities
        {"repetition_penalty": 0.6, "length_penalty": 0.0},
        {"min_new_tokens": 4},
        {"min_new_tokens": 3, "eos_ids": frozenset({2, 6, 13}), "early_stopping": "true"},
        {"banned_ids": (2, 9, 20), "early_stopping": "true"},
        {"stop_token_ids": frozenset({9}), "ignore_eos": True, "min_new_tokens": 2, "repetition_penalty": 1.2},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2, "early_stopping": "never"},
        {"num_beams": 5},
        {"num_beams": 2, "eos_ids": frozenset({1, 6, 9, 13})},
        {"eos_ids": frozenset()},
    ],
)
def test_processors_and_limits_equal_transformers(llama, changes):
    params = beam_params(**changes)
    for prompt, got in zip(PROMPTS, search(llama, PROMPTS, params), strict=True):
        assert_same(got, theirs(llama, prompt, params), (changes, prompt))


def test_each_prompt_has_its_own_limit(llama):
    params, limits = beam_params(), [1, 4, 9, 6]
    for prompt, limit, got in zip(PROMPTS, limits, search(llama, PROMPTS, params, limits), strict=True):
        assert_same(got, theirs(llama, prompt, params, limit), limit)


def test_frequency_and_presence_penalties_by_their_scores(llama):
    """transformers has none: the sum of penalized log-probabilities, recomputed along each result."""
    params = beam_params(frequency_penalty=0.7, presence_penalty=0.3, length_penalty=0.5)
    for prompt, beams in zip(PROMPTS, search(llama, PROMPTS, params), strict=True):
        for beam in beams:
            total = 0.0
            for i, token in enumerate(beam.ids):
                before = beam.ids[:i]
                logps = last_logits(llama, [prompt + before])[0].log_softmax(dim=-1)
                total += logps[token].item() - 0.7 * before.count(token) - 0.3 * (token in before)
            assert beam.logprob == pytest.approx(total, abs=1e-4)
            assert beam.score == pytest.approx(total / len(beam.ids) ** 0.5, abs=1e-4)
    assert search(llama, PROMPTS, params) != search(llama, PROMPTS, beam_params(length_penalty=0.5))


# ---- a model that is a table ----------------------------------------------------------------------------------------


def table_search(table: torch.Tensor, params: BeamParams) -> list[Beam]:
    """table (steps, W, W): logits of the next id after each id, at each step; the prompt is [0]."""
    beams = Beams([0], params, params.max_new_tokens, table.shape[1])
    last = torch.zeros(params.num_beams, dtype=torch.int64)
    while not beams.ended:
        last, _ = beams.advance(table[beams.n_out, last])
    return beams.finished


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_enough_beams_find_the_best_of_all_sequences(length_penalty):
    """4**3 beams leave nothing out."""
    table = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(3)) * 2
    logps, scores = table.log_softmax(dim=-1).tolist(), {}
    for ids in itertools.chain.from_iterable(itertools.product(range(4), repeat=n) for n in (1, 2, 3)):
        if 1 in ids[:-1] or (len(ids) < 3 and ids[-1] != 1):
            continue  # 1 ends a sequence, and so does the third id
        total = sum(logps[step][a][b] for step, (a, b) in enumerate(zip((0, *ids), ids, strict=False)))
        scores[ids] = total / len(ids) ** length_penalty
    best = sorted(scores, key=scores.get, reverse=True)
    params = BeamParams(max_new_tokens=3, temperature=0, num_beams=64, length_penalty=length_penalty,
                            early_stopping="never", eos_ids=frozenset({1}))  # fmt: skip
    got = table_search(table, params)
    assert [tuple(beam.ids) for beam in got] == best
    assert [beam.score for beam in got] == pytest.approx([scores[ids] for ids in best], abs=1e-5)


def test_enough_candidates_when_many_end():
    """The four likeliest candidates of the first step end; the two after them go on and are better in the end."""
    table = torch.full((3, 6, 6), -30.0)
    table[0, 0] = torch.tensor([0.16, 0.2, 0.19, 0.18, 0.17, 0.1]).log()
    table[1:, :, 5] = 0.0
    params = BeamParams(max_new_tokens=3, temperature=0, num_beams=2, length_penalty=2, early_stopping="never",
                            eos_ids=frozenset({1, 2, 3, 4}))  # fmt: skip
    got = table_search(table, params)
    assert [beam.ids for beam in got] == [[0, 5, 5], [5, 5, 5]]
    assert [beam.score for beam in got] == pytest.approx([math.log(0.16) / 9, math.log(0.1) / 9], abs=1e-5)


def test_never_with_a_penalty_of_length_hopes_for_the_present_length():
    """The worst after two steps is 2 log 0.15 = -3.8; three tokens give 3 log 0.35 = -3.1, four 4 log 0.35 = -4.2."""
    table = torch.full((4, 4, 4), -30.0)
    table[0, 0] = torch.tensor([0.1, 0.3, 0.5, 0.1]).log()
    table[1, 2] = torch.tensor([1e-9, 0.3, 1e-9, 0.7]).log()
    table[2, 3, 1] = 0.0
    params = BeamParams(max_new_tokens=4, temperature=0, num_beams=2, length_penalty=-1, early_stopping="never",
                            eos_ids=frozenset({1}))  # fmt: skip
    got = table_search(table, params)
    assert [beam.ids for beam in got] == [[1], [2, 3, 1]]
    assert [beam.score for beam in got] == pytest.approx([math.log(0.3), 3 * math.log(0.35)], abs=1e-4)


def test_all_ids_end():
    params = BeamParams(max_new_tokens=4, temperature=0, num_beams=2, stop_token_ids=frozenset({0, 1, 2}))
    got = table_search(torch.tensor([0.0, 2.0, 1.0]).expand(4, 3, 3), params)
    assert [beam.ids for beam in got] == [[1], [2]]


def test_fewer_texts_than_beams():
    """Two ids, one of them banned: there is one text."""
    params = BeamParams(max_new_tokens=4, temperature=0, num_beams=3, banned_ids=(1,))
    (beam,) = table_search(torch.zeros(4, 2, 2), params)
    assert beam.ids == [0, 0, 0, 0] and beam.score == pytest.approx(-math.log(2))
    params = BeamParams(max_new_tokens=1, temperature=0, num_beams=3)
    assert sorted(beam.ids for beam in table_search(torch.zeros(1, 2, 2), params)) == [[0], [1]]


def test_no_results_before_any_beam_has_finished():
    beams = Beams([0], BeamParams(temperature=0, num_beams=2), 5, 3)
    beams.advance(torch.zeros(2, 3))
    assert beams.finished == [] and not beams.ended


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({"num_beams": value}, "num_beams must be at least 2") for value in (0, 1, -2)),
        *(({"length_penalty": value}, "length_penalty must be from -10") for value in (-11.0, math.inf, math.nan)),
        *(({"early_stopping": value}, "early_stopping must be false") for value in ("", "True")),
        ({"n": 4}, f"n must be at least 1 and at most num_beams={K}"),
        *((one, "num_beams must be 1 unless") for one in ({"temperature": 0.5}, {"logprobs": 1}, {"best_of": 2})),
        ({"stop": ("x",)}, "num_beams must be 1 unless"),
    ],
)
def test_impossible_parameters_are_one_line(changes, words):
    with pytest.raises(UserError) as caught:
        beam_params(**changes)
    assert str(caught.value).startswith(f"sample: {words}") and "\n" not in str(caught.value)


def test_edges_of_the_ranges_are_allowed():
    assert beam_params(n=3, length_penalty=-1, early_stopping="never").n == 3
