"""Which documents are worth keeping?"""
