"""What `make demo-chat` trains after the demo's chat model: a reward model, which learns to tell the right description
of a function from a wrong one. On one CPU core in two minutes.

    python sample.py --init_from=out/demo_sft --prompts=data/demo_chat/held_out.jsonl --out=data/demo_answers.jsonl \
        --n=4 --max_new_tokens=96 --batch_size=64
    python prepare.py --input='docs: python-docs; own: data/demo_answers.jsonl' --kind=preference --pair_by=dataset \
        --length_within=0.2 --prompts_from=data/demo_chat/held_out.jsonl --val_fraction=0.1 \
        --out_dir=data/demo_pairs
    python reward.py config/demo_reward.py

All pairs are about questions that config/demo_sft.py left out: 1,417 are made of the documentation, 1,535 of the
model's own answers, those of about the right length. Of 288 held-out pairs 83.7 % are told apart, where the longer
answer wins 50.7 %.
"""

out_dir = "out/demo_reward"
init_from = "out/demo_sft"
data = "data/demo_pairs"
compile = False  # a fresh machine may have no C++ compiler
block_size = 256
batch_size = 16
epochs = 2.0  # of so few pairs
learning_rate = 5e-4
warmup_fraction = 0.03
center = 0.01
eval_every = 100
save_every = 1000
log_every = 20
