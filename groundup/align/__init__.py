"""What is a better answer, and how is it learned?

In: a tuned model with preference pairs (dpo.py, reward.py) or prompts (rl.py, sample.py). Out:
losses, rewards and advantages of answers. Read losses, reward_model, best_of; then rewards,
rollouts, policy_gradient, critic."""
