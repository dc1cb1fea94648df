r"""Adapters beside all matrices of the blocks, the rest frozen: a model of billions on one GPU.

    python sft.py config/lora.py --init_from=path/to/Qwen3-0.6B --data=chat.jsonl
    python sft.py config/lora.py --init_from=out/small --data=chat.jsonl \
        --learning_rate=1e-3                                                    # below 100M
    python tools/merge.py --init_from=out/lora --out_dir=out/lora_merged        # a plain model

Checkpoints hold the adapters in peft's format. On a CPU add --compile=False
--total_batch_tokens=8192, or see config/real_sft.py.
"""

out_dir = "out/lora"
trainable = "lora"
total_batch_tokens = 32_768
learning_rate = 2e-4
