r"""Continued pretraining: a public model learns a new field and more Chinese, and forgets little.

    python tokenizer.py --extend=path/to/llama --input=field.jsonl --vocab_size=40000 \
        --out_dir=data/zh_tokenizer
    python prepare.py --tokenizer_dir=data/zh_tokenizer --out_dir=data/field \
        --input='field: field.jsonl, weight=0.15; general: wiki.jsonl, weight=0.85'
    python pretrain.py config/continue.py --init_from=path/to/llama --data_dir=data/field

Trains the embedding and the head, which have rows for the new tokens, and adapters of rank 8 in the
blocks. 85 % of the tokens are general text, as in the first training. tools/merge.py makes a plain
model of the result.
"""

out_dir = "out/continue"
data_dir = "data/field"
trainable = "embed,lm_head,lora"
lora_rank = 8
block_size = 1024
batch_size = 8
total_batch_tokens = 131_072
optimizer = "adamw"
learning_rate = 2e-4
min_lr = 2e-5
weight_decay = 0.01
eval_every = 200
