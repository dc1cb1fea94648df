"""What an answer looks like, before demo_rl.py. Two CPU cores, a minute.

    python tools/largest.py --out_dir=data/demo_largest
    python sft.py config/demo_largest.py

The data are 200 questions which of three numbers is the largest, with answers.
"""

out_dir = "out/demo_largest"
init_from = "out/demo_sft"
data = "data/demo_largest/examples.jsonl"
val_fraction = 0.1
compile = False  # a fresh machine may have no C++ compiler
block_size = 128
batch_size = 32
max_steps = 20
learning_rate = 1e-3
warmup_steps = 10
eval_every = 20
eval_answers = 0
sample_prompts = "Which is the largest of 5, 21, 14?|5、21、14哪个最大?"
