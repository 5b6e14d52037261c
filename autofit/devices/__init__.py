"""What it runs on, as facts: a device that was asked, a card of the table, what the driver says."""
