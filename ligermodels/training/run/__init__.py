"""What surrounds the training loop: a run's folder and status, stopping, resuming and publishing it."""
