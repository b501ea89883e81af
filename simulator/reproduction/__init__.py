"""The figures of the papers, in the simulator: what is run, what is claimed, and the report."""
