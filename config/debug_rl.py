"""Run all of rl.py in seconds on a laptop's CPU, with its own prompts and tiny model.

python rl.py config/debug_rl.py                                             # --algorithm=ppo

An answer that ends gets 1, and a little less the longer it is: a model of random weights learns to
end.
"""

from groundup.demo import debug_data, debug_model

debug_data.make_debug_rows("data/debug/rl.jsonl", debug_data.debug_prompts)
debug_model.make_debug_model("data/debug/model")

out_dir = "out/debug_rl"
init_from = "data/debug/model"
data = "data/debug/rl.jsonl"
val_fraction = 0.1
reward = "config/debug_rl.py:_brief"
unfinished_reward = 0.0
device = "cpu"
dtype = "float32"
compile = False
block_size = 256
max_new_tokens = 24
group_size = 8
prompts_per_step = 8
batch_size = 16
draw_batch_size = 32
minibatches = 2
max_steps = 30
warmup_steps = 2
learning_rate = 3e-3
value_learning_rate = 3e-3
kl_coef = 0.0
eval_every = 15
eval_prompts = 16
save_every = 15
log_every = 5


def _brief(prompt: list[dict], answer: str, row: dict) -> float:
    """From 1 for an empty answer down to 0.5 for one of 1000 characters."""
    return 1 - min(len(answer), 1000) / 2000
