"""What `make demo-chat` trains after the demo's chat model: a reward model, which learns to tell the right description
of a function from a wrong one. On two CPU cores in two minutes.

    python sample.py --init_from=out/demo_sft --prompts=data/demo_chat/held_out.jsonl --out=data/demo_answers.jsonl \
        --n=4 --max_new_tokens=96 --batch_size=64
    python prepare.py --input='docs: python-docs; own: data/demo_answers.jsonl' --kind=preference --pair_by=dataset \
        --length_within=0.2 --val_fraction=0.05 --out_dir=data/demo_pairs
    python reward.py config/demo_reward.py

Of held-out pairs 80 % are told apart, where the longer answer wins 50 to 55 %: nearly all that stop early or repeat
themselves. The description of something else in the same module is hardly told from the right one by so small a model.
"""

out_dir = "out/demo_reward"
init_from = "out/demo_sft"
data = "data/demo_pairs"
compile = False  # a fresh machine may have no C++ compiler
block_size = 256
batch_size = 16
epochs = 1.0
learning_rate = 5e-4
warmup_fraction = 0.03
center = 0.01
eval_every = 100
save_every = 1000
log_every = 20
