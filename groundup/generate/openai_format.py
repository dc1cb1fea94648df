"""OpenAI's formats: the body of a request -> prompts and sampling parameters; tokens -> choices. No
HTTP: see serve.py.

A field that is not understood is refused, so that no wish of a client is passed over in silence.
"""

import json
import re
import secrets
from dataclasses import dataclass, fields
from typing import Any

from groundup.errors import UserError
from groundup.files.row_formats import turns_at, with_system
from groundup.files.streams import mended
from groundup.files.text_keys import BadRow
from groundup.files.untrusted import loads
from groundup.generate.completion import Token, begin_prompt, prompt_ids
from groundup.generate.sampling import SamplingParams
from tokenizer import Tokenizer

# Fields that have the names of sampling parameters; top_k, min_p and repetition_penalty are vLLM's
# additions.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
)
WITHOUT_EFFECT = {  # fields that change no answer, with the values that they may have, () = any
    "user": (),
    "metadata": (),
    "store": (),
    "service_tier": (),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "parallel_tool_calls": (),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
}
MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal")
LIMITS = ("max_tokens", "max_completion_tokens")  # the second, a chat's only, is the newer name
MAX_N, MAX_TOP_LOGPROBS, MAX_STOPS = 16, 20, 16


class Refused(Exception):
    """A request that is answered with an error, in OpenAI's shape."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.status = status
        self.body = {
            "error": {"message": message[:1000], "type": kind, "param": param, "code": code}
        }


@dataclass
class Asked:
    """What a body asks for. prompts: token ids, or texts, or one conversation."""

    model: str
    prompts: list
    params: SamplingParams
    chat: bool
    stream: bool
    include_usage: bool
    echo: bool
    limited: bool  # whether the body says how many tokens there may be
    tools: list[dict]  # that a chat's answer may call


def parse(raw: bytes, chat: bool, defaults: dict, seed: int) -> Asked:
    """Return what the body of /v1/chat/completions (`chat`) or /v1/completions asks for. Raise
    Refused.

    defaults: sampling parameters of what it leaves open; seed: where it has none."""
    body = read_object(raw)
    for name, allowed in WITHOUT_EFFECT.items():
        value = body.pop(name, None)
        if value is not None and allowed and value not in allowed:
            raise Refused(400, f"{name}={value!r:.80} is not supported", name)
    model = take(body, "model", str, "")
    prompts = (
        [conversation(body.pop("messages", None))]
        if chat
        else texts_or_ids(body.pop("prompt", None))
    )
    choice, tools = body.pop("tool_choice", "auto"), take(body, "tools", list, []) if chat else []
    if choice not in ("none", "auto") or not all(is_tool(tool) for tool in tools):
        raise Refused(
            400, "tools must be functions with a name, and tool_choice auto or none", "tools"
        )
    stream, echo = (
        take(body, "stream", bool, False),
        take(body, "echo", bool, False) if not chat else False,
    )
    options = take(body, "stream_options", dict, {})
    limits = [take(body, name, int, 0) for name in LIMITS[: 1 + chat] if name in body]
    values = defaults | {name: body.pop(name) for name in SAMPLING if name in body}
    values |= {"seed": body.pop("seed", seed), "stop": stop_strings(body.pop("stop", ()))}
    if limits:
        values["max_new_tokens"] = limits[-1]
    if chat:
        wanted, top = take(body, "logprobs", bool, False), take(body, "top_logprobs", int, 0)
        if top and not wanted:
            raise Refused(400, "top_logprobs needs logprobs=true", "top_logprobs")
        top = top if wanted else -1
    else:
        top = take(body, "logprobs", int, -1)
    if top > MAX_TOP_LOGPROBS:
        raise Refused(
            400, f"logprobs must be at most {MAX_TOP_LOGPROBS}, got {top}", "top_logprobs"
        )
    values |= {"logprobs": top} | ({"prompt_logprobs": top} if echo else {})
    if body:
        raise Refused(
            400,
            f"Unrecognized request argument supplied: {next(iter(body))!r:.80}",
            next(iter(body))[:80],
        )
    if echo and stream:
        raise Refused(400, "echo is not supported with stream", "echo")
    for name, value in values.items():  # NaN is no number of JSON; a bool is an int to Python
        if isinstance(value, bool):
            raise Refused(400, f"{name} must be a number, got {value}", name)
    try:
        params = SamplingParams(**values)
    except UserError as error:
        words = str(error).removeprefix("sample: ")
        known = {field.name for field in fields(SamplingParams)}
        raise Refused(400, words, words.split()[0] if words.split()[0] in known else None) from None
    if params.n > MAX_N:
        raise Refused(400, f"n must be at most {MAX_N}, got {params.n}", "n")
    usage, tools = take(options, "include_usage", bool, False), tools if choice == "auto" else []
    return Asked(model, prompts, params, chat, stream, usage, echo, bool(limits), tools)


def read_object(raw: bytes) -> dict:
    """Return the fields of a body that are not null."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        body = json.loads(raw, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"We could not parse the JSON body of your request: {error}") from None
    if not isinstance(body, dict):
        raise Refused(400, f"the body must be an object, got {type(body).__name__}")
    try:
        return {key: value for key, value in mended(body).items() if value is not None}
    except RecursionError:
        raise Refused(400, "the body is nested too deeply") from None


