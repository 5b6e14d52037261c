"""The user's own script, run as it is, with the Trainer it builds taken over for a trial: `run` is the door."""
