"""How does a model write?

In: a model, prompts as token ids, sampling parameters. Out: ids, texts, log-probabilities. Read
completion (prompts, requests, results), text_parts (stop strings, thoughts, calls), sampling
(logits to tokens, beams), json_mode, kv_cache, matrices (the model's copy for inference), native
(its steps on a CPU, in C), cuda_graph (on a GPU) and engine (texts that generate together), then
answers (files of prompts), chat (the terminal), tools (functions that answers call) with
tool_process, and of serve.py openai_format (bodies and
answers), rendering (foreign templates, in a process), connections (their bounds), page, metrics.
"""
