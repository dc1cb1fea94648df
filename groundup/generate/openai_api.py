"""OpenAI's API: the body of a request -> prompts and parameters, and tokens -> its answer, whole or
as the pieces of a stream. No HTTP.

A known field that would change the answer but cannot be served is refused. An unknown one changes
nothing and is named once in the log.

A request has a Choice for each answer that it asks for. It divides the text of a sample into
thoughts, what is said and calls of tools, and says which log-probabilities belong to it.
"""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from groundup.errors import UserError, json_fault, printable
from groundup.files.turns import BadRow, turns_at, with_system
from groundup.files.untrusted import mended
from groundup.generate.call_forms import (
    INNER_MARKS,
    MARKS,
    THINK,
    THINK_END,
    divide_calls,
    divide_thoughts,
)
from groundup.generate.completion import asked_messages, begin_prompt
from groundup.generate.engine import Request, Token
from groundup.generate.rendering import Renderer
from groundup.generate.sampling import SamplingParams
from groundup.generate.tools import ToolTurn
from tokenizer import StreamDecoder, Tokenizer

# Names of sampling parameters. Those from top_k on are not OpenAI's but vLLM's.
SAMPLING = "temperature top_p presence_penalty frequency_penalty top_k min_p repetition_penalty"
SAMPLING += " ignore_eos skip_special_tokens"
SAMPLING = {name: name for name in SAMPLING.split()} | {"min_tokens": "min_new_tokens"}
LIMITS = ("max_tokens", "max_completion_tokens")  # the second, a chat's only, is the newer name
# Fields that would change the answer and cannot be served, with the values that change nothing.
REFUSED = {
    "logit_bias": ({},),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
    "function_call": ("none", "auto"),
    "thinking_token_budget": (-1,),
    "include_reasoning": (True,),
}
for names, allowed in (
    ("use_beam_search include_stop_str_in_output watermarking", (False,)),
    ("functions bad_words documents", ([],)),
    ("max_repetition_pattern_size min_repetition_pattern_size repetition_min_count priority", (0,)),
    ("structured_outputs guided_json guided_regex guided_choice guided_grammar", ()),
    ("allowed_token_ids repetition_detection logits_processors prompt_embeds cache_salt", ()),
    ("truncate_prompt_tokens prompt_logprobs logprob_token_ids chat_template", ()),
):
    REFUSED |= dict.fromkeys(names.split(), allowed)
REFUSED_IN_CHATS = {"echo": (False,), "add_special_tokens": (False,)}
REFUSED_IN_COMPLETIONS = {"add_special_tokens": (True,)}
# Fields that change no answer. Others that are not known are named in the log.
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier")
WITHOUT_EFFECT += ("prompt_cache_key", "cache_prompt", "parallel_tool_calls")
MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "function_call")
UNREAD = ("id", "reasoning_content", "reasoning")  # thoughts of earlier answers are not repeated
MAX_N, MAX_TOP_LOGPROBS, MAX_STOPS = 16, 20, 16
MAX_LOGGED = 100  # names of unknown fields
logged: set[str] = set()


