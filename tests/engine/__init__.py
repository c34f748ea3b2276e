"""The engine: buckets, their fates, schedules and verdicts, without autograd."""
