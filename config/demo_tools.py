r"""GRPO with a tool: the model learns to leave sums of three-digit numbers to a calculator.

    python tools/sums.py --out_dir=data/demo_sums
    python sft.py config/demo_sums.py
    python rl.py config/demo_tools.py                                # --seed=1, 2, 3: other runs
    python sample.py --init_from=out/demo_tools --tools=groundup/demo/calculator.py
"""

out_dir = "out/demo_tools"
init_from = "out/demo_sums"
data = "data/demo_sums/questions.jsonl"
val_data = "data/demo_sums/held_out.jsonl"
tools = "groundup/demo/calculator.py"
reward = "tools/sums.py:correct"
unfinished_reward = 0.0  # as a wrong answer
max_new_tokens = 96
compile = False  # a fresh machine may have no C++ compiler
block_size = 128
group_size = 4
filter_groups = 2  # learn from prompts that it answers now right, now wrong
prompts_per_step = 32
batch_size = 16
draw_batch_size = 64
max_steps = 16
optimizer = "muon"
learning_rate = 1e-3
schedule = "constant"
warmup_steps = 2
kl_coef = 0.0
eval_prompts = 0
log_every = 4
