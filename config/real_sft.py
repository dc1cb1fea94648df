r"""`make demo-real`, two CPU cores, three minutes: SmolLM2-135M-Instruct learns by adapters.

    python sft.py config/real_sft.py --sample_prompts='What does the method str.isidentifier do?'
    python sft.py config/real_sft.py --data=chat.jsonl --out_dir=out/faq --max_steps=0 \
        --epochs=5 --sample_prompts='Hello'                     # with conversations of your own

It learns to answer questions about Python as its documentation does. The two questions of `make
demo-real`, one of them in Chinese, are in no training data; they are answered before the first step
and after the last.
"""

out_dir = "out/real_sft"
init_from = "out/smollm2"
data = "data/real_chat"
trainable = "lora"
compile = False  # a fresh machine may have no C++ compiler
block_size = 256
batch_size = 8
learning_rate = 1e-3
warmup_steps = 5
max_steps = 40
eval_steps = 0
eval_new_tokens = 64
log_every = 10
