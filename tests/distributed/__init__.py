"""Several ranks: what they hold, how they stay together, and what a lost one leaves."""
