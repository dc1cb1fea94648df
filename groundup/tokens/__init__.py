"""How do rows become batches?"""
