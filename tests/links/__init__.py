"""Links to devices."""
