"""The `superoffload` command trains, verifies, measures, diagnoses, plans and reports."""
