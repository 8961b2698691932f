"""Counters of messages, and times by kind of work."""
