"""124M parameters, the shape of GPT-2 small, on one large GPU.

python prepare.py --input=CORPUS --out_dir=data/gpt2 --vocab_size=50304
python pretrain.py config/gpt2.py              # --plan_only=True prints FLOPs, memory and time

2.5 G tokens, 20 per parameter (arXiv:2203.15556).
"""

out_dir = "out/gpt2"
data_dir = "data/gpt2"
vocab_size = 50_304
n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
batch_size = 32
total_batch_tokens = 524_288
max_steps = 4800
warmup_steps = 250
learning_rate = 1.5e-3
min_lr = 0.0
schedule = "wsd"
eval_steps = 64
