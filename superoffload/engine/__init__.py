"""An engine steps buckets during backward and ends the step by one verdict. It knows no autograd."""
