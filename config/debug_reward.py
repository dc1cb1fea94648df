"""Run all of reward.py in seconds on a laptop's CPU, with its own pairs and tiny model.

python reward.py config/debug_reward.py

The rejected answer is the chosen one with its words reversed: nearly all held-out pairs come out
right.
"""

from groundup.demo import debug_data, debug_model

debug_data.make_debug_rows("data/debug/reward.jsonl", debug_data.debug_pairs)
debug_model.make_debug_model("data/debug/model")

out_dir = "out/debug_reward"
init_from = "data/debug/model"
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
learning_rate = 2e-3
eval_every = 20
save_every = 20
log_every = 5
