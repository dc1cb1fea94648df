"""Run all of pretrain.py in seconds on a laptop's CPU, with its own corpus.

python pretrain.py config/debug.py
torchrun --standalone --nproc_per_node=2 pretrain.py config/debug.py        # the same losses
"""

from groundup.demo import debug_data

debug_data.make_debug_data("data/debug")

out_dir = "out/debug"
data_dir = "data/debug"
device = "cpu"
dtype = "float32"
compile = False
n_layer = 2
n_head = 4
n_kv_head = 2
n_embd = 64
block_size = 64
batch_size = 4
total_batch_tokens = 2 * 4 * 64  # two micro-steps, or two ranks
max_steps = 50
warmup_steps = 5
learning_rate = 1e-2
min_lr = 1e-3
eval_every = 25
eval_steps = 8
save_every = 25
log_every = 5
sample_prompts = "The"
