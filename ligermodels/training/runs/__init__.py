"""What surrounds the training loop: a run's folder, settings and plan, resuming and stopping it."""
