"""The cell: configuration, scheduler core, policies, placement and Ray actors."""
