"""How does a model write?

In: a model, prompts as token ids, sampling parameters. Out: ids, texts, log-probabilities. Read
engine (requests that generate together), kv_cache (their rows), sampling (logits to tokens), decode
(the model's copy for inference and its step), json_mode, and completion (what scripts call). Then
answers (files of prompts), chat (the terminal), tools (functions that answers call) with
tool_process, beam, and of serve.py openai_format (bodies), openai_answer (answers), rendering
(foreign templates, in a process), http (connections, counts), page, markdown.
"""
