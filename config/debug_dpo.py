"""Run all of dpo.py in seconds on a laptop's CPU, with its own pairs and tiny model.

python dpo.py config/debug_dpo.py
"""

from groundup.demo import debug_data, debug_model

debug_data.make_debug_rows("data/debug/dpo.jsonl", debug_data.debug_pairs)
debug_model.make_debug_model("data/debug/model")

out_dir = "out/debug_dpo"
init_from = "data/debug/model"
data = "data/debug/dpo.jsonl"
val_fraction = 0.1
device = "cpu"
dtype = "float32"
compile = False
block_size = 256
batch_size = 4
total_batch_pairs = 8  # two micro-steps, or two ranks
max_steps = 50
warmup_steps = 5
learning_rate = 1e-3
eval_every = 25
eval_steps = 4
save_every = 25
log_every = 5
