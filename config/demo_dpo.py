"""What `make demo-chat` ends with: the demo's chat model learns to prefer right descriptions, finished and without
repetition, to wrong ones. On two CPU cores in FIGURE minutes; config/demo_reward.py says how its pairs are made, of
questions that the chat model was not tuned on.

    python dpo.py config/demo_dpo.py
    python sample.py --init_from=out/demo_dpo                                  # a chat

On held-out pairs the margin comes to FIGURE with FIGURE % of the signs right; the chosen answers lose FIGURE of FIGURE
nats.
"""

out_dir = "out/demo_dpo"
init_from = "out/demo_sft"
data = "data/demo_pairs"
compile = False  # a fresh machine may have no C++ compiler
block_size = 256
batch_size = 16
epochs = 2.0  # of so few pairs
learning_rate = 1e-4
warmup_fraction = 0.1
nll_weight = 0.5  # keeps the chosen answers likely
eval_every = 100
eval_steps = 0
save_every = 1000
log_every = 20
