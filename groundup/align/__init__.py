"""What is a better answer, and how is it learnt?"""
