"""A reward model from an instruction-tuned one of any size, on pairs of your own: the usual settings.

    torchrun --standalone --nproc_per_node=4 reward.py config/reward.py --init_from=out/sft --data=pairs.jsonl  # 4 GPUs
    python reward.py config/reward.py --init_from=out/sft --data=pairs.jsonl                                    # 1 GPU

64 pairs per step, one epoch. A model below 100M parameters takes a learning rate of 5e-5 to 5e-4, adapters
(--trainable=lora) 1e-4. On CPUs add --compile=False --total_batch_pairs=16.
"""

out_dir = "out/reward"
block_size = 1024
batch_size = 8
total_batch_pairs = 64
epochs = 1.0
learning_rate = 1e-5
warmup_fraction = 0.03
center = 0.01
eval_every = 50
