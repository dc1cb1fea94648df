"""GRPO on all weights of an instruction-tuned model of any size: the usual settings.

    python rl.py config/grpo.py --init_from=out/sft --data=maths.jsonl --reward=rules.py:exact --kl_coef=0     # 1 GPU
    torchrun --standalone --nproc_per_node=4 rl.py config/grpo.py --init_from=out/sft --data=chats.jsonl \
        --reward=out/reward                                                                                     # 4 GPUs
    python rl.py config/grpo.py --trainable=lora --reference=adapter_off --learning_rate=1e-5 ...             # adapters

32 prompts with 8 answers each per step, one update from them. With a reward model keep kl_coef at 0.02 to 0.1, and read
answers: what is learnt last is how to please it. A reward that cannot be cheated wants kl_coef=0. Where flat_groups is
above 0.5, most prompts are too easy or too hard: filter_groups=2. A model below 100M parameters takes a learning rate
of 1e-5 to 1e-4. On CPUs add --compile=False --prompts_per_step=8 --draw_batch_size=32.
"""

out_dir = "out/grpo"
algorithm = "grpo"
block_size = 1024
max_new_tokens = 256
group_size = 8
prompts_per_step = 32
batch_size = 16
epochs = 1.0
learning_rate = 1e-6
schedule = "constant"
warmup_steps = 10
warmup_fraction = 0.0
kl_coef = 0.04
eval_every = 20