class Refused(Exception):
    """A request that is answered with an error, in OpenAI's shape."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        # OpenAI's names of the kinds of errors
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.status = status
        error = {"message": message[:1000], "type": kind, "param": param, "code": code}
        self.body = {"error": error}


# ---- a request -----------------------------------------------------------------------------------


@dataclass
class ParsedRequest:
    """What a body asks for."""

    model: str
    prompts: list  # token ids, or texts, or one conversation
    params: SamplingParams
    n: int  # choices of each prompt; greedy ones are copies of one sample
    chat: bool
    stream: bool
    include_usage: bool
    limited: bool  # whether the body says how many tokens there may be
    # Of a text to continue
    echo: bool = False  # the answer begins with the prompt
    scores_only: bool = False  # max_tokens=0 with echo: the prompt's log-probabilities, no token
    # Of a chat
    tools: list[dict] = field(default_factory=list)  # that the answer may call
    runs_tools: bool = False  # it may call the server's own, shown or not, which the server runs
    proceeds: bool = False  # the last message is the beginning of the answer
    template_settings: dict = field(default_factory=dict)  # of the model's chat template

    @property
    def n_samples(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def may_call(self) -> bool:
        return bool(self.tools or self.runs_tools)


def parse(
    raw: bytes, chat: bool, defaults: dict, seed: int, own_tools: Sequence[dict] | None = None
) -> ParsedRequest:
    """Return what the body of /v1/chat/completions (`chat`) or /v1/completions asks for.

    defaults: sampling parameters that the body leaves open; seed: if it has none. own_tools: of the
    server, for chats without tools. Raise Refused."""
    body = read_object(raw)
    as_json = body.get("response_format") == {"type": "json_object"}
    refuse_unsupported(body, REFUSED_IN_CHATS if chat else REFUSED_IN_COMPLETIONS)
    if chat:
        own = chat_fields(body, None if as_json else own_tools)
    elif "messages" in body:
        raise Refused(400, "messages are for /v1/chat/completions", "messages")
    else:
        own = {"prompts": texts_or_ids(body), "echo": take(body, "echo", bool, False)}
    own |= draw_fields(body, chat, own.get("echo", False), defaults, seed, as_json)

    options = take(body, "stream_options", dict, {})
    options = {key: value for key, value in options.items() if value is not None}
    own |= {"chat": chat, "model": take(body, "model", str, "")}
    own["stream"] = take(body, "stream", bool, False)
    own["include_usage"] = take(options, "include_usage", bool, False)
    # What is left of the body is not known.
    log_unknown(body, "")
    log_unknown(options, "stream_options.")
    return ParsedRequest(**own)


def draw_fields(
    body: dict, chat: bool, echo: bool, defaults: dict, seed: int, as_json: bool
) -> dict:
    """Return what decides the draws: n, params, limited and scores_only of a ParsedRequest."""
    n = take(body, "n", int, 1)
    if not 1 <= n <= MAX_N:
        raise Refused(400, f"n must be from 1 to {MAX_N}, got {n}", "n")
    values = defaults | sampling_values(body, seed) | {"json_object": as_json}
    # Greedy choices are copies of one sample.
    values["n"] = 1 if values.get("temperature") == 0 else n
    top = likeliest(body, chat)
    values |= {"logprobs": top, "prompt_logprobs": top if echo else -1}
    # Of two limits the newer name wins. The engine draws one token at least, also for 0.
    limits = {name: take(body, name, int, 0) for name in LIMITS[: 1 + chat] if name in body}
    limit_name, limit = list(limits.items())[-1] if limits else (LIMITS[0], None)
    scores_only = echo and limit == 0
    if limit is not None:
        values["max_new_tokens"] = 1 if scores_only else limit
    params = sampling_params(values, limit_name)
    return {"n": n, "params": params, "limited": limit is not None, "scores_only": scores_only}


def refuse_unsupported(body: dict, more: dict) -> None:
    """Raise Refused for a field that cannot be served. more: such fields beside REFUSED."""
    # A value that asks for nothing is fine: clients send defaults.
    for name, allowed in (REFUSED | more).items():
        value = body.pop(name, None)
        if value is not None and value not in allowed:
            fine = "".join(f", or give {one!r}" for one in allowed)
            raise Refused(400, f"{name}={value!r:.80} is not supported: leave it out{fine}", name)


def chat_fields(body: dict, own_tools: Sequence[dict] | None) -> dict:
    """Return what only a chat's ParsedRequest has. own_tools: of the server. Raise Refused."""
    messages = conversation(body.pop("messages", None))
    says_nothing = "tools" not in body and body.get("tool_choice") != "none"
    runs_tools = own_tools is not None and says_nothing
    # Its own tools go before the server's, even none.
    tools, choice = take(body, "tools", list, []), body.pop("tool_choice", "auto")
    if not all(has_function(tool) and tool.get("type") == "function" for tool in tools):
        raise Refused(400, "tools must be functions with a name", "tools")
    if choice not in ("none", "auto"):
        what = f"tool_choice={choice!r:.80} is not supported: it must be 'auto' or 'none'"
        raise Refused(400, what, "tool_choice")
    if choice == "none":
        tools = []

    # As in vLLM, the answer may continue the last message.
    proceeds, what = take(body, "continue_final_message", bool, False), ""
    if take(body, "add_generation_prompt", bool, not proceeds) == proceeds:
        what = "either continue_final_message or add_generation_prompt must be true"
    elif proceeds and (messages[-1]["role"] != "assistant" or len(messages) < 2):
        what = "continue_final_message needs a last message of the assistant"
    if what:
        raise Refused(400, what, "continue_final_message")

    # Settings of the model's own template; those that it does not read are logged later.
    settings = take(body, "chat_template_kwargs", dict, {})
    if "reasoning_effort" in body:
        # The setting of the template that most of them read
        settings = {"reasoning_effort": take(body, "reasoning_effort", str, "")} | settings
    return {
        "prompts": [messages],
        "tools": list(own_tools) if runs_tools else tools,
        "runs_tools": runs_tools,
        "proceeds": proceeds,
        "template_settings": settings,
    }


