"""Free-benchmark: find wrong and ill-conditioned operators without golden data.

Every chosen operator call is run once more on inputs that were perturbed a little (or in a higher precision, or on the
CPU), and the two results are compared. What counts as too far apart follows from the perturbation that was made and
from the operator's own sensitivity, not from the dtype alone.
"""
