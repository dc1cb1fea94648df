r"""26M parameters with 4,096 ids, 40M with 32,768; 0.5 G tokens.

    python pretrain.py config/small.py --data_dir=data/mine                     # 1 GPU
    torchrun --standalone --nproc_per_node=4 pretrain.py config/small.py \
        --data_dir=data/mine                                                    # 4 GPUs

The first run on a corpus of your own. On CPUs add --compile=False --total_batch_tokens=2048
--batch_size=1 --max_steps=5.
"""

out_dir = "out/small"
n_layer = 8
n_head = 8
n_kv_head = 4
n_embd = 512
block_size = 512
batch_size = 16
total_batch_tokens = 131_072
max_steps = 4000
learning_rate = 2e-3
min_lr = 2e-4
eval_every = 500
