"""How does a model write?

In: a model, prompts as token ids, sampling parameters. Out: ids, texts, log-probabilities.

A chat request passes through server (who may ask, the queue, streams), openai_api (its body),
files/turns.py (messages), tokenizer.py (their ids), engine (requests that generate together),
kv_cache (their rows), model.py (the prompt), kernels/decoding.py (a step), sampling (logits to
tokens) and openai_api again (tokens to what is sent) with call_forms (thoughts and calls in a
text). Scripts call engine, or completion.

Then decode (the model's copy for inference), json_mode, answers (files of prompts), chat (the
terminal), beam, tools (the functions that an answer calls) with tool_process; of serve.py rendering
(foreign templates, in a process), page and markdown.
"""
