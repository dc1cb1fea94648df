r"""What `make demo` trains, on two idle CPU cores in two and a half minutes.

    python prepare.py --out_dir=data/demo --vocab_size=6144 --pattern=zh \
        --input='en: demo-en, weight=0.5; zh: demo-zh, weight=0.5'
    python pretrain.py config/demo.py --sample_prompts='One evening'

It learns from this repository's own stories and knowledge in English and Chinese, and from the
prose of Python's documentation. The Chinese text is small: the warning that it is seen six times is
expected.
"""

out_dir = "out/demo"
data_dir = "data/demo"
compile = False  # a fresh machine may have no C++ compiler
n_layer = 4
n_head = 4
n_kv_head = 2
n_embd = 256
max_steps = 240
warmup_steps = 20
learning_rate = 4e-3
min_lr = 0.0
schedule = "wsd"
decay_fraction = 0.4
eval_every = 60
eval_steps = 16
save_every = 60
log_every = 20
