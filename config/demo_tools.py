r"""GRPO with a tool: sums with a calculator, for a model of 5 million parameters.

    python tools/sums.py --out_dir=data/demo_tools
    python sft.py config/demo_tools_sft.py
    python rl.py config/demo_tools.py                               # --seed=1, 2, 3: other runs
    python sample.py --init_from=out/demo_tools --tools=groundup/demo/calculator.py
    python serve.py --init_from=out/demo_tools --tools=groundup/demo/calculator.py

What is asked are sums of two numbers of three digits, in English and Chinese. sft.py has shown the
form of a call; to be right a model must copy six digits into the call and the result into its
answer. The reward is 1 for the right sum, and as much again for the share of digits copied right,
so that nearly right answers to a prompt differ too. How far it comes is still to be measured.
"""

out_dir = "out/demo_tools"
init_from = "out/demo_tools_sft"
data = "data/demo_tools/questions.jsonl"
val_data = "data/demo_tools/held_out.jsonl"
tools = "groundup/demo/calculator.py"
reward = "tools/sums.py:correct,tools/sums.py:copied"
unfinished_reward = 0.0  # as a wrong answer
max_new_tokens = 104
compile = False  # a fresh machine may have no C++ compiler
block_size = 192
group_size = 8
prompts_per_step = 4
filter_groups = 1  # learn from prompts that it answers now right, now wrong
batch_size = 32
draw_batch_size = 32  # a row that ends makes room for the next answer
max_steps = 40
learning_rate = 4e-4
schedule = "constant"
warmup_steps = 5
kl_coef = 0.0
eval_prompts = 0
eval_every = 20
log_every = 10
