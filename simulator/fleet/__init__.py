"""Many simulated cells behind the router and the scaling rules that serve."""
