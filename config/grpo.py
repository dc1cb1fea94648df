r"""GRPO on all weights of a model of any size.

    python rl.py config/grpo.py --init_from=out/sft --data=maths.jsonl \
        --reward=rules.py:exact --kl_coef=0                                     # 1 GPU
    torchrun --standalone --nproc_per_node=4 rl.py config/grpo.py \
        --init_from=out/sft --data=chats.jsonl --reward=out/reward              # 4 GPUs
    python rl.py config/grpo.py --trainable=lora --learning_rate=1e-5 ...       # adapters

With a reward model keep kl_coef at 0.02 to 0.1 and read answers: the model learns to please it in
the end. Where flat_groups is above 0.5, most prompts are too easy or too hard: filter_groups=2.
Below 100M parameters: learning rates of 1e-5 to 1e-4. On CPUs add --compile=False
--prompts_per_step=8 --draw_batch_size=32.
"""

out_dir = "out/grpo"
batch_size = 16
schedule = "constant"
warmup_steps = 10
