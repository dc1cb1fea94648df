"""What can be tried with nothing at hand?

In: the Python installation and the texts in this folder. Out: documents, conversations and
preference pairs. Read python_docs (documents), python_talks (conversations and pairs made from
them), then bilingual (what the demo learns beside them, in English and Chinese). debug_data and
debug_model make what config/debug*.py use.
"""
