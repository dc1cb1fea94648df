"""Decide which documents to keep, for prepare.py and any other pipeline.

In: files of documents, conversations or pairs. Out: a prepared directory with tokens or rows, and a
report. Read recipe (settings, sources) and inputs (files) first, then the steps in their order:
clean, quality, dedup and decontaminate look at one document; unit applies them to a part of the
input; select compares all documents and writes the splits; report says what happened. Read workers,
prepared_dir, show and answer_pairs when you need them.

What another pipeline calls per document: clean.clean, quality.Rules.check, decontaminate.Evals,
dedup.exact_key, dedup.units with dedup.signatures, or all of these by unit.Judge. What it calls on
all documents: dedup.first_copies, dedup.near_duplicates.
"""
