r"""Tinyshakespeare on two CPU cores in 76 to 85 s; 1.451 to 1.462 nats per character.

    python prepare.py --input=input.txt --out_dir=data/shakespeare --vocab_size=1024 \
        --val_fraction=0.1
    python pretrain.py config/shakespeare.py

(nanoGPT's CPU run: 1.886.) input.txt is char-rnn's 1.1 MB; validation is its last tenth, as in
nanoGPT. Nats per character are 0.693 times the bits per byte printed here.
"""

out_dir = "out/shakespeare"
data_dir = "data/shakespeare"
compile = False  # a compiler's start would cost more than it gains in a minute
n_layer = 2  # few and wide: a step of so small a model is mostly overhead of its many parts
n_head = 4
n_embd = 192
rope_theta = 100.0  # shorter wavelengths, for rows of 64 tokens
tie_embeddings = False  # 0.02 less loss at step 75, 0.005 at the end
block_size = 64  # short rows learn sooner
qk_norm = True
max_steps = 900
warmup_steps = 5
learning_rate = 5e-3
momentum = 0.85
weight_decay = 0.5  # of a text that is seen 2.4 times
min_lr = 0.0
schedule = "linear"
eval_every = 50
eval_steps = 0
save_every = 300
log_every = 50
