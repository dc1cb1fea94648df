r"""The chat model of `make demo`, two idle CPU cores, a minute and a half.

    python prepare.py --input='docs: python-docs, rules=length=..120; en: demo-en; zh: demo-zh' \
        --kind=chat --hold_out=0.25 --out_dir=data/demo_chat --tokenizer_dir=data/demo
    python sft.py config/demo_sft.py --epochs=2.2 --sample_prompts='What is len for?'
    python evaluate.py --init_from=out/demo_sft --tasks=generation \
        --data=groundup/demo/questions.jsonl                                    # 30 unseen ones

It learns from 6,700 questions and answers about Python and everyday things, in English and Chinese.
A quarter of all questions is left for demo_reward.py and demo_dpo.py.
"""

out_dir = "out/demo_sft"
init_from = "out/demo"
data = "data/demo_chat"
val_fraction = 0.1  # of a file of yours; data/demo_chat has a validation split
compile = False  # a fresh machine may have no C++ compiler
block_size = 256
batch_size = 8
optimizer = "muon"
learning_rate = 2.4e-3
warmup_steps = 10
eval_steps = 0
eval_new_tokens = 64
log_every = 20
save_every = 100  # with each evaluation, so that the best one is kept
