"""`python -m flashcourse bench`: attention kernels against each other, correctness first.

Every candidate of a shape is checked on the very tensors it is then timed on. Candidates are timed
in turns, because a GPU's clock drifts, and nobody follows the same one twice, because what ran
before leaves traces: only ratios from one run mean something.
"""
