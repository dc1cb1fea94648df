"""How does a model write?

In: a model, prompts as token ids, sampling parameters. Out: ids, texts, log-probabilities. Read
completion (prompts, requests, results), text_parts (stop strings, thoughts, calls), sampling
(logits to tokens), json_mode, kv_cache, decode (the model's copy for inference and its step) and
engine (texts that generate together), then answers (files of prompts), chat (the terminal), tools
(functions that answers call) with tool_process, beam, and of serve.py openai_format (bodies and
answers), rendering (foreign templates, in a process), http (connections, counts), page, markdown.
"""