def take(body: dict, name: str, kind: type, default: Any) -> Any:
    value = body.pop(name, default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Refused(400, f"{name} must be of type {kind.__name__}, got {value!r:.80}", name)
    return value


def conversation(messages: Any) -> list[dict]:
    """Return the messages as every other script reads them: content and calls as one text."""
    if not isinstance(messages, list) or not messages:
        raise Refused(400, f"messages must be a list of messages, got {messages!r:.80}", "messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused(
                400, f"message {i} must be an object with a role, got {message!r:.80}", "messages"
            )
        others = {k for k, v in message.items() if k not in MESSAGE and v not in (None, [], {})}
        if others:
            raise Refused(400, f"message {i}: {min(others)!r:.80} is not supported", "messages")
    try:
        return turns_at("messages", {"messages": messages})
    except BadRow as problem:
        raise Refused(400, f"messages: {problem}", "messages") from None


def is_tool(tool: Any) -> bool:
    function = (
        tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    )
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def texts_or_ids(prompt: Any) -> list[str] | list[list[int]]:
    """Return a list of texts or of lists of ids: the four forms that `prompt` may have."""
    prompt = "" if prompt is None else prompt
    listed = prompt if isinstance(prompt, list) and prompt and not is_ids(prompt) else [prompt]
    if not (all(isinstance(one, str) for one in listed) or all(is_ids(one) for one in listed)):
        raise Refused(
            400,
            "prompt must be a text, a list of texts, token ids or a list of lists of them",
            "prompt",
        )
    return listed


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def stop_strings(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop
    if (
        not isinstance(stops, tuple)
        or len(stops) > MAX_STOPS
        or not all(isinstance(s, str) and s for s in stops)
    ):
        raise Refused(
            400, f"stop must be a text or at most {MAX_STOPS} texts, got {stop!r:.80}", "stop"
        )
    return stops


def encode(tokenizer: Tokenizer, asked: Asked, system: str) -> list[list[int]]:
    """Return the ids of each prompt. Raise Refused."""
    try:
        if asked.chat:
            prompts = (with_tools(messages, system, asked.tools) for messages in asked.prompts)
            return [prompt_ids(tokenizer, True, system, messages) for messages in prompts]
        return [
            begin_prompt(tokenizer, one) if isinstance(one, str) else one for one in asked.prompts
        ]
    except UserError as error:
        raise Refused(
            400, str(error).partition(": ")[2], "messages" if asked.chat else "prompt"
        ) from None


def with_tools(messages: list[dict], system: str, tools: list[dict]) -> list[dict]:
    own = messages[0]["role"] == "system"
    return (
        with_system(messages, {"system": "" if own else system, "tools": tools})
        if tools
        else messages
    )


# ---- answers -------------------------------------------------------------------------------------


class Choice:
    """A choice of an answer, as its tokens come."""

    def __init__(self, tokenizer: Tokenizer, asked: Asked, index: int) -> None:
        self.tokenizer, self.asked, self.index = tokenizer, asked, index
        self.texts: list[str] = []
        self.found: list[
            dict[int, float] | None
        ] = []  # log-probabilities of the tokens that are shown
        self.finish: str | None = None
        self.caller = CallReader() if asked.tools else None
        self.calls: list[dict] = []

    def push(self, token: Token, logprobs: dict[int, float], is_stop: bool) -> dict | None:
        """Take a token; return what a stream says of it, None = nothing yet."""
        text = token.text
        if self.caller:
            text, self.calls = self.caller.push(text, bool(token.finish))
        self.texts.append(text)
        self.finish = "tool_calls" if self.calls else token.finish or None
        found = [logprobs] if self.asked.params.logprobs >= 0 and not is_stop else []
        self.found += found
        if not text and not found and not token.finish:
            return None
        if self.asked.chat:
            calls = [{"index": i, **call} for i, call in enumerate(self.calls)]
            delta = ({"content": text} if text or found else {}) | (
                {"tool_calls": calls} if calls else {}
            )
            body = {"delta": delta}
        else:
            body = {"text": text}
        return {
            "index": self.index,
            **body,
            "logprobs": self.logprobs(found),
            "finish_reason": self.finish,
        }

    def whole(
        self, prompt: str = "", prompt_logprobs: list[dict[int, float] | None] | None = None
    ) -> dict:
        """Return the finished choice. prompt: that is repeated before it."""
        text = prompt + "".join(self.texts)
        message = {"role": "assistant", "content": text, "refusal": None}
        if self.calls:
            message |= {"content": text or None, "tool_calls": self.calls}
        body = {"message": message} if self.asked.chat else {"text": text}
        found = [*(prompt_logprobs or []), *self.found]
        return {
            "index": self.index,
            **body,
            "logprobs": self.logprobs(found),
            "finish_reason": self.finish,
        }

    def logprobs(self, found: list[dict[int, float] | None]) -> dict | None:
        k = self.asked.params.logprobs
        if k < 0:
            return None
        if self.asked.chat:
            entries = ([entry(self.tokenizer, *pair) for pair in one.items()] for one in found)
            likeliest = ((list(one.items()), own) for one, own in zip(found, entries, strict=True))
            return {
                "content": [
                    own[0] | {"top_logprobs": top(pairs, own, k)} for pairs, own in likeliest
                ]
            }
        pairs = [
            [(piece(self.tokenizer, i), at_least(p)) for i, p in (one or {}).items()]
            for one in found
        ]
        tokens = [one[0][0] if one else "" for one in pairs]  # the chosen token stands first
        return {
            "tokens": tokens,
            "token_logprobs": [one[0][1] if one else None for one in pairs],
            "top_logprobs": [
                dict(reversed(one)) or None for one in pairs
            ],  # it wins over others of the same text
            "text_offset": offsets(tokens),
        }


class CallReader:
    """Divides an answer that comes piece by piece into what is said and what is called. Three
    forms are calls, as the templates of these models write them: <tool_call>{...}</tool_call>
    (Qwen, and our own), and a whole answer that is a call (Llama 3) or a list of calls
    (Mistral). Text is held back as long as it may become a call."""

    OPEN, CALL = "<tool_call>", re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>\s*|\Z)", re.S)

    def __init__(self) -> None:
        self.held, self.said = "", False

    def push(self, text: str, last: bool) -> tuple[str, list[dict]]:
        """Return (what is said, calls); calls come with the last piece only."""
        self.held += text
        if last:
            return self.end()
        if not self.said and self.held.lstrip()[:1] in ("", "{", "["):
            return "", []
        begun = (k for k in range(1, len(self.OPEN)) if self.held.endswith(self.OPEN[:k]))
        at = (
            self.held.find(self.OPEN)
            if self.OPEN in self.held
            else len(self.held) - max(begun, default=0)
        )
        text, self.held = self.held[:at], self.held[at:]
        self.said |= bool(text)
        return text, []

    def end(self) -> tuple[str, list[dict]]:
        said, head, called = self.held.partition(self.OPEN)
        if head:
            calls = [read_calls(one) for one in self.CALL.findall(head + called)]
            rest = self.CALL.sub("", head + called)
        else:
            calls, said, rest = [] if self.said else [read_calls(self.held)], "", ""
        if not calls or not all(calls) or rest:
            return self.held, []
        return said.rstrip(), [call for one in calls for call in one]


def read_calls(text: str) -> list[dict]:
    """Return the calls in a JSON object or list of them, [] if it is anything else."""
    try:
        found = loads(text.removeprefix("[TOOL_CALLS]"))
    except ValueError:
        return []
    calls = []
    for call in found if isinstance(found, list) else [found]:
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", call.get("parameters")) if isinstance(name, str) else None
        if not isinstance(arguments, dict):
            return []
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": function,
        })
    return calls


def top(pairs: list[tuple[int, float]], entries: list[dict], k: int) -> list[dict]:
    """Return the entries of the k likeliest of a token's ids: all but the chosen one, unless
    that is among them."""
    order = sorted(range(len(pairs)), key=lambda i: pairs[i][1], reverse=True)
    return [entries[i] for i in order[:k]]


def entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict:
    raw = tokenizer.pieces.get(token, b"")
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": at_least(logprob),
        "bytes": list(raw),
    }


def piece(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token; of part of a character its bytes, as OpenAI writes them."""
    raw = tokenizer.pieces.get(token, b"")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def at_least(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no -Infinity; OpenAI writes this


def offsets(pieces: list[str]) -> list[int]:
    ends = [0]
    for text in pieces:
        ends.append(ends[-1] + len(text))
    return ends[:-1]


def usage(n_prompt: int, n_new: int) -> dict:
    return {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}
