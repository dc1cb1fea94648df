"""How does a model write?"""
