"""The `superoffload` command and what only it needs: training, verification, measurements, diagnosis, planning."""
