"""Tokens -> answers in OpenAI's format, whole or as the pieces of a stream. No HTTP.

A Job has a Choice for each answer that a request asks for. A Choice divides the text of a sample
into thoughts, what is said and calls of tools, and says which log-probabilities belong to it.
"""

import asyncio
import contextlib

from groundup.generate.call_forms import CallReader, ThoughtReader
from groundup.generate.engine import Request, Sample, Token
from groundup.generate.http import Metrics
from groundup.generate.openai_format import ParsedRequest
from groundup.generate.tools import ToolTurn
from tokenizer import StreamDecoder, Tokenizer


class Choice:
    """A choice of an answer, as its tokens come."""

    def __init__(
        self, tokenizer: Tokenizer, asked: ParsedRequest, index: int, request: Request
    ) -> None:
        self.tokenizer, self.asked, self.index = tokenizer, asked, index
        self.turns: list[dict] = []  # that called the server's tools, and what these said
        self.begin(request)

    def begin(self, request: Request) -> None:
        """Begin a turn."""
        self.request = request
        self.n_echoed = 0  # characters of the prompt, if it is repeated
        self.n_shown = 0  # characters that were shown, those included
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.shown: list[Token] = []  # those with log-probabilities
        self.pending: list[Token] = []  # of these, those whose text is not shown yet
        self.finish: str | None = None
        asked = self.asked
        prompt_end = self.tokenizer.decode(request.ids[-8:]).rstrip() if asked.chat else ""
        thinks = asked.chat and not asked.params.json_object
        self.thinker = ThoughtReader(prompt_end.endswith(ThoughtReader.OPEN)) if thinks else None
        self.caller = CallReader(asked.tools) if asked.tools or asked.runs_tools else None
        self.calls: list[dict] = []

    def push(self, token: Token) -> dict | None:
        """Take a token; return what a stream says of it, None = nothing yet."""
        text, thoughts, last = token.text, "", bool(token.finish)
        echoes = self.asked.echo and not self.texts
        found = self.echo() if echoes else []
        echoed = self.tokenizer.decode(self.request.ids) if echoes else ""
        if self.asked.scores_only:
            text = ""
        else:
            found += self.newly_shown(token)
        if self.caller and self.call_mark(token.id):
            text = self.call_mark(token.id) + text
        if self.thinker:
            thoughts, text = self.thinker.push(text, last)
        if self.caller:
            text, self.calls = self.caller.push(text, last)
        text = echoed + text
        self.texts.append(text)
        self.thoughts.append(thoughts)
        self.shown += found
        self.finish = "tool_calls" if self.calls else token.finish or None
        if not text and not thoughts and not found and not last:
            return None
        if self.asked.chat:
            delta = {"content": text} if text or found and not thoughts else {}
            delta |= {"reasoning_content": thoughts} if thoughts else {}
            calls = [{"index": i, **call} for i, call in enumerate(self.calls)]
            body = {"delta": delta | ({"tool_calls": calls} if calls else {})}
        else:
            body = {"text": text}
        return self.described(body, found)

    def go_on(self, turn: ToolTurn, request: Request) -> dict:
        """Take a turn that called tools instead of its last token; return what a stream says of it.

        What it said before is part of the turn."""
        indexed = [{"index": i, **one} for i, one in enumerate(turn.messages, len(self.turns))]
        self.turns += turn.messages
        self.begin(request)
        return self.described({"delta": {"turns": indexed}}, [])

    def call_mark(self, token: int) -> str:
        """Return the name of a special token that marks a call: as one, it has no text."""
        special = token in self.tokenizer.special_ids and self.asked.params.skip_special_tokens
        name = self.tokenizer.decode([token]) if special else ""
        return name if name in CallReader.MARKS + CallReader.INNER_MARKS else ""

    def echo(self) -> list[Token]:
        """Return the tokens of the prompt, which is repeated before the answer."""
        ids, found, begin = self.request.ids, [], 0
        decoder = StreamDecoder(self.tokenizer)
        scored = self.request.prompt_logprobs if self.asked.params.logprobs >= 0 else []
        for token, logprobs in zip(ids, scored, strict=False):
            found.append(Token(token, "", "", logprobs, begin=begin))
            is_special = token in self.tokenizer.special_ids
            begin += len(self.tokenizer.decode([token]) if is_special else decoder.push(token))
        self.n_echoed = self.n_shown = len(self.tokenizer.decode(ids))
        return found

    def newly_shown(self, token: Token) -> list[Token]:
        """Return the tokens whose text is shown now, not those of a stop string."""
        self.n_shown += len(token.text)
        if self.asked.params.logprobs < 0:
            return []
        if not token.is_end:
            self.pending.append(token._replace(begin=self.n_echoed + token.begin))
        n = sum(one.begin < self.n_shown for one in self.pending)
        is_cut = token.finish == "stop" and not token.is_end
        if token.finish and not is_cut:
            n = len(self.pending)
        found, self.pending = self.pending[:n], self.pending[n:]
        return found

    def whole(self) -> dict:
        """Return the finished choice."""
        text, thoughts = "".join(self.texts), "".join(self.thoughts)
        if not self.asked.chat:
            return self.described({"text": text}, self.shown)
        message = {"role": "assistant", "content": text, "refusal": None}
        if self.turns:
            message["turns"] = self.turns
        if thoughts:
            message["reasoning_content"] = thoughts
        if self.calls:
            message |= {"content": text or None, "tool_calls": self.calls}
        return self.described({"message": message}, self.shown)

    def described(self, body: dict, found: list[Token]) -> dict:
        logprobs = self.logprobs(found) if self.asked.params.logprobs >= 0 else None
        return {"index": self.index, **body, "logprobs": logprobs, "finish_reason": self.finish}

    def logprobs(self, found: list[Token]) -> dict:
        if self.asked.chat:
            return {"content": [self.chat_entry(token.logprobs) for token in found]}
        tokens, own, likeliest = [], [], []
        for token in found:
            tokens.append(piece(self.tokenizer, token.id))
            own.append(finite(token.logprobs[token.id]) if token.logprobs else None)
            # The chosen token comes first; as the last key it wins over others of the same text.
            pairs = reversed((token.logprobs or {}).items())
            likeliest.append({piece(self.tokenizer, i): finite(p) for i, p in pairs} or None)
        return {
            "tokens": tokens,
            "token_logprobs": own,
            "top_logprobs": likeliest,
            "text_offset": [token.begin for token in found],
        }

    def chat_entry(self, logprobs: dict[int, float]) -> dict:
        """Return a token, the first of `logprobs`, and the k likeliest, among which it may be."""
        entries = [entry(self.tokenizer, i, logprob) for i, logprob in logprobs.items()]
        values = list(logprobs.values())
        order = sorted(range(len(values)), key=values.__getitem__, reverse=True)
        k = self.asked.params.logprobs
        return entries[0] | {"top_logprobs": [entries[i] for i in order[:k]]}


def entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict:
    raw = tokenizer.pieces.get(token, b"")
    text = raw.decode("utf-8", "replace")
    return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


def piece(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token; of part of a character its bytes, as OpenAI writes them."""
    raw = tokenizer.pieces.get(token, b"")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no -Infinity; OpenAI writes this


# ---- all choices of a request --------------------------------------------------------------------

# A token of a sample, or instead of its last token a turn that called the server's tools with the
# request that goes on.
Event = tuple[Sample, Token | tuple[ToolTurn, Request]] | Exception


class Job:
    """An HTTP request: the engine's requests (one for each prompt), the tokens that it draws, and
    the choices that they become (n for each prompt).

    Its samples count in `metrics.samples` from here on, each until it has ended. All methods but
    `send` are called in the server's thread."""

    def __init__(self, asked: ParsedRequest, metrics: Metrics) -> None:
        self.asked, self.metrics = asked, metrics
        self.left = asked.n_samples
        metrics.samples += self.left
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.n_new = 0

    def begin(self, tokenizer: Tokenizer, requests: list[Request]) -> None:
        self.requests, n = requests, self.asked.n
        self.n_prompt = sum(len(request.ids) for request in requests)
        each = enumerate(request for request in requests for _ in range(n))
        self.choices = [Choice(tokenizer, self.asked, i, request) for i, request in each]
        self.firsts = {request: i * n for i, request in enumerate(requests)}  # of its choices

    def send(self, event: Event) -> None:
        """Called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server ends
            self.loop.call_soon_threadsafe(self.receive, event)

    def receive(self, event: Event) -> None:
        if not isinstance(event, Exception) and event[1].finish:
            self.give_back(1)
        self.events.put_nowait(event)

    def go_on(self, request: Request) -> None:
        """Take the request of a further turn, of one sample."""
        self.requests.append(request)
        self.left += 1
        self.metrics.samples += 1

    def give_back(self, n_samples: int) -> None:
        n_samples = min(n_samples, self.left)
        self.left -= n_samples
        self.metrics.samples -= n_samples

    def choices_of(self, sample: Sample) -> list[Choice]:
        """Return the choices of a sample: greedy ones are copies."""
        first = self.firsts[sample.request] + sample.index
        return self.choices[first : first + self.asked.n // self.asked.params.n]

    def push(self, sample: Sample, token: Token | tuple[ToolTurn, Request]) -> list[dict]:
        """Take a token, or a turn with the next request; return what a stream says of it."""
        chosen = self.choices_of(sample)
        self.n_new += 0 if self.asked.scores_only else len(chosen)
        if isinstance(token, Token):
            said = [choice.push(token) for choice in chosen]
            return [one for one in said if one]
        turn, request = token
        self.firsts[request] = chosen[0].index
        self.n_prompt += len(turn.ids)
        return [choice.go_on(turn, request) for choice in chosen]

    def usage(self) -> dict:
        counts = {"prompt_tokens": self.n_prompt, "completion_tokens": self.n_new}
        return counts | {"total_tokens": self.n_prompt + self.n_new}
