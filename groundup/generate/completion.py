"""How a prompt becomes ids, whether a model can answer it, which ids are never drawn, and one call
from prompts to answers.

For files of prompts see Engine.answer, which takes them as they come.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from configurator import script_of
from groundup.errors import UserError
from groundup.files.turns import call_text
from groundup.generate.call_forms import INNER_MARKS, MARKS
from groundup.generate.engine import Engine, Result
from groundup.generate.sampling import SamplingParams
from model import Transformer
from tokenizer import Tokenizer


def generate(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompts: list[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    batch_size: int = 0,
    compile: bool = False,
    copies: bool = True,
    stop: Callable[[], bool] | None = None,
) -> list[Result]:
    """Return one Result per prompt.

    tokenizer: None = ids only. params: for all prompts, or one for each. batch_size: rows at a
    time, 0 = all. compile, copies: see Engine; compiling takes 20 s. stop: asked before each token;
    if it is true, no result is returned."""
    # Requests wait for a row if there are more samples than rows.
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    if not prompts or len(each) != len(prompts) or batch_size < 0:
        what = f"{len(prompts)} prompts, {len(each)} sets of parameters, {batch_size=}"
        raise UserError(f"sample: cannot take {what}")
    # A row for each sample, unless the caller allows fewer
    n_samples = sum(one.n_samples for one in each)
    engine = Engine(model, tokenizer, min(batch_size or n_samples, n_samples), compile, copies)
    asked = enumerate(zip(prompts, each, strict=True))
    requests = [engine.request(i, ids, one) for i, (ids, one) in asked]
    for _ in engine.finish(requests, stop):  # requests hold their results
        pass
    return [] if stop and stop() else [request.result() for request in requests]


def begin_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text to continue. An empty text begins a new document. Raise UserError if
    there is no token to begin with."""
    # Some tokenizers put their begin token before every text.
    ids = [tokenizer.bos_id] * tokenizer.begins + tokenizer.encode(text)
    if not ids and tokenizer.bos_id < 0:
        what = "this tokenizer has no token that begins a text"
        raise UserError(f"sample: {what}; give --prompt=TEXT")
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

    A str is a user's message if `talk`, else (or if `plain`) a text to continue, which is an error
    if it is to be `rewarded`. system: message of conversations that have none."""
    if isinstance(prompt, str) and (plain or not talk):
        if rewarded:
            what = "a text to continue has no reward; give it as prompt or messages"
            raise UserError(f"sample: {what}")
        return begin_prompt(tokenizer, prompt)
    return tokenizer.render(asked_messages(system, prompt), add_generation_prompt=True)[0]


def asked_messages(system: str, prompt: str | list[dict]) -> list[dict]:
    """Return the conversation to answer: a user's message or several messages, with `system` if
    they have no system message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def is_tuned(directory: Path, tokenizer: Tokenizer) -> bool:
    """Return whether a model has been tuned to answer. A checkpoint of ours always has a chat
    template, so its run's config.py tells, which names the script that wrote it; any other model
    is tuned if it has a template of its own."""
    own, config = directory / "config.py", directory.resolve().parent / "config.py"
    script = script_of(own if own.exists() else config)  # tools/merge.py takes it along
    return script != "pretrain.py" if script else tokenizer.foreign_template


def untuned(directory: Path) -> str:
    """Return the warning before a chat with a model that is not tuned."""
    what = f"{directory} was not tuned on conversations, so it continues the text of a chat"
    return f"{what} instead of answering; tune it with sft.py"


def never_sampled(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that neither add to a text, end it nor begin a call of a tool."""
    # Padding, reserved ids, those that open a turn, and those beyond the tokenizer's
    silent = (tokenizer.token_byte_lengths() == 0).nonzero()[0].tolist()
    banned = {*silent, *range(tokenizer.vocab_size, vocab_size)}
    # Marks of calls have no text either, but a model must be able to write them.
    return tuple(banned - tokenizer.stop_ids - call_ids(tokenizer))


def call_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the special ids that the chat template writes in an answer that calls a tool."""
    if not tokenizer.foreign_template:
        return frozenset()
    # A conversation with a call shows which special tokens stand in one.
    call = call_text({"name": "f", "arguments": {"a": "b"}})
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": call}]
    try:
        pieces = tokenizer.template.pieces(talk)
        names = [piece.text for piece in pieces if piece.special and piece.learned]
    except UserError:  # it has no calls, or does not show where an answer begins
        names = [name for name in MARKS + INNER_MARKS if name in tokenizer.template_source]
        names = tokenizer.special_tokens.keys() & names
    return frozenset(tokenizer.special_tokens[name] for name in names) - tokenizer.stop_ids
