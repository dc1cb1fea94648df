r"""Instruction tuning of all weights, a model of any size.

    python sft.py config/sft.py --init_from=out/small --data=chat.jsonl         # 1 GPU
    torchrun --standalone --nproc_per_node=4 sft.py config/sft.py \
        --init_from=out/small --data=chat.jsonl                                 # 4 GPUs

Below 100M parameters: learning rates of 1e-4 to 1e-3. On CPUs add --compile=False
--total_batch_tokens=8192 --batch_size=8.
"""

batch_size = 16
total_batch_tokens = 131_072
eval_answers = 32
