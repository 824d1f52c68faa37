"""Tasks: reading them from files and environments, and the order in which their episodes are run."""
