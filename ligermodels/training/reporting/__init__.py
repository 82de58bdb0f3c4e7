"""Monitoring and logging of a run: metrics, loggers, curves, traces, validation loss and accuracy on questions."""
