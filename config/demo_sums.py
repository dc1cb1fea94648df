"""What a call looks like, before demo_tools.py. Two CPU cores, a minute.

    python tools/sums.py --out_dir=data/demo_sums
    python sft.py config/demo_sums.py

The data are sums of two numbers with the calls of a calculator and the answers. Copying digits is
what a small model learns slowly: no example is shown twice, and the learning rate stays high for
most of the steps (docs/tools.md).
"""

out_dir = "out/demo_sums"
init_from = "out/demo_sft"
data = "data/demo_sums/examples.jsonl"
val_fraction = 0.02
compile = False  # a fresh machine may have no C++ compiler
block_size = 256
batch_size = 8
epochs = 1.0
optimizer = "muon"
learning_rate = 4e-3
schedule = "wsd"
warmup_steps = 10
eval_every = 100
eval_steps = 4
eval_answers = 0
log_every = 20
# how much is 123 + 456?
sample_prompts = "What is 123 + 456?|123 + 456 \u7b49\u4e8e\u591a\u5c11\uff1f"
