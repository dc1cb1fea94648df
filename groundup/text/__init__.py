"""Decide which documents to keep, for prepare.py.

In: files of documents, conversations or pairs. Out: a prepared directory with tokens or rows, and a report. Read first
recipe; then what works on one document: cleaning, quality, decontaminate, documents, pipeline; then what compares and
writes all of them: dedup, selection, report. Read prepared_dir, show and answer_pairs when you need them.
"""
