"""What a call of the calculator looks like, before demo_tools.py.

    python tools/sums.py --out_dir=data/demo_tools
    python sft.py config/demo_tools_sft.py

The data are 3,000 conversations in which the calculator is called; it sees 600 of them. A model
learns the form of a call first and to copy numbers later: with fewer steps more is left to rl.py.
"""

out_dir = "out/demo_tools_sft"
init_from = "out/demo_sft"
data = "data/demo_tools/examples.jsonl"
val_fraction = 0.02
compile = False  # a fresh machine may have no C++ compiler
block_size = 160
pack = False
batch_size = 6
max_steps = 100
optimizer = "muon"
learning_rate = 3e-3
schedule = "constant"
warmup_steps = 5
eval_every = 50
eval_steps = 4
eval_answers = 0
log_every = 25
sample_prompts = ""
