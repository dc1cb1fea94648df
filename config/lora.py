"""Adapters of rank 16 beside all matrices of the blocks, the rest frozen: a model of billions on one GPU.

    python sft.py config/lora.py --init_from=path/to/Qwen3-0.6B --data=chat.jsonl
    python sft.py config/lora.py --init_from=out/small --data=chat.jsonl --learning_rate=1e-3    # below 100M
    python tools/merge.py --init_from=out/lora --out_dir=out/lora_merged                           # a plain model again

Checkpoints hold the adapters alone, in the format of peft. On CPUs add --compile=False --total_batch_tokens=8192.
"""

out_dir = "out/lora"
trainable = "lora"
lora_rank = 16
lora_alpha = 32.0
block_size = 1024
batch_size = 8
total_batch_tokens = 32_768
epochs = 3.0
learning_rate = 2e-4
warmup_fraction = 0.03
eval_every = 100
