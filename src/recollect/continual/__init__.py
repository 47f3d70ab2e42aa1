"""Continual learning by compress-then-recall: distil every task as it streams by, recall the right memory when asked.

config.py: every choice, and the paper's for each stream. streams.py: tasks, batch by batch, seen once. buffer.py: what may
be kept meanwhile. compress.py: the distillation of tasks, side by side where that is faster. learners.py: ours and its
baselines on one protocol. metrics.py: RA, LA, BTI and BWT from one accuracy matrix. run.py: seeds and learners, resumable.
"""
