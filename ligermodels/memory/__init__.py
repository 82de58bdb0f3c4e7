"""The memory that training and generation need, predicted from a model and a run's sizes."""
