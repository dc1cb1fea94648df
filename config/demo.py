r"""What `make demo` trains, on two CPU cores in six minutes: Python's documentation and sources, and 70 KB of Chinese.

    python prepare.py --out_dir=data/demo --vocab_size=4096 \
        --input='en: python-docs, weight=0.97; zh: groundup/demo/zh_sample.txt, txt_split=blank, weight=0.03'
    python pretrain.py config/demo.py
"""

out_dir = "out/demo"
data_dir = "data/demo"
compile = False  # a fresh machine may have no C++ compiler
n_head = 4
n_kv_head = 2
n_embd = 256
max_steps = 650
warmup_steps = 30
learning_rate = 4e-3
min_lr = 0.0
schedule = "wsd"
decay_fraction = 0.4
eval_every = 100
eval_steps = 16
save_every = 200
log_every = 20
sample_prompts = "The|\u6625\u5929"  # spring
