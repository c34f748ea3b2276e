"""One step over buckets: speculated during backward, decided by one verdict. Knows no autograd and no framework."""
