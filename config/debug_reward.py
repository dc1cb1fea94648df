"""Runs all of reward.py in seconds: makes its own pairs, tokenizer and tiny model, saves, evaluates.
The better answer is that of the question, the other one its words in reverse: about 90 % of held-out pairs are right.

    python reward.py config/debug_reward.py
    torchrun --standalone --nproc_per_node=2 reward.py config/debug_reward.py        # the same losses

A laptop's CPU.
"""

out_dir = "out/debug_reward"
init_from = ""
data = "data/debug/reward.jsonl"
val_fraction = 0.1
device = "cpu"
dtype = "float32"
compile = False
block_size = 512
batch_size = 4
total_batch_pairs = 8  # two micro-steps, or two ranks
max_steps = 60
warmup_steps = 5
warmup_fraction = 0.0
learning_rate = 2e-3
eval_every = 20
save_every = 20
log_every = 5
