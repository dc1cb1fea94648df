"""What scripts call: (model, tokenizer, prompts, parameters) -> texts, ids and log-probabilities.

    generate(...)       -> a Result for each prompt
    generate_each(...)  -> results in the order of finishing, for files of prompts of any length

And how a prompt becomes ids, and which ids are never drawn. engine.py draws the tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from groundup.errors import UserError
from groundup.generate.engine import Engine, Request, Result, check
from groundup.generate.sampling import SamplingParams
from model import Transformer
from tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams]


def generate(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompts: list[list[int]],
    params: Params,
    batch_size: int = 0,
    compile: bool = False,
    copies: bool = True,
    stop: Callable[[], bool] | None = None,
) -> list[Result]:
    """Return one Result per prompt. params: for all prompts, or one for each. batch_size: rows at a
    time, 0 = all. copies=False: use the matrices as they are, without faster copies of them, in
    half the memory. stop: asked before each token; if it is true, no result is returned.

    tokenizer=None: ids only. compile=True: on a GPU, record the decoding step; this takes 20 s and
    pays off from some thousand tokens."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    if not prompts or len(each) != len(prompts) or batch_size < 0:
        what = f"{len(prompts)} prompts, {len(each)} sets of parameters, {batch_size=}"
        raise UserError(f"sample: cannot take {what}")
    requests = [
        check(i, ids, p, model.cfg, tokenizer)
        for i, (ids, p) in enumerate(zip(prompts, each, strict=True))
    ]
    n_samples = sum(request.params.n_samples for request in requests)
    rows = min(batch_size or n_samples, n_samples)
    results = dict(run_all(model, tokenizer, requests, rows, compile, copies, stop))
    if stop and stop():
        return []
    return [results[i] for i in range(len(requests))]


def generate_each(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompts: Iterable[list[int]],
    params: SamplingParams,
    batch_size: int,
    compile: bool = False,
) -> Iterator[tuple[int, Result]]:
    """Yield (index of the prompt, Result) in the order of finishing; take prompts as rows become
    free.

    A bad prompt raises UserError when its turn comes."""
    requests = (check(i, ids, params, model.cfg, tokenizer) for i, ids in enumerate(prompts))
    return run_all(model, tokenizer, requests, batch_size, compile)


def run_all(
    model: Transformer,
    tokenizer: Tokenizer | None,
    requests: Iterable[Request],
    rows: int,
    compile: bool,
    copies: bool = True,
    stop: Callable[[], bool] | None = None,
) -> Iterator[tuple[int, Result]]:
    """Yield (index, Result) in the order of finishing. rows: of the engine that draws samples."""
    engine = Engine(model, tokenizer, rows, compile, copies)
    for sample, _ in engine.run(requests, stop):
        if sample.last:
            yield sample.request.index, sample.request.result()


def begin_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text to continue, after the begin token where the tokenizer puts one
    before every text. An empty text begins a new document. Raise UserError if there is no token
    to begin with."""
    ids = [tokenizer.bos_id] * tokenizer.begins + tokenizer.encode(text)
    if not ids and tokenizer.bos_id < 0:
        raise UserError(
            "sample: this tokenizer has no token that begins a text; give --prompt=TEXT"
        )
    return ids or [tokenizer.bos_id]


def prompt_ids(
    tokenizer: Tokenizer,
    talk: bool,
    system: str,
    prompt: str | list[dict],
    plain: bool = False,
    rewarded: bool = False,
) -> list[int]:
    """Return the ids of a conversation up to the model's answer.

    A str is a user's message if `talk`, else (or if `plain`) a text to continue. rewarded: a
    text to continue is an error, since it has no reward. system: message of conversations that
    have none."""
    if isinstance(prompt, str) and (plain or not talk):
        if rewarded:
            raise UserError(
                "sample: a text to continue has no reward; give it as prompt or messages"
            )
        return begin_prompt(tokenizer, prompt)
    return tokenizer.render(asked_messages(system, prompt), add_generation_prompt=True)[0]


def asked_messages(system: str, prompt: str | list[dict]) -> list[dict]:
    """Return the conversation to answer: a user's message or several messages, with `system` if
    they have no system message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def never_sampled(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that neither add to a text, end it nor begin a call of a tool.

    These are padding, reserved ids, those that open a turn, and those beyond the tokenizer's."""
    silent = (tokenizer.token_byte_lengths() == 0).nonzero()[0].tolist()
    banned = {*silent, *range(tokenizer.vocab_size, vocab_size)}
    return tuple(banned - tokenizer.stop_ids - call_ids(tokenizer))


def call_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the special ids that the chat template writes in an answer that calls a tool."""
    if not tokenizer.foreign_template:
        return frozenset()
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'  # our form, see templates.py
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": call}]
    try:
        pieces = tokenizer.template.pieces(talk)
    except UserError:  # a template without calls
        return frozenset()
    names = [piece.text for piece in pieces if piece.special and piece.learned]
    return frozenset(tokenizer.special_tokens[name] for name in names) - tokenizer.stop_ids
