"""`python -m flashcourse bench`: attention kernels against each other, correctness first.

Every candidate of a shape is checked on the very tensors it is then timed on. Candidates are timed
in turns, in an order that rotates, because a GPU's clock drifts: only ratios from one run mean
something.
"""
