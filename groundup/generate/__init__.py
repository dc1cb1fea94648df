"""How does a model write?

In: a model, prompts as token ids, sampling parameters. Out: ids, texts, log-probabilities. Read
completion (prompts, requests, results), sampling (logits to tokens, beams), kv_cache, matrices
(the model's copy for inference), native (its steps on a CPU, in C) and engine (texts that
generate together), then answers (files of prompts), chat (the terminal), and of serve.py
openai_format (bodies and answers), page, metrics.
"""
