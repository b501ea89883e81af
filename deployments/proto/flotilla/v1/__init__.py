"""See `deployments.proto`."""
