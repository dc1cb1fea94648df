"""The parts of the toolkit, by subject; the stages at the root are made of them.

Each folder answers a question, and its own docstring says which file to read first. From below:

    files     What do these files say?
    tokens    How do rows become batches?
    kernels   How is it made fast?
    text      Which documents are worth keeping?
    train     What does every training run share?
    generate  How does a model write?
    align     What is a better answer, and how is it learned?
    scores    How good is it?
    demo      What can be tried with nothing at hand?

errors.py ends every script in one line; compile_c.py builds the C sources of kernels and tokens.
"""
