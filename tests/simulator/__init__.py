"""The seeded simulator: random schedules of gradients, threads and copies in virtual time, beside a plain model."""
