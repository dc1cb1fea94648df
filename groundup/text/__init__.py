"""Which documents are worth keeping?

In: files of documents, conversations or pairs. Out: a prepared directory with tokens or rows, and a report. Read
inputs, units, then what happens to one document: cleaning, quality, decontaminate, documents, pipeline; to all of
them: dedup, selection, difficulty, writing, report; and around it recipe, processes, prepared_dir, show, answer_pairs.
"""
