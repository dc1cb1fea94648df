r"""A reward model of any size, one epoch of pairs.

    python reward.py config/reward.py --init_from=out/sft --data=pairs.jsonl    # 1 GPU
    torchrun --standalone --nproc_per_node=4 reward.py config/reward.py \
        --init_from=out/sft --data=pairs.jsonl                                  # 4 GPUs

Below 100M parameters: learning rates of 5e-5 to 5e-4; adapters (--trainable=lora): 1e-4. On CPUs
add --compile=False --total_batch_pairs=16.
"""

total_batch_pairs = 64
center = 0.01
eval_every = 50
