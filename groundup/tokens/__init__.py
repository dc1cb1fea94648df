"""How do rows become batches?

In: text, conversations, pairs or prompts of groundup/files or prepare.py. Out: micro-batches of ids in a seeded order.
Read token_files, mixture, corpus, batches; packing; row_reader, chat_files, conversations, pairs, labelled, prompts.
bpe, foreign and templates are parts of tokenizer.py.
"""
