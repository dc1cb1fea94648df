"""All weights of a model of any size, on conversations of your own: the usual settings.

    torchrun --standalone --nproc_per_node=4 sft.py config/sft.py --init_from=out/small --data=chat.jsonl    # 4 GPUs
    python sft.py config/sft.py --init_from=out/small --data=chat.jsonl                                      # 1 GPU

131,072 tokens per step. A model below 100M parameters takes a learning rate of 1e-4 to 1e-3. On CPUs add
--compile=False --total_batch_tokens=8192 --batch_size=8.
"""

out_dir = "out/sft"
block_size = 1024
batch_size = 16
total_batch_tokens = 131_072
epochs = 3.0
learning_rate = 2e-5
warmup_fraction = 0.03
eval_every = 100
eval_answers = 32
