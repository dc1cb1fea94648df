"""All weights of an instruction-tuned model of any size, on preference pairs of your own: the usual settings.

    torchrun --standalone --nproc_per_node=4 dpo.py config/dpo.py --init_from=out/sft --data=pairs.jsonl    # 4 GPUs
    python dpo.py config/dpo.py --init_from=out/sft --data=pairs.jsonl                                      # 1 GPU
    python dpo.py config/dpo.py --trainable=lora --learning_rate=1e-5 --reference=adapter_off ...           # adapters

64 pairs per step, once through all of them. Where logps/chosen falls by more than a few nats, raise beta or set
nll_weight=0.2. A model below 100M parameters takes a learning rate of 5e-6 to 5e-5. On CPUs add --compile=False
--total_batch_pairs=16 --batch_size=4.
"""

out_dir = "out/dpo"
block_size = 1024
batch_size = 8
total_batch_pairs = 64
epochs = 1.0
learning_rate = 1e-6
warmup_fraction = 0.1
eval_every = 50
