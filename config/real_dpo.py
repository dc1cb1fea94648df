r"""The end of `make demo-real`, two CPU cores, a minute and a half: tuning by preferences.

    python dpo.py config/real_dpo.py
    python dpo.py config/real_dpo.py --init_from=out/faq_merged --data=pairs.jsonl \
        --out_dir=out/faq_dpo                                   # after config/real_sft.py, own pairs

The documentation's own answers are preferred to the model's.
"""

out_dir = "out/real_dpo"
init_from = "out/real_merged"
data = "data/real_pairs"
trainable = "lora"
compile = False  # a fresh machine may have no C++ compiler
block_size = 256
batch_size = 8
learning_rate = 1e-4
nll_weight = 0.5  # keeps the chosen answers likely
eval_steps = 0
log_every = 10
