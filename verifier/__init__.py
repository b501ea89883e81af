"""Who decides: the target model, tree verification and drafter-invariant sampling."""
