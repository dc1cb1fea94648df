r"""PPO on all weights of a model of any size, with a critic that begins as its reward model.

    python rl.py config/ppo.py --init_from=out/sft --data=chats.jsonl --reward=out/reward \
        --critic_from=out/reward

Four models are in memory: policy, reference, reward model, critic. `explained`, the share of the
returns' variance that the critic predicts, should rise above 0.3 within ten steps; else raise
value_learning_rate. Below 100M parameters: learning rates of 1e-5 to 1e-4. On CPUs add
--compile=False --prompts_per_step=64 --draw_batch_size=32.
"""

out_dir = "out/ppo"
algorithm = "ppo"
group_size = 1
prompts_per_step = 256
batch_size = 16
epochs_per_step = 4
minibatches = 2
normalise_rewards = True
schedule = "constant"
warmup_steps = 10
kl_coef = 0.05
