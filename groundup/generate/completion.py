"""What the engine is asked and what it answers: prompts as ids, requests, the text of a growing
sample, results.

No model runs here: engine.py draws the tokens; a Sample takes those of its row and says what may
be shown and whether it has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Generator, Tensor

from groundup.errors import UserError
from groundup.generate.json_mode import JsonText
from groundup.generate.kv_cache import Row
from groundup.generate.sampling import RowParams, SamplingParams
from groundup.generate.text_parts import StopStrings
from groundup.tokens.mixture import hash_words
from model import ModelConfig
from tokenizer import StreamDecoder, Tokenizer

Params = SamplingParams | Sequence[SamplingParams]


class Completion(NamedTuple):
    text: str  # up to the stop string; "" without a tokenizer
    ids: list[int]  # including the stop id, if one ended it
    finish_reason: str  # stop | length
    stop_reason: int | str | None  # the stop id or stop string
    # At each token: its own and the highest, before any processor
    logprobs: list[dict[int, float]] | None
    cumulative_logprob: float  # sum over all tokens
    reward: float | None = None  # of a reward model, see best_of.py


class Result(NamedTuple):
    prompt_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[dict[int, float] | None] | None  # None for the first token


class Token(NamedTuple):
    id: int
    text: str  # what may be shown now: whole characters, no beginning of a stop string
    finish: str  # "" = it goes on | stop | length
    logprobs: dict[int, float]  # of it and of the likeliest, before any processor
    is_end: bool = False  # it ends the text and is no part of it


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
    """Return the conversation to answer: a user's message or several messages, with a system message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return begin_with(system, messages)


def begin_with(system: str, messages: list[dict]) -> list[dict]:
    """Return the messages with a system message, if there is one and they have none."""
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


@dataclass(eq=False)
class Request:
    """A prompt, its parameters, and its finished samples."""

    index: int
    ids: list[int]
    params: SamplingParams
    limit: int  # tokens that a sample may get
    completions: dict[int, Completion] = field(default_factory=dict)
    logits: Tensor | None = None  # (V,) after the prompt, once it has been read
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=lambda: [None])

    @property
    def length(self) -> int:
        """Positions of the cache that a sample needs: its last token is not fed back."""
        return len(self.ids) + self.limit - 1

    def seed_of(self, sample: int) -> int:
        """Return the seed of a sample's random numbers. Not seed + sample: then all prompts
        would draw the same noise, and neighbouring seeds the same samples."""
        return int(hash_words(1, "sample", self.params.seed, sample, *self.ids)[0])

    def result(self) -> Result:
        """Return the n best samples, best first; without best_of all samples in their order."""
        samples = [self.completions[s] for s in sorted(self.completions)]
        if self.params.best_of > self.params.n:
            mean = self.params.best_of_by == "mean"
            samples.sort(
                key=lambda c: c.cumulative_logprob / (len(c.ids) if mean else 1), reverse=True
            )
        scored = self.params.prompt_logprobs >= 0
        return Result(self.ids, samples[: self.params.n], self.prompt_logprobs if scored else None)


def check(
    index: int,
    ids: list[int],
    params: SamplingParams,
    cfg: ModelConfig,
    tokenizer: Tokenizer | None,
) -> Request:
    """Return the request. Raise UserError if this model cannot serve it."""
    name, V = f"sample: prompt {index}", cfg.vocab_size
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise UserError(
            f"{name} is {type(ids).__name__} {ids!r:.60}; it must be a list of token ids"
        )
    if not ids:
        raise UserError(f"{name} has no tokens; begin an empty one with <|endoftext|>")
    if len(ids) > cfg.block_size:
        raise UserError(f"{name} has {len(ids)} tokens, block_size is {cfg.block_size}; shorten it")
    if foreign := [i for i in ids if not 0 <= i < V]:
        raise UserError(
            f"{name} has token id {foreign[0]}, the model has vocab_size={V}; use its own tokenizer"
        )
    if params.json_object and tokenizer is None:
        raise UserError(f"{name} asks for json_object, but there is no tokenizer")
    if params.stop and tokenizer is None:
        raise UserError(f"{name} has stop strings {params.stop}, but there is no tokenizer")
    RowParams([params], V)  # raises UserError for ids that the model does not have
    # Prompt and result together may be one longer than the context: the last token is not fed back.
    return Request(
        index, list(ids), params, min(params.max_new_tokens, cfg.block_size - len(ids) + 1)
    )


class Text:
    """The text of one sample, token by token; `stopped` is the stop string that ended it."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self.tokenizer, self.skip_special = tokenizer, params.skip_special_tokens
        self.decoder = StreamDecoder(tokenizer) if tokenizer else None
        self.stops = StopStrings(params.stop)
        self.shown = ""
        self.pending = ""  # the end of the text so far, as long as it may become a stop string
        self.stopped: str | None = None

    def push(self, token: int, may_stop: bool) -> str:
        """Return what may be shown now. The first complete stop string ends the text before it."""
        for char in self.decode(token):
            self.pending += char
            stop = self.stops.push(char)
            if stop and may_stop:
                self.stopped = stop
                return self.show(len(self.pending) - len(stop))
        return self.show(len(self.pending) - self.stops.n_pending)

    def decode(self, token: int) -> str:
        if self.tokenizer is None or token >= self.tokenizer.vocab_size:
            return ""
        if token in self.tokenizer.special_ids and not self.skip_special:
            return self.decoder.flush() + self.tokenizer.decode([token])
        return self.decoder.push(token)

    def show(self, n: int) -> str:
        piece, self.pending = self.pending[:n], self.pending[n:]
        self.shown += piece
        return piece

    def end(self) -> str:
        """Return what was held back, as nothing follows; U+FFFD for a broken character."""
        if self.stopped is not None:
            return ""
        self.pending += self.decoder.flush() if self.decoder else ""
        return self.show(len(self.pending))


class Sample:
    """Sample `index` of a request, while a row of the cache generates it."""

    def __init__(
        self,
        request: Request,
        index: int,
        tokenizer: Tokenizer | None,
        generator: Generator | None = None,
    ) -> None:
        self.request, self.index, self.generator = request, index, generator
        self.row: Row | None = None  # once the prompt is being read
        self.ids: list[int] = []
        self.text = Text(tokenizer, request.params)
        self.json = JsonText(tokenizer) if request.params.json_object else None
        self.logprobs: list[dict[int, float]] = []
        self.sum = 0.0
        self.last = False  # whether it is the last of its request to end

    def push(self, ids: list[int], logps: list[float]) -> Token:
        """Take the next token, ids[0]; the others are the likeliest ones. logps: of each of
        them."""
        params, token = self.request.params, ids[0]
        self.ids.append(token)
        self.sum += logps[0]
        k = 1 + params.logprobs
        found = dict(zip(ids[:k], logps[:k], strict=True))
        self.logprobs.append(found)
        piece, reason = "", token
        is_end = token in params.stop_ids
        if not is_end:
            piece = self.text.push(token, len(self.ids) >= params.min_new_tokens)
            reason = self.text.stopped
        finish = "length" if len(self.ids) == self.request.limit else ""
        if reason is not None or (self.json and self.json.push(token)):
            finish = "stop"  # it wins over length
        if finish:
            piece += self.text.end()
            logprobs = self.logprobs if params.logprobs >= 0 else None
            completion = Completion(self.text.shown, self.ids, finish, reason, logprobs, self.sum)
            self.request.completions[self.index] = completion
            self.last = len(self.request.completions) == params.n_samples
        return Token(token, piece, finish, found, is_end)
