"""What do these files say?

In: raw files (text, JSON, CSV, parquet, compressed). Out: documents, conversations and preference pairs, and in which
split each belongs. Read readers, then streams (bytes) and records (containers) for how files are taken apart,
row_formats and text_keys for what a row means, usable for whether it can be trained on; splits; text_mix; answer_files
(what sample.py writes). untrusted reads what belongs to a checkpoint from elsewhere.
"""
