"""Decide which documents to keep, for prepare.py.

In: files of documents, conversations or pairs. Out: a prepared directory with tokens or rows, and a report. Read first
recipe, inputs and units; then what works on one document: cleaning, quality, decontaminate, documents, pipeline; then
what compares and writes all of them: dedup, selection, writing, report. Read processes, prepared_dir, show and
answer_pairs when you need them.
"""
