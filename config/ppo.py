"""PPO on all weights of an instruction-tuned model of any size, with a critic that begins as its reward model.

    python rl.py config/ppo.py --init_from=out/sft --data=chats.jsonl --reward=out/reward \
        --critic_from=out/reward                                                                       # 1 GPU
    torchrun --standalone --nproc_per_node=4 rl.py config/ppo.py --init_from=out/sft --data=chats.jsonl \
        --reward=out/reward --critic_from=out/reward                                                   # 4 GPUs

256 prompts with one answer each per step; four passes over them in two updates each. Four models are in memory:
policy, reference, reward model, critic. `explained`, the share of the returns' variance that the critic foresees,
should rise above 0.3 within some ten steps; else raise value_learning_rate. A model below 100M parameters takes
learning rates of 1e-5 to 1e-4. On CPUs add --compile=False --prompts_per_step=64 --draw_batch_size=32.
"""

out_dir = "out/ppo"
algorithm = "ppo"
block_size = 1024
max_new_tokens = 256
group_size = 1
prompts_per_step = 256
batch_size = 16
epochs = 1.0
epochs_per_step = 4
minibatches = 2
normalise_rewards = True
learning_rate = 1e-6
value_learning_rate = 1e-5
schedule = "constant"
warmup_steps = 10
warmup_fraction = 0.0
kl_coef = 0.05
eval_every = 20
