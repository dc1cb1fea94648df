"""Run all of sft.py in seconds on a laptop's CPU, with its own conversations and tiny model.

python sft.py config/debug_sft.py
"""

from groundup.demo import debug_data, debug_model

debug_data.make_debug_rows("data/debug/chat.jsonl", debug_data.debug_chats)
debug_model.make_debug_model("data/debug/model")

out_dir = "out/debug_sft"
init_from = "data/debug/model"
data = "data/debug/chat.jsonl"
val_fraction = 0.1
device = "cpu"
dtype = "float32"
compile = False
block_size = 256
pack = "yes"
batch_size = 2
total_batch_tokens = 2 * 2 * 256  # two micro-steps, or two ranks
max_steps = 50
warmup_steps = 5
learning_rate = 1e-2
eval_every = 25
eval_steps = 4
eval_answers = 4
eval_new_tokens = 16
save_every = 25
log_every = 5
sample_prompts = "What does len do?"
