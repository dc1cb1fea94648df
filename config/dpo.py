r"""Preference tuning of all weights, a model of any size.

    python dpo.py config/dpo.py --init_from=out/sft --data=pairs.jsonl          # 1 GPU
    torchrun --standalone --nproc_per_node=4 dpo.py config/dpo.py \
        --init_from=out/sft --data=pairs.jsonl                                  # 4 GPUs
    python dpo.py config/dpo.py --trainable=lora --learning_rate=1e-5 \
        --reference=adapter_off ...                                             # adapters

Where logps/chosen falls by more than a few nats, raise beta or set nll_weight=0.2. Below 100M
parameters: learning rates of 5e-6 to 5e-5. On CPUs add --compile=False --total_batch_pairs=16
--batch_size=4.
"""

batch_size = 8
total_batch_pairs = 64
eval_every = 50
