"""The chat model of `make demo`, two CPU cores, two minutes: 4,100 questions and answers from Python's documentation.

    python prepare.py --input=python-docs --kind=chat --hold_out=0.25 --out_dir=data/demo_chat --tokenizer_dir=data/demo
    python sft.py config/demo_sft.py

A quarter of all questions is left for demo_reward.py and demo_dpo.py.
"""

out_dir = "out/demo_sft"
init_from = "out/demo"
data = "data/demo_chat"
compile = False  # a fresh machine may have no C++ compiler
block_size = 256
batch_size = 16
learning_rate = 1e-3
warmup_steps = 10
eval_steps = 0
eval_new_tokens = 64
log_every = 20
sample_prompts = "What does the function math.gcd do?|What does the method list.append do?"
