"""How good is it?

In: a model and files of texts, questions, conversations, pairs or answers. Out: dicts of
figures. Read likelihood (log-probabilities of given tokens), domains (perplexity), choices
(exams), rows (a score for each row of a file), text_metrics (BLEU, ROUGE), judging (rewards, win
rates), client (endpoints), trained_on (what a model has seen of all this) and tables (results as
text, also side by side).
"""
