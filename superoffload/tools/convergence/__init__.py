"""Do several ranks converge as one process does? What `superoffload verify --ranks` and the convergence tests run."""
