"""How do rows become batches?

In: text, conversations, pairs or prompts of groundup/files or prepare.py. Out: micro-batches of ids
in a seeded order.

Text, for pretrain.py: read batches (the loader, the sources), mixture (which sample comes next) and
token_files; token_writer and packing write what these read. Rows, for sft, dpo, reward and rl:
rows, then conversations, pairs, prompts. Tokenizers: text_tokenizer and engines; for conversations
also spans, templates and sandbox; bpe and training make new ones, coverage says whether one knows
the data's characters.
"""

IGNORE = -100  # a target with this value is not trained on
# In a rendered conversation they stand around what the assistant says. Unicode's noncharacters: no
# text that is meant to be read holds them.
BEGIN, END = "\ufdd1", "\ufdd2"
