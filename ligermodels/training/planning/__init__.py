"""From settings to a plan: defaults, contradictions, memory and time of a step, the parts that are trained."""
