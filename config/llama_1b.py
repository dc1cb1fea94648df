"""1.1G parameters, the shape of TinyLlama (arXiv:2401.02385); 22 G tokens, 20 per parameter.

python pretrain.py config/llama_1b.py --plan_only=True            # needs neither data nor memory
torchrun --standalone --nproc_per_node=8 pretrain.py config/llama_1b.py
"""

out_dir = "out/llama_1b"
data_dir = "data/llama_1b"
vocab_size = 32_768
n_layer = 22
n_head = 32
n_kv_head = 4
n_embd = 2048
ffn_dim = 5632
block_size = 2048
tie_embeddings = False
batch_size = 8
total_batch_tokens = 2_097_152
max_steps = 10_500
warmup_steps = 500
learning_rate = 6e-4
min_lr = 0.0
schedule = "wsd"
eval_every = 500
eval_steps = 64
