"""Batching rules by name: who is admitted, who decodes, whose prompt is prefilled how far, who gives way."""
