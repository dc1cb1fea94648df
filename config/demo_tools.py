r"""GRPO with a tool: a model of 5 million parameters learns to call a calculator.

    python tools/sums.py --out_dir=data/demo_tools
    python sft.py config/demo_tools_sft.py
    python rl.py config/demo_tools.py                               # --seed=1, 2, 3: other runs
    python sample.py --init_from=out/demo_tools --tools=groundup/demo/calculator.py

"""

out_dir = "out/demo_tools"
init_from = "out/demo_tools_sft"
data = "data/demo_tools/questions.jsonl"
val_data = "data/demo_tools/held_out.jsonl"
tools = "groundup/demo/calculator.py"
reward = "tools/sums.py:correct"
unfinished_reward = 0.0  # as a wrong answer
max_new_tokens = 104
compile = False  # a fresh machine may have no C++ compiler
block_size = 192
group_size = 8
prompts_per_step = 8
filter_groups = 2  # learn from prompts that it answers now right, now wrong
batch_size = 32
draw_batch_size = 32  # a row that ends makes room for the next answer
max_steps = 60
learning_rate = 2e-4
schedule = "constant"
warmup_steps = 5
kl_coef = 0.0
eval_prompts = 0
eval_every = 30
log_every = 10