def sampling_values(body: dict, seed: int) -> dict:
    """Return the sampling parameters of a body by our names. seed: if it has none."""
    values = {ours: body.pop(name) for name, ours in SAMPLING.items() if name in body}
    # Any whole number is a seed; -1 is none.
    asked = take(body, "seed", int, -1)
    values["seed"] = seed if asked == -1 else asked % 2**63
    # One text or several; an empty one would end every answer at once.
    stop = body.pop("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    are_texts = isinstance(stops, list) and all(isinstance(one, str) and one for one in stops)
    if not are_texts or len(stops) > MAX_STOPS:
        what = f"stop must be a text or at most {MAX_STOPS} texts, got {stop!r:.80}"
        raise Refused(400, what, "stop")
    values["stop"] = tuple(stops)
    stop_ids = body.pop("stop_token_ids", [])
    if stop_ids and not is_ids(stop_ids):
        raise Refused(400, f"stop_token_ids must be ids, got {stop_ids!r:.80}", "stop_token_ids")
    values["stop_token_ids"] = frozenset(stop_ids)
    return values


def sampling_params(values: dict, limit_name: str) -> SamplingParams:
    """Return the parameters. An error has the client's names; limit_name: of max_new_tokens."""
    try:
        return SamplingParams(**values)
    except UserError as error:
        names = {ours: name for name, ours in SAMPLING.items()} | {"max_new_tokens": limit_name}
        words = str(error).removeprefix("sample: ")
        words = re.sub(r"\w+", lambda match: names.get(match[0], match[0]), words)
        # The field at fault, where the error begins with its name
        first = words.split(" ")[0]
        known = {one.name for one in fields(SamplingParams)} | set(names.values())
        raise Refused(400, words, first if first in known else None) from None


def likeliest(body: dict, chat: bool) -> int:
    """Return how many of the likeliest tokens are to be named at each token; -1 = none."""
    name = "top_logprobs" if chat else "logprobs"
    # A chat switches them on and says how many; a completion says how many.
    wanted = take(body, "logprobs", bool, False) if chat else name in body
    top = take(body, name, int, 0)
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        words = f"{name} must be at least 0 and at most {MAX_TOP_LOGPROBS}, got {top}"
        raise Refused(400, words, name)
    if top and not wanted:
        raise Refused(400, "top_logprobs needs logprobs=true", name)
    return top if wanted else -1


def log_unknown(names: Iterable[str], where: str) -> None:
    """Name fields that are not known, each once: they change nothing."""
    for name in names:
        line = f"serve: a client sends {where}{name[:80]!r}, which is not known and changes nothing"
        if name not in WITHOUT_EFFECT and line not in logged and len(logged) < MAX_LOGGED:
            logged.add(line)
            print(printable(line), file=sys.stderr, flush=True)


def decoded(raw: bytes) -> str:
    """Return the text of a body. Raise ValueError, with a reason for the client."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        why = f"byte {error.object[error.start]:#04x} at position {error.start}"
        raise ValueError(f"the body is not UTF-8 ({why}; is it GBK?)") from None


def read_object(raw: bytes) -> dict:
    """Return the fields of a body that are not null."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        text = decoded(raw)
        body = json.loads(text, parse_constant=refuse)
        # Half a character can only come from an escape like \ud83d.
        body = mended(body) if "\\ud" in text.lower() else body
    except (ValueError, RecursionError) as error:
        what = "We could not parse the JSON body of your request"
        raise Refused(400, f"{what}: {json_fault(error)}") from None
    if not isinstance(body, dict):
        raise Refused(400, f"the body must be an object, got {type(body).__name__}")
    return {key: value for key, value in body.items() if value is not None}


def take(body: dict, name: str, kind: type, default: Any) -> Any:
    """Remove a field of a body and return its value. Raise Refused for one of another type."""
    value = body.pop(name, default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Refused(400, f"{name} must be of type {kind.__name__}, got {value!r:.80}", name)
    return value


def conversation(messages: Any) -> list[dict]:
    """Return the messages as every other script reads them: content and calls as one text."""
    if not isinstance(messages, list) or not messages:
        what = f"messages must be a list of messages, got {messages!r:.80}"
        raise Refused(400, what, "messages")
    for i, message in enumerate(messages):
        if wrong := message_problem(message):
            raise Refused(400, f"message {i}{wrong}", "messages")
        log_unknown([key for key in message if key not in MESSAGE + UNREAD], "messages[].")
    # The reader of rows gets no thoughts of earlier answers: it would repeat them.
    known = [{key: one for key, one in m.items() if key in MESSAGE} for m in messages]
    try:
        return turns_at("messages", {"messages": known})
    except BadRow as problem:
        what, _, _ = str(problem).partition("; prepare.py ")  # a client has no such file
        raise Refused(400, f"messages: {what}", "messages") from None


def message_problem(message: Any) -> str:
    """Return what is wrong with the form of a message, "" if nothing is."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return f" must be an object with a role, got {message!r:.80}"
    for key, kind in {"tool_calls": list, "name": str, "tool_call_id": str}.items():
        if not isinstance(message.get(key), kind | None):
            return f": {key} must be of type {kind.__name__}, got {message[key]!r:.80}"
    for call in message.get("tool_calls") or ():
        if not has_function(call):
            return f": a call must have a function with a name, got {call!r:.80}"
    call = message.get("function_call")  # OpenAI's older form of a single call
    if call is not None and not has_function({"function": call}):
        return f": function_call must be an object with a name, got {call!r:.80}"
    return ""


def has_function(value: Any) -> bool:
    """Return whether a tool or a call has a function with a name."""
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def texts_or_ids(body: dict) -> list[str] | list[list[int]]:
    """Return a list of texts or of lists of ids: the four forms that `prompt` may have."""
    prompt = body.pop("prompt", "")
    # A list of ids is one prompt, a list of anything else several.
    listed = prompt if isinstance(prompt, list) and prompt and not is_ids(prompt) else [prompt]
    if not (all(isinstance(one, str) for one in listed) or all(is_ids(one) for one in listed)):
        what = "prompt must be a text, a list of texts, token ids or a list of lists of them"
        raise Refused(400, what, "prompt")
    return listed


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def encode(
    tokenizer: Tokenizer, renderer: Renderer | None, asked: ParsedRequest, system: str
) -> list[list[int]]:
    """Return the ids of each prompt. renderer: of a foreign chat template. Raise Refused."""
    try:
        if not asked.chat:
            return [begin_prompt(tokenizer, p) if isinstance(p, str) else p for p in asked.prompts]
        # The beginning of an answer is no turn for the template: its text follows the prompt.
        messages, begun = shown_messages(asked, system), ""
        if asked.proceeds:
            *messages, last = messages
            begun = last["content"]
        settings = template_settings(tokenizer, asked.template_settings)
        if renderer:
            ids = renderer.render(messages, settings)
        else:
            ids = tokenizer.render(messages, add_generation_prompt=True)[0]
        # Where the template opens thoughts they end before what is said already.
        if begun and tokenizer.decode(ids[-8:]).rstrip().endswith(THINK):
            begun = f"\n{THINK_END}\n\n{begun}"
        return [ids + tokenizer.encode(begun)]
    except UserError as error:
        where = "messages" if asked.chat else "prompt"
        raise Refused(400, str(error).partition(": ")[2], where) from None


def template_settings(tokenizer: Tokenizer, asked: dict) -> dict:
    """Return the tokenizer's settings of its template, and those asked for that it reads."""
    # Only settings that the template reads, and only plain values
    reads = tokenizer.template.reads if tokenizer.foreign_template else ()
    plain = str | bool | int | float | None
    known = {key: one for key, one in asked.items() if key in reads and isinstance(one, plain)}
    log_unknown([key for key in asked if key not in known], "chat_template_kwargs.")
    return tokenizer.template_settings | known


def shown_messages(asked: ParsedRequest, system: str) -> list[dict]:
    """Return a chat's messages with its system message, which names the tools."""
    (messages,) = asked.prompts
    return with_system(asked_messages(system, messages), {"tools": asked.tools})


# ---- an answer -----------------------------------------------------------------------------------


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
        self.request, self.has_begun = request, False
        self.text = ""  # all of it, which is divided into the next three
        self.thoughts, self.said = "", ""
        self.calls: list[dict] = []
        self.n_echoed = 0  # characters of the prompt, if it is repeated
        self.n_shown = 0  # characters that were shown, those included
        self.shown: list[Token] = []  # those with log-probabilities
        self.pending: list[Token] = []  # of these, those whose text is not shown yet
        self.finish: str | None = None
        # The prompt may end with <think>.
        self.opened = self.tokenizer.decode(request.ids[-8:]).rstrip().endswith(THINK)

    def push(self, token: Token) -> dict | None:
        """Take a token; return what a stream says of it, None = nothing yet."""
        asked, last, found = self.asked, bool(token.finish), []
        if asked.echo and not self.has_begun:
            found = self.echo()
        self.has_begun = True
        if not asked.scores_only:
            self.text += self.call_mark(token.id) + token.text
            found += self.newly_shown(token)
        # The text is divided into thoughts, then calls, and the rest is said.
        n_thoughts, n_said, self.said = len(self.thoughts), len(self.said), self.text
        if asked.chat and not asked.params.json_object:
            self.thoughts, self.said = divide_thoughts(self.text, self.opened, last)
        if asked.may_call:
            self.said, self.calls = divide_calls(self.said, last)
        text, thoughts = self.said[n_said:], self.thoughts[n_thoughts:]
        self.shown += found
        self.finish = "tool_calls" if self.calls else token.finish or None
        if not text and not thoughts and not found and not last:
            return None
        if not asked.chat:
            return self.described({"text": text}, found)
        delta = {"content": text} if text or found and not thoughts else {}
        delta |= {"reasoning_content": thoughts} if thoughts else {}
        if self.calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(self.calls)]
        return self.described({"delta": delta}, found)

    def go_on(self, turn: ToolTurn, request: Request) -> dict:
        """Take a turn that called tools instead of its last token; return what a stream says of it.

        What it said before is part of the turn."""
        indexed = [{"index": i, **one} for i, one in enumerate(turn.messages, len(self.turns))]
        self.turns += turn.messages
        self.begin(request)
        return self.described({"delta": {"turns": indexed}}, [])

    def call_mark(self, token: int) -> str:
        """Return the name of a special token that marks a call: as one, it has no text."""
        # With skip_special_tokens=false the text has the mark already.
        is_mark = token in self.tokenizer.special_ids and self.asked.params.skip_special_tokens
        name = self.tokenizer.decode([token]) if self.asked.may_call and is_mark else ""
        return name if name in MARKS + INNER_MARKS else ""

    def echo(self) -> list[Token]:
        """Repeat the prompt before the answer; return its scored tokens."""
        found, begin, decoder = [], 0, StreamDecoder(self.tokenizer)
        scored = self.request.prompt_logprobs if self.asked.params.logprobs >= 0 else []
        # Tokens that share a character have its place.
        for token, logprobs in zip(self.request.ids, scored, strict=False):
            found.append(Token(token, "", "", logprobs, begin=begin))
            is_special = token in self.tokenizer.special_ids
            begin += len(self.tokenizer.decode([token]) if is_special else decoder.push(token))
        self.text = self.tokenizer.decode(self.request.ids)
        self.n_echoed = self.n_shown = len(self.text)
        return found

    def newly_shown(self, token: Token) -> list[Token]:
        """Return the tokens whose text is shown now, not those of a stop string."""
        self.n_shown += len(token.text)
        # A token is shown once its first character is. The last one shows all but a stop string.
        if self.asked.params.logprobs < 0:
            return []
        # The end token has no text, so nothing is shown of it.
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
        if not self.asked.chat:
            return self.described({"text": self.said}, self.shown)
        # Fields that OpenAI's API lacks are there only if they say something.
        message = {"role": "assistant", "content": self.said, "refusal": None}
        if self.turns:
            message["turns"] = self.turns
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        if self.calls:
            message |= {"content": self.said or None, "tool_calls": self.calls}
        return self.described({"message": message}, self.shown)

    def described(self, body: dict, found: list[Token]) -> dict:
        logprobs = self.logprobs(found) if self.asked.params.logprobs >= 0 else None
        return {"index": self.index, **body, "logprobs": logprobs, "finish_reason": self.finish}

    def logprobs(self, found: list[Token]) -> dict:
        if self.asked.chat:
            return {"content": [self.chat_entry(token.logprobs) for token in found]}
        tokens, own, top = [], [], []
        for token in found:
            tokens.append(piece(self.tokenizer, token.id))
            own.append(finite(token.logprobs[token.id]) if token.logprobs else None)
            # The chosen token comes first; as the last key it wins over others of the same text.
            pairs = reversed((token.logprobs or {}).items())
            top.append({piece(self.tokenizer, i): finite(p) for i, p in pairs} or None)
        offsets = [token.begin for token in found]
        of_each = {"token_logprobs": own, "top_logprobs": top, "text_offset": offsets}
        return {"tokens": tokens, **of_each}

    def chat_entry(self, logprobs: dict[int, float]) -> dict:
        """Return a token, the first of `logprobs`, and the k likeliest, among which it may be."""
        entries = []
        for token, logprob in logprobs.items():
            raw = self.tokenizer.pieces.get(token, b"")
            text = raw.decode("utf-8", "replace")
            entries.append({"token": text, "logprob": finite(logprob), "bytes": list(raw)})
        # The chosen token may be less likely than all of them.
        k = self.asked.params.logprobs
        top = sorted(entries, key=lambda entry: entry["logprob"], reverse=True)[:k]
        return entries[0] | {"top_logprobs": top}


def piece(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token; of part of a character its bytes, as OpenAI writes them."""
    raw = tokenizer.pieces.get(token, b"")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no -Infinity; OpenAI writes this
