"""How does a model write?

In: a model, prompts as token ids, sampling parameters. Out: ids, texts, log-probabilities. Read completion (prompts,
requests, results), sampling (logits to tokens, beams), kv_cache and engine (rows that generate together), then answers
(files of prompts) and chat (the terminal).
"""
