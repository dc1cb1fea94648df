"""What `make demo` goes on to: the demo model learns to answer questions about Python, from its documentation. On two
CPU cores in two minutes.

    python prepare.py --input=python-docs --kind=chat --hold_out=0.25 --out_dir=data/demo_chat --tokenizer_dir=data/demo
    python sft.py config/demo_sft.py
    python sample.py --init_from=out/demo_sft                                  # a chat

Some 4,600 questions and answers, each about another function, class or topic. A quarter of all questions is left for
config/demo_reward.py and demo_dpo.py: this model never sees them.
"""

out_dir = "out/demo_sft"
init_from = "out/demo"
data = "data/demo_chat"
compile = False  # a fresh machine may have no C++ compiler
block_size = 256
batch_size = 16
epochs = 3.0
learning_rate = 1e-3
warmup_steps = 10
warmup_fraction = 0.0
eval_every = 100
eval_steps = 0
eval_answers = 16
eval_new_tokens = 64
save_every = 1000
log_every = 20
sample_prompts = "What does the function math.gcd do?|What does the method list.append do?"
