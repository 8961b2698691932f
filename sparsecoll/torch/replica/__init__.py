"""One rank among the others: its copy of the model, the calls and small messages that keep all copies the same."""
