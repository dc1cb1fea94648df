"""What a call of the calculator looks like, before demo_tools.py. Two CPU cores, a minute.

    python tools/sums.py --out_dir=data/demo_tools
    python sft.py config/demo_tools_sft.py

The data are 300 conversations in which the calculator is called.
"""

out_dir = "out/demo_tools_sft"
init_from = "out/demo_sft"
data = "data/demo_tools/examples.jsonl"
val_fraction = 0.1
compile = False  # a fresh machine may have no C++ compiler
block_size = 160
pack = False
batch_size = 32
max_steps = 20
learning_rate = 1e-3
warmup_steps = 10
eval_every = 20
eval_answers = 0
sample_prompts = ""
