"""What can be tried with nothing at hand?

In: the Python installation and a Chinese text in this folder. Out: documents, conversations and preference pairs.
Read python_docs (documents), then python_talks (conversations and pairs made from them).
"""
