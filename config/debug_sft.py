"""Runs all of sft.py in seconds: makes its own conversations, tokenizer and tiny model, saves, evaluates.

    python sft.py config/debug_sft.py
    torchrun --standalone --nproc_per_node=2 sft.py config/debug_sft.py        # the same losses

A laptop's CPU.
"""

out_dir = "out/debug_sft"
init_from = ""
data = "data/debug/chat.jsonl"
val_fraction = 0.1
device = "cpu"
dtype = "float32"
compile = False
block_size = 256
batch_size = 2
total_batch_tokens = 2 * 2 * 256  # two micro-steps, or two ranks
max_steps = 50
warmup_steps = 5
warmup_fraction = 0.0
learning_rate = 1e-2
eval_every = 25
eval_steps = 4
eval_answers = 4
eval_new_tokens = 16
save_every = 25
log_every = 5
sample_prompts = "What does len do?"
