"""How is it made fast? Attention, the loss, and the C code that a CPU runs.

In: queries, keys and values; hidden states and targets. Out: attention; losses, log-probabilities.
Read attention (what a query may see, and the ways to compute it), then cross_entropy (the loss
without ever holding all the logits) and distillation (the loss with a teacher). Each has a plain
reference of a few lines beside it. attention calls attention.c on a CPU, decoding step.c.
"""
