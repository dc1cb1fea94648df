r"""The reward model of `make demo-chat`: it tells right from wrong descriptions of functions.

    python sample.py --init_from=out/demo_sft --prompts=data/demo_chat/held_out.jsonl \
        --out=data/demo_answers.jsonl --n=4 --max_new_tokens=96 --batch_size=64
    python prepare.py --input='docs: python-docs; own: data/demo_answers.jsonl' \
        --kind=preference --pair_by=dataset,length_within=0.2 --val_fraction=0.1 \
        --prompts_from=data/demo_chat/held_out.jsonl --out_dir=data/demo_pairs
    python reward.py config/demo_reward.py

Training takes a minute on two CPU cores. The pairs are about questions that demo_sft.py left out.
Of 257 held-out ones 78.2 % come out right; the longer answer wins 54.9 %.
"""

out_dir = "out/demo_reward"
init_from = "out/demo_sft"
data = "data/demo_pairs"
compile = False  # a fresh machine may have no C++ compiler
block_size = 256
batch_size = 16
epochs = 2.0  # of so few pairs
learning_rate = 5e-4
center = 0.01
log_every = 20
