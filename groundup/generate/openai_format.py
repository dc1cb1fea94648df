"""The body of a request in OpenAI's format -> prompts and parameters. No HTTP. Answers are in
openai_answer.py.

A field that is known and would change the answer, but cannot be served, is refused. A field that is
not known changes nothing: it is named once in the log.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from groundup.errors import UserError, printable
from groundup.files.row_formats import turns_at, with_system
from groundup.files.streams import mended
from groundup.files.turns import BadRow
from groundup.generate.call_forms import ThoughtReader
from groundup.generate.completion import begin_prompt
from groundup.generate.rendering import Renderer
from groundup.generate.sampling import SamplingParams
from tokenizer import Tokenizer

# Names of sampling parameters. Those from top_k on are not OpenAI's but vLLM's.
SAMPLING = "temperature top_p presence_penalty frequency_penalty top_k min_p repetition_penalty"
SAMPLING += " ignore_eos skip_special_tokens"
SAMPLING = {name: name for name in SAMPLING.split()} | {"min_tokens": "min_new_tokens"}
LIMITS = ("max_tokens", "max_completion_tokens")  # the second, a chat's only, is the newer name
REFUSED = {  # fields that would change the answer, with the values that change nothing
    "logit_bias": ({},),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "use_beam_search": (False,),
    "structured_outputs": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "repetition_detection": (),
    "watermarking": (False,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "thinking_token_budget": (-1,),
    "include_reasoning": (True,),
    "chat_template": (),
    "documents": ([],),
    "priority": (0,),
    "cache_salt": (),
}
REFUSED |= {f"guided_{kind}": () for kind in ("json", "regex", "choice", "grammar")}
REFUSED_IN_CHATS = {"echo": (False,), "add_special_tokens": (False,)}
REFUSED_IN_COMPLETIONS = {"add_special_tokens": (True,)}
# Fields that change no answer. Others that are not known are named in the log.
WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier")
WITHOUT_EFFECT += ("prompt_cache_key", "cache_prompt", "parallel_tool_calls")
MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal", "id")
MESSAGE += ("reasoning_content", "reasoning")  # thoughts of earlier answers are not read
MAX_N, MAX_TOP_LOGPROBS, MAX_STOPS = 16, 20, 16
MAX_LOGGED = 100  # names of unknown fields
logged: set[str] = set()


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
class ParsedRequest:
    """What a body asks for."""

    model: str
    prompts: list  # token ids, or texts, or one conversation
    params: SamplingParams
    n: int  # choices of each prompt; greedy ones are copies of one sample
    chat: bool
    stream: bool
    include_usage: bool
    echo: bool
    limited: bool  # whether the body says how many tokens there may be
    scores_only: bool  # max_tokens=0 with echo: the prompt's log-probabilities, no new token
    tools: list[dict]  # that a chat's answer may call
    runs_tools: bool  # the answer may call the server's own, shown or not, which it runs
    proceeds: bool  # the last message is the beginning of the answer
    template_settings: dict = field(default_factory=dict)  # of the model's chat template

    @property
    def n_samples(self) -> int:
        return len(self.prompts) * self.params.n


def parse(
    raw: bytes, chat: bool, defaults: dict, seed: int, own_tools: Sequence[dict] | None = None
) -> ParsedRequest:
    """Return what the body of /v1/chat/completions (`chat`) or /v1/completions asks for.

    defaults: sampling parameters that the body leaves open; seed: if it has none. own_tools: of the
    server, for chats without tools. Raise Refused."""
    body = read_object(raw)
    as_json = body.get("response_format") == {"type": "json_object"}
    refused = REFUSED | (REFUSED_IN_CHATS if chat else REFUSED_IN_COMPLETIONS)
    for name, allowed in refused.items():
        value = body.pop(name, None)
        if value is not None and value not in allowed:
            fine = "".join(f", or give {one!r}" for one in allowed)
            raise Refused(400, f"{name}={value!r:.80} is not supported: leave it out{fine}", name)

    tools, settings, echo, proceeds, runs_tools = [], {}, False, False, False
    if chat:
        prompts = [conversation(body.pop("messages", None))]
        runs_tools = own_tools is not None and not as_json and "tools" not in body
        runs_tools &= body.get("tool_choice") != "none"
        tools = called_tools(body) or list(own_tools or ()) * runs_tools
        proceeds = begun_answer(body, prompts[0])
        settings = take(body, "chat_template_kwargs", dict, {})
        if "reasoning_effort" in body:
            settings = {"reasoning_effort": take(body, "reasoning_effort", str, "")} | settings
    else:
        prompts = texts_or_ids(body.pop("prompt", None))
        echo = take(body, "echo", bool, False)
    limit_name, limit = token_limit(body, chat)
    scores_only = echo and limit == 0
    n = take(body, "n", int, 1)
    if not 1 <= n <= MAX_N:
        raise Refused(400, f"n must be from 1 to {MAX_N}, got {n}", "n")

    values = defaults | sampling_values(body, seed) | {"json_object": as_json}
    values["n"] = 1 if values.get("temperature") == 0 else n
    top = likeliest(body, chat)
    values |= {"logprobs": top, "prompt_logprobs": top if echo else -1}
    if limit is not None:
        values["max_new_tokens"] = 1 if scores_only else limit
    names = {"max_new_tokens": limit_name} | {ours: name for name, ours in SAMPLING.items()}

    options = take(body, "stream_options", dict, {})
    asked = ParsedRequest(
        model=take(body, "model", str, ""),
        prompts=prompts,
        params=sampling_params(values, names),
        n=n,
        chat=chat,
        stream=take(body, "stream", bool, False),
        include_usage=take(options, "include_usage", bool, False),
        echo=echo,
        limited=limit is not None,
        scores_only=scores_only,
        tools=tools,
        runs_tools=runs_tools,
        proceeds=proceeds,
        template_settings=settings,
    )
    log_unknown(body, "")
    log_unknown(options, "stream_options.")
    return asked


def token_limit(body: dict, chat: bool) -> tuple[str, int | None]:
    """Return the name and the value of the limit of new tokens; None = there is none."""
    limits = {name: take(body, name, int, 0) for name in LIMITS[: 1 + chat] if name in body}
    return list(limits.items())[-1] if limits else (LIMITS[0], None)


def sampling_values(body: dict, seed: int) -> dict:
    """Return the sampling parameters of a body by our names. seed: if it has none."""
    values = {ours: body.pop(name) for name, ours in SAMPLING.items() if name in body}
    asked = take(body, "seed", int, -1)
    values["seed"] = seed if asked == -1 else asked % 2**63
    values["stop"] = stop_strings(body.pop("stop", []))
    stop_ids = body.pop("stop_token_ids", [])
    if stop_ids and not is_ids(stop_ids):
        raise Refused(400, f"stop_token_ids must be ids, got {stop_ids!r:.80}", "stop_token_ids")
    values["stop_token_ids"] = frozenset(stop_ids)
    return values


def sampling_params(values: dict, names: dict[str, str]) -> SamplingParams:
    """Return the parameters. names: that the client knows, of those that have another here."""
    try:
        return SamplingParams(**values)
    except UserError as error:
        words = str(error).removeprefix("sample: ")
        words = re.sub(r"\w+", lambda match: names.get(match[0], match[0]), words)
        first = words.split(" ")[0]
        known = {one.name for one in fields(SamplingParams)} | set(names.values())
        raise Refused(400, words, first if first in known else None) from None


def called_tools(body: dict) -> list[dict]:
    """Return the tools that the answer may call. Raise Refused."""
    tools, choice = take(body, "tools", list, []), body.pop("tool_choice", "auto")
    if not all(map(is_tool, tools)):
        raise Refused(400, "tools must be functions with a name", "tools")
    if choice not in ("none", "auto"):
        what = f"tool_choice={choice!r:.80} is not supported: it must be 'auto' or 'none'"
        raise Refused(400, what, "tool_choice")
    return tools if choice == "auto" else []


def begun_answer(body: dict, messages: list[dict]) -> bool:
    """Return whether the answer is to continue the last message, as vLLM does. Raise Refused."""
    proceeds = take(body, "continue_final_message", bool, False)
    if take(body, "add_generation_prompt", bool, not proceeds) == proceeds:
        what = "either continue_final_message or add_generation_prompt must be true"
        raise Refused(400, what, "continue_final_message")
    if proceeds and (messages[-1]["role"] != "assistant" or len(messages) < 2):
        what = "continue_final_message needs a last message of the assistant"
        raise Refused(400, what, "continue_final_message")
    return proceeds


def likeliest(body: dict, chat: bool) -> int:
    """Return how many of the likeliest tokens are to be named at each token; -1 = none."""
    if chat:
        wanted, top = take(body, "logprobs", bool, False), take(body, "top_logprobs", int, 0)
        if top and not wanted:
            raise Refused(400, "top_logprobs needs logprobs=true", "top_logprobs")
        top = top if wanted else -1
    else:
        top = take(body, "logprobs", int, -1)
    if top > MAX_TOP_LOGPROBS:
        name = "top_logprobs" if chat else "logprobs"
        raise Refused(400, f"{name} must be at most {MAX_TOP_LOGPROBS}, got {top}", name)
    return top


def log_unknown(body: dict, where: str) -> None:
    """Name the fields that are left, each once: they change nothing."""
    for name in body:
        line = f"serve: a client sends {where}{name[:80]!r}, which is not known and changes nothing"
        if name not in WITHOUT_EFFECT and line not in logged and len(logged) < MAX_LOGGED:
            logged.add(line)
            print(printable(line), file=sys.stderr, flush=True)


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
        what = f"messages must be a list of messages, got {messages!r:.80}"
        raise Refused(400, what, "messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            what = f"message {i} must be an object with a role, got {message!r:.80}"
            raise Refused(400, what, "messages")
        for key, kind in {"tool_calls": list, "name": str, "tool_call_id": str}.items():
            if not isinstance(message.get(key), kind | None):
                what = f"message {i}: {key} must be of type {kind.__name__}"
                raise Refused(400, f"{what}, got {message[key]!r:.80}", "messages")
        for call in message.get("tool_calls") or ():
            if not has_function(call):
                what = f"message {i}: a call must have a function with a name, got {call!r:.80}"
                raise Refused(400, what, "messages")
        log_unknown({key: None for key in message if key not in MESSAGE}, "messages[].")
    known = [{key: one for key, one in m.items() if key in MESSAGE[:6]} for m in messages]
    try:
        return turns_at("messages", {"messages": known})
    except BadRow as problem:
        raise Refused(400, f"messages: {problem}", "messages") from None


def is_tool(tool: Any) -> bool:
    return has_function(tool) and tool.get("type") == "function"


def has_function(value: Any) -> bool:
    """Return whether a tool or a call has a function with a name."""
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def texts_or_ids(prompt: Any) -> list[str] | list[list[int]]:
    """Return a list of texts or of lists of ids: the four forms that `prompt` may have."""
    prompt = "" if prompt is None else prompt
    listed = prompt if isinstance(prompt, list) and prompt and not is_ids(prompt) else [prompt]
    if not (all(isinstance(one, str) for one in listed) or all(is_ids(one) for one in listed)):
        what = "prompt must be a text, a list of texts, token ids or a list of lists of them"
        raise Refused(400, what, "prompt")
    return listed


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def stop_strings(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    are_texts = isinstance(stops, list) and all(isinstance(one, str) and one for one in stops)
    if not are_texts or len(stops) > MAX_STOPS:
        what = f"stop must be a text or at most {MAX_STOPS} texts, got {stop!r:.80}"
        raise Refused(400, what, "stop")
    return tuple(stops)


def encode(
    tokenizer: Tokenizer, renderer: Renderer | None, asked: ParsedRequest, system: str
) -> list[list[int]]:
    """Return the ids of each prompt. renderer: of a foreign chat template. Raise Refused."""
    try:
        if not asked.chat:
            return [begin_prompt(tokenizer, p) if isinstance(p, str) else p for p in asked.prompts]
        messages = shown_messages(asked, system)
        begun = ""
        if asked.proceeds:
            *messages, last = messages
            begun = last["content"]
        settings = template_settings(tokenizer, asked.template_settings)
        if renderer:
            ids = renderer.render(messages, settings)
        else:
            ids = tokenizer.render(messages, add_generation_prompt=True)[0]
        if begun and tokenizer.decode(ids[-8:]).rstrip().endswith(ThoughtReader.OPEN):
            begun = f"\n{ThoughtReader.CLOSE}\n\n{begun}"  # without thoughts
        return [ids + tokenizer.encode(begun)]
    except UserError as error:
        where = "messages" if asked.chat else "prompt"
        raise Refused(400, str(error).partition(": ")[2], where) from None


def template_settings(tokenizer: Tokenizer, asked: dict) -> dict:
    """Return the tokenizer's settings of its template, and those asked for that it reads."""
    reads = tokenizer.template.reads if tokenizer.foreign_template else ()
    plain = str | bool | int | float | None
    known = {key: one for key, one in asked.items() if key in reads and isinstance(one, plain)}
    log_unknown({key: None for key in asked if key not in known}, "chat_template_kwargs.")
    return tokenizer.template_settings | known


def shown_messages(asked: ParsedRequest, system: str) -> list[dict]:
    """Return a chat's messages with its system message, which names the tools."""
    (messages,) = asked.prompts
    own = messages[0]["role"] == "system"
    return with_system(messages, {"system": "" if own else system, "tools": asked.tools})
